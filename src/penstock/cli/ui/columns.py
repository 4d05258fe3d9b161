"""Fit text into columns: measure, shorten, wrap, align tables; and colour it where the terminal can.

Text from other machines goes through `harmless` first: it must not move the cursor or colour the screen.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_TEXT_CHARS = 1000  # of one text from another machine
MIN_CELL_WIDTH = 6  # a cell is not shortened below this
INDENT = "  "
TIED = "\N{NO-BREAK SPACE}"  # written as a space at which `wrapped` does not break
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


class Ink:
    """Colours text: `ink("red", text)`. Without `colour` it returns text unchanged."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._colour and text else text


PLAIN = Ink(colour=False)


def harmless(value: Any) -> Any:
    """Make every string in a JSON value printable, and cut it to MAX_TEXT_CHARS."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in value[:MAX_TEXT_CHARS])
    if isinstance(value, Mapping):
        return {harmless(key): harmless(inner) for key, inner in value.items()}
    return [harmless(inner) for inner in value] if isinstance(value, list) else value


def breadth(text: str) -> int:
    """How many columns a terminal needs for a text."""
    return sum(0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def padded(text: str, room: int, *, right: bool = False) -> str:
    space = " " * (room - breadth(text))
    return space + text if right else text + space


def shortened(text: str, room: int, *, tail: float = 0.5) -> str:
    """Replace the middle of a text by "…" if it is wider than `room`; `tail` is the share of its end in what is left."""
    if breadth(text) <= room:
        return text
    for count in range(room - 1, 0, -1):  # wide letters need more than one column each
        last = min(int(count * tail), count - 1)
        short = f"{text[: count - last]}…{text[len(text) - last :]}"
        if breadth(short) <= room:
            return short
    return "…"


def labels(names: Iterable[str], room: int) -> dict[str, str]:
    """Shorten names to fit, each still distinct; numbered where that is not possible."""
    distinct = list(dict.fromkeys(names))
    for tail in (0.5, 1.0, 0.0):
        short = [shortened(name, room, tail=tail) for name in distinct]
        if len(set(short)) == len(short):
            return dict(zip(distinct, short, strict=True))
    short = [shortened(name, room) for name in distinct]
    for number, name in enumerate(distinct, start=1):
        if short.count(short[number - 1]) > 1:
            short[number - 1] = shortened(name, room - len(f"~{number}")) + f"~{number}"
    return dict(zip(distinct, short, strict=True))


def without_domain(names: Iterable[str]) -> dict[str, str]:
    """Remove the domain that all host names share, if there is one."""
    distinct = list(dict.fromkeys(names))
    parts = [name.split(".") for name in distinct]
    shared = 0
    while len(parts) > 1 and len({tuple(part[len(part) - shared - 1 :]) for part in parts}) == 1:
        shared += 1
    shared = min(shared, min((len(part) for part in parts), default=1) - 1)
    return {name: ".".join(part[: len(part) - shared]) for name, part in zip(distinct, parts, strict=True)}


def wrapped(text: str, width: int, *, first: str = INDENT, then: str = INDENT) -> list[str]:
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(TIED, " ") for line in lines]


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    ink: Ink = PLAIN,
    *,
    numbers: Iterable[int] = (),
    elastic: Iterable[int] = (),
    indent: str = INDENT,
) -> list[str]:
    """Format rows as lines with aligned columns.

    width: of the terminal; None for unlimited.
    numbers: columns to align right.
    elastic: columns to shorten, the widest first, where the table is wider than `width`.
    """
    widths = [max(breadth(line[place]) for line in [headings, *rows]) for place in range(len(headings))]
    shrinkable = list(elastic)
    needed = sum(widths) + len(indent)
    gap = 3 if width is None or needed + 3 * (len(widths) - 1) <= width else 2
    over = 0 if width is None else needed + gap * (len(widths) - 1) - width
    while over > 0 and shrinkable:
        widest = max(shrinkable, key=lambda place: widths[place])
        if widths[widest] <= max(MIN_CELL_WIDTH, breadth(headings[widest])):
            break
        widths[widest] -= 1
        over -= 1
    short = {place: labels((row[place] for row in rows), widths[place]) for place in shrinkable}
    right = set(numbers)
    lines = []
    for line in [headings, *rows]:
        cells = [
            padded(short.get(place, {}).get(cell, cell), widths[place], right=place in right) for place, cell in enumerate(line)
        ]
        lines.append(indent + (" " * gap).join(cells).rstrip())
    return [ink("dim", lines[0]), *lines[1:]]
