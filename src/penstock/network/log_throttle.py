"""LogThrottle: lets one of many log lines through, since others can cause as many as they like."""

from __future__ import annotations

import time
from collections.abc import Callable

QUIET = 10.0  # seconds between two log lines


class LogThrottle:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_until = -QUIET

    def should_log(self) -> bool:
        now = self._clock()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + QUIET
        return True
