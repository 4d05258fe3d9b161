"""Who goes first. A policy is a sort key, lower first, computed anew at every step; ties go by arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.domain.sequence import Sequence

# (sequence, now, predicted seconds until it is done) -> key
Policy = Callable[[Sequence, float, float], float]


LEAST_DEADLINE = 0.25  # seconds


def fair_deadline(reading: float) -> float:
    """For a job that came without one, from the seconds that its prompt takes to read. It grows faster than these, so that
    a short prompt is not held up by a long one; and a long one, whose slack shrinks while it waits, has its turn."""
    return max(LEAST_DEADLINE, 3 * reading * (1 + 4 * reading))


def by_arrival(seq: Sequence, now: float, remaining: float) -> float:
    return seq.job.arrival


def by_deadline(seq: Sequence, now: float, remaining: float) -> float:
    """Earliest deadline first."""
    return seq.job.arrival + seq.job.deadline


def by_slack(seq: Sequence, now: float, remaining: float) -> float:
    """Least remaining slack, as a share of the deadline, so that short jobs are not drowned by long ones."""
    return (seq.job.arrival + seq.job.deadline - now - remaining) / seq.job.deadline


POLICIES: Mapping[str, Policy] = {"fcfs": by_arrival, "edf": by_deadline, "lrs": by_slack}
