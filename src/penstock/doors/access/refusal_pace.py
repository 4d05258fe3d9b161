"""RefusalPace: delays the refusals of a client that keeps being refused, so that retrying in a tight loop gains nothing."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 20  # refusals of a client that are answered at once
PER_SECOND = 20  # refusals per second after the burst
MAX_DELAY_S = 2.0  # a delayed request holds a connection
MAX_CLIENTS = 4096  # remembered at once


class RefusalPace:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: OrderedDict[str, float] = OrderedDict()  # by client: when its next refusal is due; the latest refused last

    def delay(self, client: str) -> float:
        """Count a refusal, and return how many seconds to wait before it is sent."""
        now = self._clock()
        due = max(self._next.pop(client, 0.0), now - BURST / PER_SECOND)
        delay = min(max(0.0, due - now), MAX_DELAY_S)
        self._next[client] = min(due, now + MAX_DELAY_S) + 1 / PER_SECOND
        if len(self._next) > MAX_CLIENTS:
            self._next.popitem(last=False)
        return delay
