"""WaitingQueue: the sequences that wait for memory, in the order in which the scheduler considers them.

The order is maintained, not recomputed. Under `fcfs` and `edf` it only changes with the queue. Under `lrs` all ranks change with
time and with what the predictor has learnt, so a step computes the slack of the most urgent priority at once, as columns: some
nanoseconds for each waiting sequence, and only when one could be admitted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.domain.job import Job, Sequence
from penstock.engine.scheduling.policies import last_progress
from penstock.engine.scheduling.predictor import StepTimePredictor

_Key = TypeVar("_Key", tuple[float, int], tuple[float, float, int])

FIRST_BATCH = 16  # sequences that are sorted at first; most steps look at few of them


class Ranking(NamedTuple):
    """What the order of a queue depends on, besides the queue."""

    policy: str
    now: float
    predictor: StepTimePredictor
    chunk: int


class WaitingQueue(dict[int, Sequence]):
    """Sequences by id. Enter one with `queue[seq_id] = seq`, remove it with `del queue[seq_id]`.

    While it waits, its arrival, deadline and tokens must not change; when its priority does, call `refile`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._policy = ""
        self._lanes: dict[int, _Lane] = {}  # by effective priority
        self._filed: dict[int, int] = {}  # the lane of each sequence
        self._new: dict[int, Sequence] = {}  # not filed yet
        self._background: list[tuple[float, int]] = []  # (last progress, seq_id) of those with a priority below 0
        self._promoted: set[int] = set()

    def __setitem__(self, seq_id: int, seq: Sequence) -> None:
        super().__setitem__(seq_id, seq)
        self._new[seq_id] = seq

    def __delitem__(self, seq_id: int) -> None:
        self._unfile(self[seq_id])
        super().__delitem__(seq_id)

    def refile(self, job: Job) -> None:
        """Take note that the priority of a job has changed."""
        for seq in job.sequences:
            if seq.seq_id in self:
                self._unfile(seq)
                self._new[seq.seq_id] = seq

    def in_order(self, ranking: Ranking) -> Iterator[Sequence]:
        """All sequences, the most urgent first; ties are broken by arrival, then by the order of outputs."""
        self._file(ranking.policy)
        for priority in sorted(self._lanes, reverse=True):
            yield from self._lanes[priority].in_order(ranking)

    def stalled_longest(self, ranking: Ranking) -> Sequence | None:
        """The background sequence without progress for the longest time."""
        self._file(ranking.policy)
        return self[self._background[0][1]] if self._background else None

    def has_promoted(self, ranking: Ranking) -> bool:
        """Whether there is a background job that was promoted."""
        self._file(ranking.policy)
        return bool(self._promoted)

    def max_priority(self, ranking: Ranking) -> float:
        """The priority of the most urgent one; below all others if none waits."""
        self._file(ranking.policy)
        return max(self._lanes, default=-math.inf)

    def _file(self, policy: str) -> None:
        """Put new sequences into their lanes. This is not done on entry, since a resumed one gets its tokens only afterwards."""
        if policy != self._policy:
            self._policy = policy
            for seq_id in list(self._filed):
                self._unfile(self[seq_id])
                self._new[seq_id] = self[seq_id]
        for seq_id, seq in self._new.items():
            priority = self._filed[seq_id] = seq.job.effective_priority
            if priority not in self._lanes:
                self._lanes[priority] = _SlackLane() if policy == "lrs" else _SortedLane(policy)
            self._lanes[priority].add(seq)
            if seq.job.priority < 0:
                insort(self._background, (last_progress(seq), seq_id))
            if seq.job.promoted:
                self._promoted.add(seq_id)
        self._new.clear()

    def _unfile(self, seq: Sequence) -> None:
        if self._new.pop(seq.seq_id, None) is not None:
            return
        priority = self._filed.pop(seq.seq_id)
        lane = self._lanes[priority]
        lane.remove(seq)
        if not len(lane):
            del self._lanes[priority]
        if seq.job.priority < 0:
            _take_out(self._background, (last_progress(seq), seq.seq_id))
        self._promoted.discard(seq.seq_id)


class _Lane(Protocol):
    """The waiting sequences of one priority."""

    def __len__(self) -> int: ...

    def add(self, seq: Sequence) -> None: ...

    def remove(self, seq: Sequence) -> None: ...

    def in_order(self, ranking: Ranking) -> Iterator[Sequence]: ...


class _SortedLane:
    """A lane whose order does not change with time."""

    def __init__(self, policy: str) -> None:
        self._by_deadline = policy == "edf"
        self._order: list[tuple[float, float, int]] = []
        self._seqs: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, seq: Sequence) -> None:
        insort(self._order, self._key(seq))
        self._seqs[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        _take_out(self._order, self._key(seq))
        del self._seqs[seq.seq_id]

    def in_order(self, ranking: Ranking) -> Iterator[Sequence]:
        for _, _, seq_id in self._order:
            yield self._seqs[seq_id]

    def _key(self, seq: Sequence) -> tuple[float, float, int]:
        arrival = seq.job.arrival
        return (arrival + seq.job.deadline if self._by_deadline else arrival, arrival, seq.seq_id)


class _SlackLane:
    """A lane ordered by remaining slack: a column for each of arrival, deadline, tokens and seq_id."""

    def __init__(self) -> None:
        self._columns = np.empty((4, 64))
        self._seqs: list[Sequence] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._seqs)

    def add(self, seq: Sequence) -> None:
        place = self._places[seq.seq_id] = len(self._seqs)
        if place == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.empty_like(self._columns)], axis=1)
        self._columns[:, place] = (seq.job.arrival, seq.job.deadline, seq.remaining, seq.seq_id)
        self._seqs.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; the last one takes its place."""
        place, last = self._places.pop(seq.seq_id), self._seqs.pop()
        if last is not seq:
            self._columns[:, place] = self._columns[:, len(self._seqs)]
            self._seqs[place], self._places[last.seq_id] = last, place

    def in_order(self, ranking: Ranking) -> Iterator[Sequence]:
        arrival, deadline, tokens, seq_id = self._columns[:, : len(self._seqs)]
        slack = arrival + deadline
        slack -= ranking.now
        slack -= ranking.predictor.prefill_column(tokens, ranking.chunk)
        slack /= deadline
        size, left = FIRST_BATCH, np.arange(len(slack))
        while len(left):
            batch, left = _split(left, slack, size)
            for place in batch[np.lexsort((seq_id[batch], arrival[batch], slack[batch]))].tolist():
                yield self._seqs[place]
            size *= 8


def _split(places: np.ndarray, slack: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Split places into the `size` with the least slack, ties with the last of them included, and the rest."""
    if len(places) <= size:
        return places, places[:0]
    some = slack if len(places) == len(slack) else slack[places]
    urgent = some <= np.partition(some, size - 1)[size - 1]
    return places[urgent], places[~urgent]


def _take_out(ordered: list[_Key], item: _Key) -> None:
    at = bisect_left(ordered, item)
    assert ordered[at] == item
    del ordered[at]
