"""Spans of time: as people write them on the command line, and as tables show them."""

from __future__ import annotations

import re

import typer

MINUTE, HOUR, DAY = 60, 3600, 86400  # seconds
UNITS = {"s": 1, "m": MINUTE, "h": HOUR, "d": DAY}
METAVAR = "TIME"


def parse_duration(text: str) -> float:
    """Seconds: `"90s"`, `"10m"`, `"2h"`, `"7d"`; a number alone is seconds."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([smhd]?)", text.strip().lower(), flags=re.ASCII)
    if not found:
        raise typer.BadParameter(f"{text[:80]!r} is not a time. Write it as 90s, 10m, 2h or 7d; a number alone is seconds.")
    number, unit = found.groups()
    return float(number) * UNITS.get(unit, 1)


def age(seconds: float) -> str:
    """`"3.2 s"`, `"2 min 5 s"`, `"2 h 1 min"`, `"7 d"`."""
    seconds = max(seconds, 0.0)  # clocks of two machines differ
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < HOUR:
        large, small = f"{whole // MINUTE} min", f"{whole % MINUTE} s"
    elif whole < DAY:
        large, small = f"{whole // HOUR} h", f"{whole % HOUR // MINUTE} min"
    else:
        large, small = f"{whole // DAY} d", f"{whole % DAY // HOUR} h"
    return large if small.startswith("0 ") else f"{large} {small}"
