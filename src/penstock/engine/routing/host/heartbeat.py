"""Heartbeat: signs of life of the compute thread, which other threads report to origins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

MIN_SILENCE_S = 4.0  # a compute thread never counts as hung sooner than this
SILENCE_FACTOR = 4.0  # ... or sooner than this multiple of what its present pass was predicted to take
MAX_SILENCE_S = 300.0  # ... but after this, whatever it says
UNKNOWN_PASS_S = 15.0  # prediction for a pass before any was measured: the first one may load weights from a disk


def is_hung(age: float, expected: float) -> bool:
    """Whether a compute thread counts as hung when its last sign of life is this old."""
    return age > min(MAX_SILENCE_S, max(MIN_SILENCE_S, SILENCE_FACTOR * expected))


class Heartbeat:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self.expected = 0.0  # seconds for the present pass
        self.passes = 0  # completed

    def beat(self) -> None:
        self._last = self._clock()

    @property
    def age(self) -> float:
        """Seconds since the last beat."""
        return max(0.0, self._clock() - self._last)

    @property
    def hung(self) -> bool:
        return is_hung(self.age, self.expected)

    def in_pass(self, expected: float) -> Self:
        """Announce a pass that is predicted to take this long; it lasts until the end of a `with` block."""
        self._last, self.expected = self._clock(), expected
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._last, self.expected, self.passes = self._clock(), 0.0, self.passes + 1
