"""Write a job's result to stdout: its exact bytes into a pipe, sanitised text on a terminal."""

from __future__ import annotations

import codecs
import sys

from penstock.cli.ui.terminal import REPLACE_CONTROL


class ResultWriter:
    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a piece may end inside a character
        self._last = "\n"

    def write(self, piece: bytes) -> None:
        if self._terminal:
            self._show(self._decoder.decode(piece))
        else:
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()

    def end(self) -> None:
        """End the last line on a terminal."""
        if self._terminal:
            self._show(self._decoder.decode(b"", final=True))
            if self._last != "\n":
                print(flush=True)
                self._last = "\n"

    def _show(self, text: str) -> None:
        if text:
            print(text.translate(REPLACE_CONTROL), end="", flush=True)
            self._last = text[-1]
