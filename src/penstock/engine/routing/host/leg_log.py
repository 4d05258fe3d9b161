"""LegLog: which NetworkJobs of a leg have arrived on this node, which have left it again, and which are missing."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.domain.messages import MAX_LISTED, LegReport

REORDER_TIMEOUT_S = 0.03  # how long to wait for a NetworkJob that a later one has overtaken
MAX_REMEMBERED = 1024  # of the newest numbers; an origin has far fewer in flight


class LegLog:
    """Written by the network thread, where NetworkJobs and Marks arrive, and by the compute thread, where they leave."""

    def __init__(self, layer: int, clock: Callable[[], float]) -> None:
        self._layer = layer
        self._clock = clock
        self._lock = threading.Lock()
        self._newest = -1
        self._missing: dict[int, float] = {}  # number -> since when a newer one is known
        self._here: set[int] = set()

    def arrived(self, number: int) -> None:
        with self._lock:
            if number == self._newest + 1:  # in order, as nearly all come
                self._newest = number
            elif number in self._missing:
                del self._missing[number]
            elif number <= self._newest:
                return  # a duplicate, or so late that it was forgotten
            else:
                self._advance(number)
                del self._missing[number]
            self._here.add(number)
            self._forget_oldest()

    def marked(self, number: int) -> None:
        """Record that all NetworkJobs up to this one were sent before."""
        with self._lock:
            self._advance(number)

    def left(self, number: int) -> None:
        with self._lock:
            self._here.discard(number)

    def settle(self, number: int) -> None:
        """Forget the NetworkJobs up to this one: their origin no longer waits for them."""
        with self._lock:
            self._missing = {missing: since for missing, since in self._missing.items() if missing > number}
            self._here = {here for here in self._here if here > number}

    def missing(self) -> tuple[int, ...]:
        """The NetworkJobs that are overdue: a newer one is known, and the time for reordering has passed."""
        with self._lock:
            return self._overdue()

    def report(self, received: int) -> LegReport:
        """`received`: bytes that came from the sender of the leg."""
        with self._lock:
            here = tuple(sorted(self._here)[:MAX_LISTED])
            return LegReport(self._layer, self._newest, received, here, self._overdue())

    def _overdue(self) -> tuple[int, ...]:
        until = self._clock() - REORDER_TIMEOUT_S
        return tuple(number for number, since in self._missing.items() if since <= until)[:MAX_LISTED]

    def _advance(self, number: int) -> None:
        """Note that all NetworkJobs up to this number should have arrived."""
        if number <= self._newest:
            return
        first = max(self._newest + 1, number - MAX_REMEMBERED)
        self._missing |= dict.fromkeys(range(first, number + 1), self._clock())
        self._newest = number
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        if len(self._missing) > MAX_REMEMBERED or len(self._here) > MAX_REMEMBERED:
            oldest = self._newest - MAX_REMEMBERED
            self._missing = {missing: since for missing, since in self._missing.items() if missing > oldest}
            self._here = {here for here in self._here if here > oldest}
