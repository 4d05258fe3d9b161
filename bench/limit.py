"""A time limit for a part of a bench: a slow machine does fewer rounds instead of taking longer."""

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
        """Record the end of a lap that began at this value of `elapsed`."""
        self._longest = max(self._longest, self.elapsed - began)

    def allows(self, more: float | None = None) -> bool:
        """Whether there is time for this many more seconds, or for another lap as long as the longest so far."""
        return self.elapsed + (self._longest if more is None else more) <= self._seconds
