"""What commands write on stdout: one JSON object, or a table for people."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def print_json(value: Any) -> None:
    """One object on one line; dataclasses and paths may be inside."""
    readable = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, default=_plain, ensure_ascii=not readable))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> None:
    print("\n".join(table_lines(headings, rows, numbers=numbers)))


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> Iterator[str]:
    """Aligned columns, nothing cut off; `numbers` are the columns to align at the right."""
    lines = [headings, *rows]
    right = set(numbers)
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    for line in lines:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "   ".join(cells).rstrip()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
