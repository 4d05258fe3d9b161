"""Print the result of a command: one JSON object, or a table. And what a stream can show."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from penstock.cli.ui.columns import table


def print_json(value: Any) -> None:
    """Print one object on one line; it may contain dataclasses and paths."""
    readable = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, default=_plain, ensure_ascii=not readable))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> None:
    """Print aligned columns without cutting anything off; `numbers` are the columns to align right."""
    print("\n".join(table(headings, list(rows), numbers=numbers, indent="")))


def shows_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal with colours, and the user wants them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_write(text: str, stream: TextIO) -> bool:
    """Whether a stream has these characters. Others would become question marks."""
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
