"""TrackRecord: losses and refusals in a row, which count against the route of an origin and against its sequences."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from penstock.domain.job import Sequence

SUSPICIOUS_LOSSES = 3  # in a row; then another route is taken, if there is one
MAX_LOSSES = 12  # ... and then the route counts as broken, even if it is the only one
REROUTE_REFUSALS = 24  # refusals of one sequence in a row, weighted, after which another route is tried
MAX_REFUSALS = 64  # ... and after which its job fails
REFUSAL_WEIGHT = 8  # of a refusal that no lost message explains


class Consequence(Enum):
    RETRY = auto()
    REROUTE = auto()  # if there is another path
    FAIL = auto()


def count_refusal(seq: Sequence, weight: int) -> Consequence:
    """Count a refusal against a sequence; one that makes progress starts from zero."""
    seq.refused += weight
    if seq.refused >= MAX_REFUSALS:
        return Consequence.FAIL
    return Consequence.REROUTE if seq.refused >= REROUTE_REFUSALS else Consequence.RETRY


class TrackRecord:
    def __init__(self) -> None:
        self.suspects: set[str] = set()  # nodes that may have lost something since the last return, or returned something wrong
        self.failed_routes = 0  # in a row, on which no NetworkJob returned
        self.losses = 0  # in a row
        self._last_event = 0.0  # when a NetworkJob last returned or was given up

    @property
    def is_suspicious(self) -> bool:
        return self.losses >= SUSPICIOUS_LOSSES

    @property
    def is_broken(self) -> bool:
        return self.losses >= MAX_LOSSES

    def on_returned(self, now: float) -> None:
        self.losses, self.failed_routes, self._last_event = 0, 0, now
        self.suspects.clear()

    def on_lost(self, sent: float, now: float, suspects: Collection[str]) -> None:
        """Count a NetworkJob that was given up. If it was sent before another returned or was lost, it is no further sign that
        the route is broken."""
        self.losses += sent >= self._last_event
        self._last_event = now
        self.suspects.update(suspects)

    def on_route_lost(self, *, served: bool) -> None:
        self.losses = 0
        self.failed_routes += not served
