"""Text in columns of a known width: measuring, shortening, wrapping, tables; and ink for terminals that have colours.

What comes from other machines goes through `harmless` first: their names must not move the cursor or colour the screen.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_TEXT_CHARS = 1000  # characters of one text of somebody else
MIN_CELL_WIDTH = 6  # columns that a shortened cell keeps
INDENT = "  "
TIED = "\N{NO-BREAK SPACE}"  # stands for a space at which `wrapped` must not break
STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


class Ink:
    def __init__(self, colour: bool) -> None:
        self._colour = colour

    def __call__(self, style: str, text: str) -> str:
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if self._colour and text else text


def harmless(value: Any) -> Any:
    """JSON with every text in it made printable, and no longer than anything honest is."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in value[:MAX_TEXT_CHARS])
    if isinstance(value, Mapping):
        return {key: harmless(inner) for key, inner in value.items()}
    return [harmless(inner) for inner in value] if isinstance(value, list) else value


def breadth(text: str) -> int:
    """Columns that a terminal needs for it."""
    return sum(0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def padded(text: str, room: int, *, right: bool = False) -> str:
    space = " " * (room - breadth(text))
    return space + text if right else text + space


def shortened(text: str, room: int, *, tail: float = 0.5) -> str:
    """`tail` is the share of its end in what is left."""
    if breadth(text) <= room:
        return text
    for kept in range(room - 1, 0, -1):  # wide letters need more than one column each
        last = min(int(kept * tail), kept - 1)
        short = f"{text[: kept - last]}…{text[len(text) - last :]}"
        if breadth(short) <= room:
            return short
    return "…"


def labels(names: Iterable[str], room: int) -> dict[str, str]:
    """Names as they fit, shortened where they can still be told apart; numbered if they cannot."""
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
    """Names of machines without the domain that all of them share, if there is one."""
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
    width: int,
    ink: Ink,
    *,
    numbers: Iterable[int] = (),
    elastic: Iterable[int] = (),
) -> list[str]:
    """`numbers` are columns to align at the right; `elastic` are those that give way, the widest first, when room is short."""
    widths = [max(breadth(line[place]) for line in [headings, *rows]) for place in range(len(headings))]
    give = list(elastic)
    gap = 3 if sum(widths) + 3 * (len(widths) - 1) + len(INDENT) <= width else 2
    over = sum(widths) + gap * (len(widths) - 1) + len(INDENT) - width
    while over > 0 and give:
        widest = max(give, key=lambda place: widths[place])
        if widths[widest] <= max(MIN_CELL_WIDTH, breadth(headings[widest])):
            break
        widths[widest] -= 1
        over -= 1
    short = {place: labels((row[place] for row in rows), widths[place]) for place in give}
    right = set(numbers)
    lines = []
    for line in [headings, *rows]:
        cells = [
            padded(short.get(place, {}).get(cell, cell), widths[place], right=place in right) for place, cell in enumerate(line)
        ]
        lines.append(INDENT + (" " * gap).join(cells).rstrip())
    return [ink("dim", lines[0]), *lines[1:]]
