"""Write a job's result to stdout: its exact bytes into a pipe, sanitised text on a terminal."""

from __future__ import annotations

import codecs
import sys

from penstock.cli.ui.terminal import REPLACE_CONTROL


class ResultWriter:
    """Writes one result. With `lines`, it ends with a new line also in a pipe, where another result follows."""

    def __init__(self, *, lines: bool = False) -> None:
        self._terminal = sys.stdout.isatty()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end inside a character
        self._ends_line = self._terminal or lines
        self._last = "" if lines else "\n"

    def write(self, piece: bytes) -> None:
        if self._terminal:
            self._show(self._decoder.decode(piece))
        elif piece:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
            self._last = piece[-1:].decode("latin-1")

    def end(self) -> None:
        """End the last line if it needs a newline."""
        if self._terminal:
            self._show(self._decoder.decode(b"", final=True))
        if self._ends_line and self._last != "\n":
            print(flush=True)
            self._last = "\n"

    def _show(self, text: str) -> None:
        if text:
            print(text.translate(REPLACE_CONTROL), end="", flush=True)
            self._last = text[-1]
