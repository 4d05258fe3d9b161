"""Scheduling policies. Each is a sort key, lower first; ties are broken by arrival. `WaitingQueue` keeps the same order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from penstock.domain.job import Job, Sequence

# (sequence, now, predicted seconds until it is done) -> key
Policy = Callable[[Sequence, float, float], float]


MIN_DEADLINE_S = 0.25
STARVED_S = 30.0  # without a token for this long, a background job (priority below 0) is promoted


def fair_deadline(reading: float) -> float:
    """The deadline of a job that came without one, from the predicted seconds to read its prompt.

    It grows faster than the reading time, so a short prompt overtakes a long one; the long one's turn comes as its slack shrinks.
    """
    return max(MIN_DEADLINE_S, 3 * reading * (1 + 4 * reading))


def by_arrival(seq: Sequence, now: float, remaining: float) -> float:
    return seq.job.arrival


def by_deadline(seq: Sequence, now: float, remaining: float) -> float:
    """Earliest deadline first."""
    return seq.job.arrival + seq.job.deadline


def by_slack(seq: Sequence, now: float, remaining: float) -> float:
    """Least remaining slack, as a share of the deadline, so that long jobs do not starve short ones."""
    return (seq.job.arrival + seq.job.deadline - now - remaining) / seq.job.deadline


POLICIES: Mapping[str, Policy] = {"fcfs": by_arrival, "edf": by_deadline, "lrs": by_slack}


def to_promote(seqs: Collection[Sequence], now: float) -> Job | None:
    """Return the background job to rank like any other from now on: the one stalled the longest, if for at least `STARVED_S`.

    Only one is promoted at a time, to limit what it costs urgent work.
    """
    if any(seq.job.promoted for seq in seqs):
        return None
    background = [seq for seq in seqs if seq.job.priority < 0]
    longest = min(background, key=lambda seq: (last_progress(seq), seq.seq_id), default=None)
    return longest.job if longest is not None and now - last_progress(longest) >= STARVED_S else None


def last_progress(seq: Sequence) -> float:
    """When a sequence got its last token; its arrival if it has none."""
    return max(seq.job.arrival, seq.last_token)
