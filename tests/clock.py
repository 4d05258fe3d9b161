"""A clock that tests set by hand."""

from __future__ import annotations


class Clock:
    """Stands in for `time.monotonic`: a test moves `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
