"""LogThrottle: limits how often a line is logged, because other nodes can cause any number of them."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_INTERVAL_S = 10.0  # between two log lines


class LogThrottle:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at = -MIN_INTERVAL_S

    def should_log(self) -> bool:
        now = self._clock()
        if now < self._next_at:
            return False
        self._next_at = now + MIN_INTERVAL_S
        return True
