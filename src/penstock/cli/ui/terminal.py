"""The terminal of a chat: reads lines, with editing and history where available; prints answers and notes."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from penstock.cli.ui.output import shows_colour
from penstock.config.state import state_folder
from penstock.errors import RequestError

MAX_HISTORY_LINES = 1000
PROMPT, CONTINUATION_PROMPT = "> ", ". "
CONTINUATION = "\\"  # at the end of a line: the message continues on the next

# A translation table, so that a model's output cannot move the cursor or colour the screen.
REPLACE_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}


class Terminal:
    """`interactive` if a person types; otherwise lines come from a file or pipe, and only answers and errors are written."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._dim = shows_colour(sys.stderr)
        self._sanitize = sys.stdout.isatty()
        self._at_line_start = True
        self._readline = _enable_line_editing() if self.interactive and self._sanitize else None

    def read(self) -> str:
        """Read the next message: a line, and further ones while they end with a backslash. Raise EOFError at the end."""
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
        """Print a piece of an answer."""
        if text:
            print(text.translate(REPLACE_CONTROL) if self._sanitize else text, end="", flush=True)
            self._at_line_start = text.endswith("\n")

    def end_line(self, *, after_key: bool = False) -> None:
        """Move to the start of a line. `after_key`: a key such as Ctrl-C was pressed, which the terminal shows as `^C`."""
        if not self._at_line_start or (after_key and self.interactive):
            print(flush=True)
            self._at_line_start = True

    def note(self, text: str) -> None:
        """Print a note about the chat, if it is interactive."""
        if self.interactive:
            self.end_line()
            print(f"\x1b[2m{text}\x1b[0m" if self._dim else text, file=sys.stderr, flush=True)

    def _line(self, prompt: str) -> str:
        try:
            line = self._input(prompt)
            line.encode()
        except UnicodeError:
            raise RequestError("The input is not UTF-8 text.") from None
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


# ---- the history of input ----


def history_file() -> Path:
    return (state_folder(os.environ) or Path.home() / ".local" / "state" / "penstock") / "chat_history"


def _enable_line_editing() -> ModuleType | None:
    """Enable line editing, if this Python has it: importing the module is enough for `input` to use it."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_history_length(MAX_HISTORY_LINES)
    with suppress(AttributeError):
        readline.parse_and_bind("set enable-bracketed-paste on")  # several pasted lines become one message
    with suppress(OSError, RuntimeError):  # there is no history yet, or no home folder
        readline.read_history_file(history_file())
    return readline


def _append_history(readline: ModuleType) -> None:
    """Append the last line to the history, so that two chats at once keep both. Errors are ignored."""
    with suppress(OSError, RuntimeError):
        file = history_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # questions are private
        if hasattr(readline, "append_history_file"):
            readline.append_history_file(1, file)
        else:
            readline.write_history_file(file)
