"""The five events of a SequenceManager, driven alike at the origin and at a stage."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.domain.blocks import BlockPool
from penstock.domain.job import HOLDS_KV, Sequence, SequenceState
from penstock.domain.route import RouteId
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob, Notice, NoticeKind, Position, Span, Verdict
from penstock.engine.scheduling.scheduler import Grant, SchedulerOutput
from penstock.engine.sequences.engine_sequences import EngineSequenceManager, Step
from penstock.engine.sequences.sequence_manager import SequenceManager
from penstock.engine.sequences.worker_sequences import Replica, WorkerSequenceManager
from tests.engine.fakes import FakeStream, make_job

BLOCK = 4
PROMPT = list(range(1, 13))  # three blocks


class AtTheOrigin:
    """One sequence of an EngineSequenceManager."""

    def __init__(self, prefix_cache: bool) -> None:
        pool = BlockPool(8, BLOCK, prefix_cache=prefix_cache)
        self._manager = EngineSequenceManager(
            pool, eos_ids=frozenset(), text_stream=lambda skip_special: FakeStream(), secret=b"s" * 32
        )
        self.events: SequenceManager[Any, Any, Any] = self._manager
        self.pool = pool
        job, _ = make_job(PROMPT, SamplingParams(max_tokens=9))
        self._manager.add(job)
        (self.seq,) = job.sequences

    def decision(self, n: int) -> SchedulerOutput:
        return SchedulerOutput([Grant(self.seq, n)])

    def span(self, n: int) -> Span:
        return Span(self.seq.seq_id, self.seq.incarnation, 0, 0, self.seq.scheduled - n, n, 1)

    def step(self, span: Span) -> Step:
        return Step(span, token_id=7 if span.end == len(self.seq.tokens) else None)

    def view(self) -> Sequence:
        return self.seq


class AtAStage:
    """One sequence of a WorkerSequenceManager, of which an origin far away says the same."""

    def __init__(self, prefix_cache: bool) -> None:
        self._manager = WorkerSequenceManager(BlockPool(8, BLOCK, prefix_cache=prefix_cache))
        self._keys = prefix_cache
        self._incarnation = 0
        self._sent = 0
        self._numbers = iter(range(100))
        self.events: SequenceManager[Any, Any, Any] = self._manager
        self.pool = self._manager.pool
        self._last: Replica | None = None

    def decision(self, n: int) -> NetworkJob:
        self._incarnation = 0 if self._last is None else self._last.incarnation
        self._sent = 0 if self._last is None else self._last.kv_len
        span = Span(0, self._incarnation, 0, 0, self._sent, n, 1)
        self._sent += n
        return NetworkJob(RouteId("origin", 0, 0), next(self._numbers), [span])

    def span(self, n: int) -> Span:
        return Span(0, self._incarnation, 0, 0, self._sent - n, n, 1)

    def step(self, span: Span) -> Notice:
        first, full = span.start_pos // BLOCK, span.end // BLOCK
        keys = tuple(bytes([i]) * 16 for i in range(first, full)) if self._keys else ()
        return Notice(next(self._numbers), NoticeKind.STEP_COMPLETED, 0, self._incarnation, full - len(keys), keys)

    def view(self) -> Replica:
        self._last = self._manager.replicas.get(0, self._last)
        assert self._last is not None
        return self._last


Side = AtTheOrigin | AtAStage


@pytest.fixture(params=[AtTheOrigin, AtAStage])
def side(request: pytest.FixtureRequest) -> Side:
    found: Side = request.param(prefix_cache=True)
    return found


def cursors(side: Side) -> tuple[int, int]:
    return side.view().stage_processed, side.view().step_processed


def grant(side: Side, n: int) -> Span:
    (outcome,) = side.events.on_schedule(side.decision(n))
    assert outcome is Verdict.APPEND or (isinstance(outcome, Span) and outcome.n == n)
    side.view()
    return side.span(n)


def test_a_sequence_runs_when_it_is_scheduled_and_pauses_when_its_step_is_done(side: Side) -> None:
    span = grant(side, len(PROMPT))
    assert side.view().state is SequenceState.RUNNING
    assert cursors(side) == (0, 0)
    side.events.on_stage_completed([span])
    assert cursors(side) == (12, 0), "one stage is not all of them"
    side.events.on_step_completed([side.step(span)])
    assert cursors(side) == (12, 12)
    assert side.view().state is SequenceState.PAUSED


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("kind", [AtTheOrigin, AtAStage])
def test_both_cursors_follow_the_chunks_of_a_prompt(kind: type[Side], prefix_cache: bool) -> None:
    side = kind(prefix_cache)
    first, second = grant(side, 8), None
    side.events.on_stage_completed([first])
    second = grant(side, 4)
    assert cursors(side) == (8, 0)
    side.events.on_step_completed([side.step(first)])
    side.events.on_stage_completed([Position(second.seq_id, second.incarnation, second.attempt, second.end)])
    assert cursors(side) == (12, 8)
    assert side.view().state in HOLDS_KV


def test_a_preempted_sequence_gives_its_memory_back_and_comes_again_as_another_incarnation(side: Side) -> None:
    span = grant(side, 8)
    side.events.on_stage_completed([span])
    held = side.pool.held
    side.events.preempt_seq(span)
    assert (held, side.pool.held) == (2, 0)
    assert side.view().state is SequenceState.WAITING_PREEMPT
    assert cursors(side) == (0, 0)
    side.events.on_stage_completed([span])
    assert cursors(side) == (0, 0), "it is of the incarnation before"
    again = grant(side, len(PROMPT))
    assert side.view().state is SequenceState.RUNNING
    assert (again.incarnation, side.view().incarnation) == (1, 1)
    side.events.preempt_seq(span)
    side.events.free_seq(span)
    assert side.view().state is SequenceState.RUNNING, "what names an older incarnation changes nothing"


@pytest.mark.parametrize("preempted", [False, True])
def test_a_freed_sequence_is_finished_and_holds_nothing(side: Side, preempted: bool) -> None:
    span = grant(side, 8)
    if preempted:
        side.events.preempt_seq(span)
        span = span._replace(incarnation=1)
    side.events.free_seq(span)
    assert side.view().state is SequenceState.FINISHED
    assert side.pool.held == 0
    side.events.free_seq(span)
    side.events.preempt_seq(span)
    assert side.view().state is SequenceState.FINISHED


def test_a_paused_sequence_resumes_to_running_and_not_to_the_queue(side: Side) -> None:
    first = grant(side, 8)
    side.events.on_stage_completed([first])
    assert side.view().state is SequenceState.PAUSED
    grant(side, 4)
    assert side.view().state is SequenceState.RUNNING


def test_the_named_properties_of_a_prompt_say_where_it_is() -> None:
    side = AtTheOrigin(prefix_cache=True)

    def finished() -> tuple[bool, bool]:
        return side.seq.prompt_stage_processing_finished, side.seq.is_step_processing_complete

    first = grant(side, 8)
    side.events.on_stage_completed([first])
    assert finished() == (False, False)
    second = grant(side, 4)
    side.events.on_stage_completed([second])
    assert finished() == (True, False)
    side.events.on_step_completed([side.step(first)])
    assert finished() == (True, False)
    side.events.on_step_completed([side.step(second)])
    assert finished() == (True, True)


# ---- what only a stage has ----


def test_a_stage_waits_for_its_first_span() -> None:
    side = AtAStage(prefix_cache=True)
    gap = NetworkJob(RouteId("origin", 0, 0), 0, [Span(0, 0, 0, 0, 4, 4, 1)])
    assert side.events.on_schedule(gap) == [Verdict.GAP]
    assert side.view().state is SequenceState.WAITING


def test_a_new_attempt_tells_a_stage_what_had_passed_all() -> None:
    side = AtAStage(prefix_cache=True)
    side.events.on_stage_completed([grant(side, 11)])
    assert cursors(side) == (11, 0)
    side.events.on_schedule(NetworkJob(RouteId("origin", 0, 0), 5, [Span(0, 0, 1, 6, 6, 4, 1)]))
    assert cursors(side) == (6, 6)


def test_a_stage_does_not_believe_that_more_passed_all_stages_than_passed_it() -> None:
    side = AtAStage(prefix_cache=False)
    side.events.on_stage_completed([grant(side, 6)])
    side.events.on_step_completed([Notice(9, NoticeKind.STEP_COMPLETED, 0, 0, 2**47)])
    assert cursors(side) == (6, 6)


def test_a_failed_pass_leaves_a_stage_paused_where_it_was() -> None:
    manager = WorkerSequenceManager(BlockPool(8, BLOCK))
    span = Span(0, 0, 0, 0, 0, 8, 1)
    manager.on_schedule(NetworkJob(RouteId("origin", 0, 0), 0, [span]))
    manager.undo(span)
    assert (manager.replicas[0].state, manager.replicas[0].kv_len) == (SequenceState.PAUSED, 0)


def test_a_stage_reports_each_prompt_once_and_forgets_what_is_over() -> None:
    manager = WorkerSequenceManager(BlockPool(16, BLOCK))

    def run(seq_id: int, start: int, n: int) -> None:
        span = Span(seq_id, 0, 0, 0, start, n, 0)
        manager.on_schedule(NetworkJob(RouteId("origin", 0, 0), 0, [span]))
        manager.on_stage_completed([span])

    for seq_id in range(3):
        run(seq_id, 0, 4)
    run(0, 4, 4)
    manager.free_seq(Notice(0, NoticeKind.FREED, 1, 0))
    manager.preempt_seq(Notice(1, NoticeKind.PREEMPTED, 2, 0))
    assert manager.take_progress() == (Position(0, 0, 0, 8),)
    run(0, 8, 1)
    assert manager.take_progress() == (), "a single token is on its way home"
