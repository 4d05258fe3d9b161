"""How long work is shown: bars on a terminal, now and then a plain line elsewhere; always on stderr, so stdout stays clean."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

QUIET_S = 5.0  # seconds that work may take before a plain line speaks of it
REMINDER_INTERVAL_S = 15.0  # seconds between two plain lines about the same work
_MIN_BYTE_TOTAL = 1 << 20  # totals from here on are bytes: nothing else that we count gets so large


class ProgressBars:
    """A `penstock.progress.Progress` to watch, one piece of work at a time, and the context manager that clears it away."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._bar: RichProgress | None = None
        self._what = ""  # the work that the bar, or the next plain line, is about
        self._due = 0.0  # when that plain line may come

    def __call__(self, what: str, done: int, total: int) -> None:
        if 0 < total <= done:
            self.clear()
            return
        is_new = what != self._what
        self._what = what
        if self._terminal:
            self._draw(is_new, done, total)
        else:
            self._write(is_new, done, total)

    def clear(self) -> None:
        """Take the bar off the screen; later progress draws a new one."""
        self._what = ""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def _draw(self, is_new: bool, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _rich_progress(self._stream)
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
            print(f"{_sentence(self._what)} … {amount(done, total)}".rstrip(), file=self._stream, flush=True)


def amount(done: int, total: int) -> str:
    """`"12.5 of 98.4 MB"` or `"3 of 30"`."""
    if max(done, total) < _MIN_BYTE_TOTAL:
        return f"{done} of {total}" if total else (str(done) if done else "")
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"


def size(count: int) -> str:
    """`"98.4 MB"`, `"1.2 GB"`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _sentence(what: str) -> str:
    return what[:1].upper() + what[1:]


def _rich_progress(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
