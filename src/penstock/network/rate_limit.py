"""RateLimit: bounds the message rate of each sender, so that none can monopolise a thread."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_SENDERS = 4096  # remembered at once


class RateLimit:
    """Allows `burst` messages of a sender at once, and `rate` a second from then on.

    A token bucket that is refilled only once it is empty, so that the clock is not read for each message. Threads may share it:
    two messages at once may count as one, but no sender can exploit that.
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._tokens: dict[str, int] = {}  # left, by sender
        self._filled: dict[str, float] = {}  # by sender: when it got its tokens

    def allows(self, sender: str) -> bool:
        tokens = self._tokens.get(sender) or self._refill(sender)
        if not tokens:
            return False
        self._tokens[sender] = tokens - 1
        return True

    def _refill(self, sender: str) -> int:
        now, before = self._clock(), self._filled.get(sender)
        tokens = self._burst if before is None else int(min(self._burst, (now - before) * self._rate))
        if tokens > 0:
            if len(self._filled) >= MAX_SENDERS:
                self._filled.clear()
                self._tokens.clear()
            self._filled[sender] = now
        return max(0, tokens)
