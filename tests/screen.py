"""A minimal terminal emulator: it interprets as much of a command's output as progress bars use."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.server import clean_environment

_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


@dataclass(frozen=True)
class Shown:
    """What a terminal has shown.

    rows: the text of each row when the cursor left it or it was erased, without repeats, in order.
    at_end: the rows that remained at the end.
    """

    rows: list[str]
    at_end: list[str]


def watched(command: Sequence[str | Path], *, stdout: int | None = None, **env: str) -> tuple[int, Shown]:
    """Run a command in a terminal of 200 columns; return its exit code and what the terminal has shown.

    stdout: a file for its results, as in `penstock ... > file`.
    """
    terminal, theirs = pty.openpty()
    environment = clean_environment(**{"TERM": "xterm", "COLUMNS": "200"} | env)
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs if stdout is None else stdout, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        written = b""
        while chunk := _read(terminal):
            written += chunk
        os.close(terminal)
    return process.returncode, show(written.decode())


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # on Linux: the other side has closed
        return b""


def show(written: str) -> Shown:
    rows, row, column, end = [""], 0, 0, 0
    shown: dict[str, None] = {}
    for found in _PIECE.finditer(written):
        assert found.start() == end, f"{written[end : end + 20]!r} is not known here"
        end = found.end()
        piece, count, command = found[0], found[1], found[2]
        if command in ("m", "h", "l"):  # colours, and cursor visibility
            continue
        if command is None and piece not in ("\r", "\n"):
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
            column += len(piece)
            continue
        shown[rows[row].rstrip()] = None
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif command == "A":
            row = max(0, row - int(count or 1))
        else:
            assert (count, command) == ("2", "K"), piece
            rows[row] = ""
    assert end == len(written)
    return Shown(list(shown), [text.rstrip() for text in rows])
