"""Who goes first. A policy is a sort key, lower first, computed anew at every step; ties go by arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from penstock.domain.sequence import Sequence

# (sequence, now, predicted seconds until it is done) -> key
Policy = Callable[[Sequence, float, float], float]


def by_arrival(seq: Sequence, now: float, remaining: float) -> float:
    return seq.job.arrival


def by_deadline(seq: Sequence, now: float, remaining: float) -> float:
    """Earliest deadline first; a job without one comes after all that have one."""
    return math.inf if seq.job.deadline is None else seq.job.arrival + seq.job.deadline


def by_slack(seq: Sequence, now: float, remaining: float) -> float:
    """Least remaining slack, as a share of the deadline, so that short jobs are not drowned by long ones."""
    if seq.job.deadline is None:
        return math.inf
    return (seq.job.arrival + seq.job.deadline - now - remaining) / seq.job.deadline


POLICIES: Mapping[str, Policy] = {"fcfs": by_arrival, "edf": by_deadline, "lrs": by_slack}
