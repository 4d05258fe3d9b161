"""Who goes first. A policy is a sort key, lower first, computed anew at every step; ties go by arrival."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from penstock.domain.job import Job, Sequence

# (sequence, now, predicted seconds until it is done) -> key
Policy = Callable[[Sequence, float, float], float]


MIN_DEADLINE_S = 0.25  # seconds
STARVED_S = 30.0  # seconds without a token, after which a background job (of a priority below 0) is not put off any more


def fair_deadline(reading: float) -> float:
    """For a job that came without one, from the seconds that its prompt takes to read. It grows faster than these, so that
    a short prompt is not held up by a long one; and a long one, whose slack shrinks while it waits, has its turn."""
    return max(MIN_DEADLINE_S, 3 * reading * (1 + 4 * reading))


def by_arrival(seq: Sequence, now: float, remaining: float) -> float:
    return seq.job.arrival


def by_deadline(seq: Sequence, now: float, remaining: float) -> float:
    """Earliest deadline first."""
    return seq.job.arrival + seq.job.deadline


def by_slack(seq: Sequence, now: float, remaining: float) -> float:
    """Least remaining slack, as a share of the deadline, so that short jobs are not drowned by long ones."""
    return (seq.job.arrival + seq.job.deadline - now - remaining) / seq.job.deadline


POLICIES: Mapping[str, Policy] = {"fcfs": by_arrival, "edf": by_deadline, "lrs": by_slack}


def to_promote(seqs: Collection[Sequence], now: float) -> Job | None:
    """The background job that is to rank like the others from now on: the one that has stood still for longest, and too long.
    There is one at a time, so that urgent work makes room for no more than that."""
    if any(seq.job.promoted for seq in seqs):
        return None
    background = [seq for seq in seqs if seq.job.priority < 0]
    longest = min(background, key=lambda seq: (_last_progress(seq), seq.seq_id), default=None)
    return longest.job if longest is not None and now - _last_progress(longest) >= STARVED_S else None


def _last_progress(seq: Sequence) -> float:
    return max(seq.job.arrival, seq.last_token)
