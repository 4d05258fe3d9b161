"""The states of a sequence: every arrow that there is, and that there is no other."""

from __future__ import annotations

import itertools

import pytest

from penstock.domain.blocks import KeyChain
from penstock.domain.job import Job, Sequence, SequenceState
from penstock.domain.request import JobRequest

S = SequenceState

ARROWS = {
    (S.WAITING, S.RUNNING),  # scheduled
    (S.WAITING, S.IGNORED),  # can never fit
    (S.WAITING, S.FINISHED),  # cancelled before its turn
    (S.RUNNING, S.PAUSED),  # its Span is back, or the next one does not wait for it
    (S.PAUSED, S.RUNNING),  # scheduled again; nothing was lost meanwhile
    (S.RUNNING, S.WAITING_PREEMPT),
    (S.PAUSED, S.WAITING_PREEMPT),
    (S.WAITING_PREEMPT, S.RUNNING),
    (S.RUNNING, S.FINISHED),
    (S.PAUSED, S.FINISHED),
    (S.WAITING_PREEMPT, S.FINISHED),  # cancelled, or it does not fit any more
}


def in_state(state: SequenceState) -> Sequence:
    job = Job("1_1_1", JobRequest(prompt=[1]), [1], 5, 0, 0.0, lambda update: None)
    return Sequence(0, job, 0, [1], KeyChain(b"x" * 32, 16), state)


@pytest.mark.parametrize("before,after", list(itertools.product(S, S)), ids=lambda state: state.name)
def test_a_sequence_moves_along_an_arrow_and_no_other_way(before: SequenceState, after: SequenceState) -> None:
    seq = in_state(before)
    if (before, after) in ARROWS:
        seq.move(after)
        assert seq.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} -> {after.name}"):
            seq.move(after)


def test_a_sequence_begins_as_waiting() -> None:
    job = in_state(S.WAITING).job
    assert Sequence(1, job, 0, [1], KeyChain(b"x" * 32, 16)).state is S.WAITING
