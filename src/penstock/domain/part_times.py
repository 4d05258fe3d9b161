"""PartTimes: how long one answer spent in each part of a node or network, for its prompt and for its generated tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.domain.topology import LayerRange

ORDER = ("embedding", "layers", "hops", "head")
HEADINGS = ("part", "where", "layers", "prompt s", "passes", "answer s", "passes", "ms each")
NUMBER_COLUMNS = range(3, len(HEADINGS))


class TimedPart(NamedTuple):
    """`nodes` is the node of the part; for `hops`, all nodes in the order in which a NetworkJob passes them."""

    name: str  # one of ORDER
    nodes: tuple[str, ...]
    layers: LayerRange | None = None


@dataclass(frozen=True, slots=True)
class PartTime:
    """Seconds of the NetworkJobs that carried an answer's tokens, and how many they were. Answers that share one all wait for it,
    so each has the whole time.

    prefill: while the prompt was read, or computed again after a preemption.
    decode: while tokens were generated.
    """

    part: str
    nodes: tuple[str, ...]
    layers: str
    prefill: float
    prefill_passes: int
    decode: float
    decode_passes: int

    def as_row(self) -> tuple[str, ...]:
        """The cells below HEADINGS. `ms each` is the mean of one pass of the answer; for hops, of one hop."""
        times = self.decode_passes * max(1, len(self.nodes) - 1)
        where, each = " → ".join(self.nodes), f"{1000 * self.decode / times:.2f}" if times else ""
        passes = str(self.prefill_passes), str(self.decode_passes)
        return self.part, where, self.layers, f"{self.prefill:.3f}", passes[0], f"{self.decode:.3f}", passes[1], each


class PartTimes:
    """Adds up the seconds of one answer."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds: dict[TimedPart, list[float]] = {}  # prefill, decode, and how many passes of each

    def add(self, parts: Iterable[tuple[TimedPart, float]], *, decode: bool) -> None:
        for part, seconds in parts:
            times = self._seconds.get(part)
            if times is None:
                times = self._seconds[part] = [0.0, 0.0, 0, 0]
            times[decode] += seconds
            times[2 + decode] += 1

    def summary(self) -> tuple[PartTime, ...]:
        """One row for each part, in the order in which tokens pass them."""
        found = sorted(self._seconds.items(), key=lambda item: (ORDER.index(item[0].name), item[0].layers or (), item[0].nodes))
        return tuple(
            PartTime(name, nodes, str(layers or ""), prefill, int(prefill_passes), decode, int(decode_passes))
            for (name, nodes, layers), (prefill, decode, prefill_passes, decode_passes) in found
        )


def format_part_times(parts: Sequence[PartTime]) -> list[str]:
    """The parts as a small table, a line each. Empty without parts."""
    if not parts:
        return []
    lines = [HEADINGS, *(part.as_row() for part in parts)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "   ".join(
            f"{cell:>{width}}" if place in NUMBER_COLUMNS else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
