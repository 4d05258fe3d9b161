"""Figures as people read them: percentiles, medians with their range, Markdown tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that this share of all values does not exceed; None if there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and behind it the lowest and the highest."""
    if not values:
        return "–"
    middle = f"{statistics.median(values):{form}}{unit}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}}–{max(values):{form}})"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def mark(met: bool) -> str:
    return "✓" if met else "✗"


def markdown(table: Iterable[Sequence[str]]) -> str:
    first, *others = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table)
    return "\n".join([first, "|---" * (first.count(" | ") + 1) + "|", *others])
