"""Durations as people write them, such as "10m"."""

from __future__ import annotations

import re

MINUTE, HOUR, DAY = 60, 3600, 86400  # seconds
UNITS = {"s": 1, "m": MINUTE, "h": HOUR, "d": DAY}
PATTERN = r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([smhd]?)"


def parse_duration(text: str) -> float | None:
    """Parse `"90s"`, `"10m"`, `"2h"` or `"7d"` into seconds; a bare number is seconds. None if it is not a duration."""
    found = re.fullmatch(PATTERN, text.strip().lower())
    return None if found is None else float(found[1]) * UNITS.get(found[2], 1)
