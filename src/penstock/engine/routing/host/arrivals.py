"""Arrivals: the order of the NetworkJobs of one leg."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.domain.span import NetworkJob
from penstock.engine.routing.host.leg_log import REORDER_TIMEOUT_S

CREDITS = 128  # NetworkJobs of one leg on a node at once


class Arrivals:
    """Puts the NetworkJobs of one leg back into the order in which the origin sent them.

    Waits a little for a missing one, then lets the others continue; the missing one may still follow.
    """

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, tuple[NetworkJob, float]] = {}
        self._skipped: set[int] = set()

    def take(self, job: NetworkJob, now: float) -> list[NetworkJob]:
        """Add a NetworkJob, and return those that can be run now. A duplicate is dropped."""
        number = job.number
        if number < self._next:
            if number not in self._skipped:
                return []
            self._skipped.remove(number)
            return [job]
        if number in self._held:
            return []
        before: list[NetworkJob] = []
        if number > self._next + CREDITS:  # far ahead: those missing before it are lost
            before = [self._held.pop(held)[0] for held in sorted(self._held)]
            self._next = number
        self._held[number] = (job, now + REORDER_TIMEOUT_S)
        return [*before, *self._ready()]

    def overdue(self, now: float) -> list[NetworkJob]:
        """Return those that have waited long enough for the ones before them."""
        ready: list[NetworkJob] = []
        while self._held and min(until for _, until in self._held.values()) <= now:
            first = min(self._held)
            self._skipped.update(range(self._next, first))
            while len(self._skipped) > 4 * CREDITS:
                self._skipped.remove(min(self._skipped))
            self._next = first
            ready += self._ready()
        return ready

    @property
    def waiting(self) -> bool:
        return bool(self._held)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the NetworkJobs that wait for an earlier one."""
        return sum(job.memory for job, _ in self._held.values())

    def _ready(self) -> Iterator[NetworkJob]:
        while self._next in self._held:
            yield self._held.pop(self._next)[0]
            self._next += 1
