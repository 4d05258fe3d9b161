"""Durations: parse those of the command line, and format them for tables."""

from __future__ import annotations

import typer

from penstock.domain.duration import DAY, HOUR, MINUTE, parse_duration

METAVAR = "TIME"


def parse_duration_option(text: str) -> float:
    """Return seconds: `"90s"`, `"10m"`, `"2h"`, `"7d"`; a number alone is seconds."""
    found = parse_duration(text)
    if found is None:
        raise typer.BadParameter(f"{text[:80]!r} is not a time. Write 90s, 10m, 2h or 7d; a number alone is seconds.")
    return found


def age(seconds: float) -> str:
    """Format a duration: `3.2 s`, `2 min 5 s`, `2 h 1 min`, `7 d`."""
    seconds = max(seconds, 0.0)  # the clocks of two machines may differ
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
