"""A bound on the time that a part of a bench may take: on a slow machine it measures less, not longer."""

from __future__ import annotations

import time


class Limit:
    def __init__(self, seconds: float) -> None:
        self._seconds, self._started = seconds, time.monotonic()
        self._longest = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def lap(self, began: float) -> None:
        """Something that will be done again began when `elapsed` was so, and is done."""
        self._longest = max(self._longest, self.elapsed - began)

    def allows(self, more: float | None = None) -> bool:
        """Whether there is time for so many more seconds, or for another lap like the longest so far."""
        return self.elapsed + (self._longest if more is None else more) <= self._seconds
