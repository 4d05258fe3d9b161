"""The terminal of a chat: lines in, with editing and a history where the system has them; words and notes out."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from penstock.config.state import state_folder
from penstock.errors import RequestError

MAX_HISTORY_LINES = 1000  # lines of input
PROMPT, CONTINUATION_PROMPT = "> ", ". "
CONTINUATION = "\\"  # at the end of a line: the message goes on in the next

# What a model says must not move the cursor or colour the screen, whatever it was trained on.
REPLACE_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


class Terminal:
    """`interactive`: a person types. Else lines come from a file or a pipe, and nothing is written but answers and errors."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._sanitize = sys.stdout.isatty()
        self._at_line_start = True  # the cursor is at the beginning of a line
        self._readline = _enable_line_editing() if self.interactive and self._sanitize else None

    def read(self) -> str:
        """The next message: a line, and those after it while they end with a backslash. EOFError at the end of input."""
        lines: list[str] = []
        while not lines or lines[-1].endswith(CONTINUATION):
            try:
                lines.append(self._line(CONTINUATION_PROMPT if lines else PROMPT))
            except EOFError:
                if not lines:
                    raise
                break
        return "\n".join(line.removesuffix(CONTINUATION) for line in lines)

    def print_answer(self, text: str) -> None:
        """A piece of an answer."""
        if text:
            print(text.translate(REPLACE_CONTROL) if self._sanitize else text, end="", flush=True)
            self._at_line_start = text.endswith("\n")

    def end_line(self, *, after_key: bool = False) -> None:
        """Go to the beginning of a line; `after_key`, since a terminal shows a key like Ctrl-C as `^C`."""
        if not self._at_line_start or (after_key and self.interactive):
            print(flush=True)
            self._at_line_start = True

    def note(self, text: str) -> None:
        """Something about the chat, for the person at it."""
        if self.interactive:
            self.end_line()
            print(f"\x1b[2m{text}\x1b[0m" if self._dim else text, file=sys.stderr, flush=True)

    def _line(self, prompt: str) -> str:
        try:
            line = self._input(prompt)
            line.encode()
        except UnicodeError:
            raise RequestError("That is not UTF-8 text.") from None
        if self._readline is not None and line.strip():
            _append_history(self._readline)
        return line

    def _input(self, prompt: str) -> str:
        if self.interactive and self._sanitize:
            return input(prompt)
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


# ---- the history of what was typed ----


def history_file() -> Path:
    return (state_folder(os.environ) or Path.home() / ".local" / "state" / "penstock") / "chat_history"


def _enable_line_editing() -> ModuleType | None:
    """Line editing, if this Python has it: importing the module is enough for `input` to use it."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_history_length(MAX_HISTORY_LINES)
    with suppress(AttributeError):
        readline.parse_and_bind("set enable-bracketed-paste on")  # a text of several lines is pasted as one message
    with suppress(OSError, RuntimeError):  # there is none yet, or no home
        readline.read_history_file(history_file())
    return readline


def _append_history(readline: ModuleType) -> None:
    """Line by line, so that two chats at a time keep what was typed in both. A chat works as well without."""
    with suppress(OSError, RuntimeError):
        file = history_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else reads what somebody asks
        if hasattr(readline, "append_history_file"):
            readline.append_history_file(1, file)
        else:
            readline.write_history_file(file)
