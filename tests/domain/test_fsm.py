"""The visit's table, row by row, and that there is nothing beside it."""

from __future__ import annotations

import itertools

import pytest

from penstock.domain.fsm import ComputeStep, Facts, IllegalTransition, JobState, NextLayer, next_state

S, C, N = JobState, ComputeStep, NextLayer

TABLE = [
    # state, facts, next
    (S.VALIDATING, Facts(job_exists=False), S.DONE),
    (S.VALIDATING, Facts(pipe_complete=False), S.DONE),
    (S.VALIDATING, Facts(step=C.HEAD, at_origin=False), S.DONE),
    (S.VALIDATING, Facts(step=C.HEAD, has_ends=False), S.DONE),
    (S.VALIDATING, Facts(step=C.NORM, at_origin=False), S.DONE),
    (S.VALIDATING, Facts(step=C.NORM, has_ends=False), S.DONE),
    (S.VALIDATING, Facts(step=C.TOKENIZE), S.EMBED),
    (S.VALIDATING, Facts(step=C.EMBED), S.EMBED),
    (S.VALIDATING, Facts(step=C.NORM, prefill_left=False), S.HEAD),
    (S.VALIDATING, Facts(step=C.NORM, prefill_left=True), S.EMBED),
    (S.VALIDATING, Facts(step=C.NORM, prefill_left=True, grantable=False), S.DONE),
    (S.VALIDATING, Facts(step=C.HEAD, prefill_left=True), S.EMBED),
    (S.VALIDATING, Facts(step=C.HEAD, prefill_left=False), S.HEAD),
    (S.VALIDATING, Facts(step=C.HEAD, prefill_left=True, grantable=False), S.DONE),
    (S.VALIDATING, Facts(step=C.LAYER), S.PROCESS_LAYERS),
    (S.EMBED, Facts(update_sent=False), S.DONE),
    (S.EMBED, Facts(next_layer=N.MISSING), S.DONE),
    (S.EMBED, Facts(next_layer=N.REMOTE), S.SEND),
    (S.EMBED, Facts(next_layer=N.LOCAL), S.PROCESS_LAYERS),
    (S.PROCESS_LAYERS, Facts(next_layer=N.MISSING), S.DONE),
    (S.PROCESS_LAYERS, Facts(next_layer=N.REMOTE), S.SEND),
    (S.PROCESS_LAYERS, Facts(next_layer=N.LOCAL), S.PROCESS_LAYERS),
    (S.PROCESS_LAYERS, Facts(next_layer=N.COMPLETE, at_origin=True), S.VALIDATING),
    (S.PROCESS_LAYERS, Facts(next_layer=N.COMPLETE, at_origin=False), S.SEND),
    (S.HEAD, Facts(complete=True), S.DONE),
    (S.HEAD, Facts(update_sent=False), S.DONE),
    (S.HEAD, Facts(job_exists=False), S.DONE),
    (S.HEAD, Facts(pipe_complete=False), S.DONE),
    (S.HEAD, Facts(), S.EMBED),
    (S.SEND, Facts(), S.DONE),
]

EDGES = {
    S.VALIDATING: {S.DONE, S.EMBED, S.HEAD, S.PROCESS_LAYERS},
    S.EMBED: {S.DONE, S.SEND, S.PROCESS_LAYERS},
    S.PROCESS_LAYERS: {S.DONE, S.SEND, S.PROCESS_LAYERS, S.VALIDATING},
    S.HEAD: {S.DONE, S.EMBED},
    S.SEND: {S.DONE},
    S.DONE: set(),
}


def every_facts() -> list[Facts]:
    flags = [(False, True)] * 8
    return [
        Facts(step, job, pipe, origin, ends, left, grantable, layer, sent, complete)
        for step, layer in itertools.product(ComputeStep, NextLayer)
        for job, pipe, origin, ends, left, grantable, sent, complete in itertools.product(*flags)
    ]


@pytest.mark.parametrize("state,facts,expected", TABLE)
def test_each_row_of_the_table(state: JobState, facts: Facts, expected: JobState) -> None:
    assert next_state(state, facts) is expected


def test_no_other_transition_exists() -> None:
    """Over all 5,120 combinations of facts, a state leads only where the table does, and to each of those somewhere."""
    for state, allowed in EDGES.items():
        reached = set()
        for facts in every_facts():
            try:
                reached.add(next_state(state, facts))
            except IllegalTransition:
                continue
        assert reached == allowed, state


def test_the_head_step_away_from_home_never_reaches_the_head() -> None:
    for facts in every_facts():
        if facts.step in (C.NORM, C.HEAD) and not (
            facts.at_origin and facts.has_ends and facts.job_exists and facts.pipe_complete
        ):
            assert next_state(S.VALIDATING, facts) is S.DONE


def test_a_visit_ends_in_any_state_when_its_route_is_closed() -> None:
    closed = Facts(pipe_complete=False, next_layer=N.MISSING)
    for state in (S.VALIDATING, S.EMBED, S.PROCESS_LAYERS, S.HEAD, S.SEND):
        for step in ComputeStep:
            assert next_state(state, closed._replace(step=step)) is S.DONE


def test_done_is_the_end() -> None:
    with pytest.raises(IllegalTransition):
        next_state(S.DONE, Facts())
