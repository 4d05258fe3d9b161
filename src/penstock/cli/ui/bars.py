"""Show the progress of long work on stderr: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from penstock.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

QUIET_S = 5.0  # shorter work prints no line
REMINDER_INTERVAL_S = 15.0  # between two lines about the same work
_MIN_BYTE_TOTAL = 1 << 20  # larger totals are bytes: nothing else that we count gets so large


class ProgressBars:
    """A `penstock.progress.Progress` that shows one piece of work at a time; as a context manager it clears the bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._console: Console | None = None  # shared by all bars, so that lines printed through it stay above the next bar too
        self._bar: RichProgress | None = None
        self._what = ""  # the current work
        self._due = 0.0  # when its next plain line may be printed
        self._unfinished = False  # whether the last plain line is about work that is not done

    def __call__(self, what: str, done: int, total: int) -> None:
        if 0 < total <= done:
            if self._unfinished:
                self._print_line(what, done, total)  # otherwise the work would seem to have stopped at the last line
            self.clear()
            return
        is_new = what != self._what
        self._what = what
        if self._terminal:
            self._draw(is_new, done, total)
        else:
            self._write(is_new, done, total)

    def start(self) -> None:
        """Show that the command has begun, before imports that take seconds."""
        self("starting", 0, 0)

    def clear(self) -> None:
        """Remove the bar from the screen; later progress draws a new one."""
        self._what = ""
        self._unfinished = False
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def _draw(self, is_new: bool, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._new_bar()
            self._bar.start()
        if is_new:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(_sentence(self._what), amount="")
        self._bar.update(self._bar.task_ids[0], completed=done, total=total or None, amount=amount(done, total))

    def _write(self, is_new: bool, done: int, total: int) -> None:
        now = time.monotonic()
        if is_new:
            self._due = now + QUIET_S
        elif now >= self._due:
            self._due = now + REMINDER_INTERVAL_S
            self._unfinished = True
            self._print_line(self._what, done, total)

    def _print_line(self, what: str, done: int, total: int) -> None:
        print(f"{_sentence(what)} … {amount(done, total)}".rstrip(), file=self._stream, flush=True)

    def _new_bar(self) -> RichProgress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self._console is None:
            self._console = Console(file=self._stream)
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # results for a file or a pipe must not go to the terminal
        )


def amount(done: int, total: int) -> str:
    """Format progress as `12.5 MB of 98.4 MB` or `3 of 30`."""
    form = str if max(done, total) < _MIN_BYTE_TOTAL else format_bytes
    return f"{form(done)} of {form(total)}" if total else (form(done) if done else "")


def _sentence(what: str) -> str:
    return what[:1].upper() + what[1:]
