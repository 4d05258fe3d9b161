"""The queue keeps the order that sorting it at every step would give, and a step looks at few of those that wait."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.config.engine import POLICY_NAMES, EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.job import Job, Sequence
from penstock.domain.sampling import SamplingParams
from penstock.engine.scheduling import waiting_queue
from penstock.engine.scheduling.policies import POLICIES, to_promote
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.waiting_queue import Ranking, WaitingQueue
from penstock.engine.sequences.engine_sequences import EngineSequenceManager, Step
from tests.engine.fakes import FakeStream, make_job

CHUNK = 32


def sorted_plainly(seqs: Collection[Sequence], ranking: Ranking) -> list[Sequence]:
    """The order by definition: priority, then the policy, then arrival, then the order of outputs."""

    def urgency(seq: Sequence) -> tuple[int, float, float, int]:
        remaining = ranking.predictor.prefill(seq.remaining, ranking.chunk)
        return (
            -seq.job.effective_priority,
            POLICIES[ranking.policy](seq, ranking.now, remaining),
            seq.job.arrival,
            seq.seq_id,
        )

    return sorted(seqs, key=urgency)


def manager_of(blocks: int, block_size: int = 4) -> EngineSequenceManager:
    return EngineSequenceManager(
        BlockPool(blocks, block_size), eos_ids=frozenset(), text_stream=lambda skip: FakeStream(), secret=b"x" * 32
    )


class QueueMachine(RuleBasedStateMachine):
    """Sequences come, leave and are promoted while time passes and the predictor learns."""

    @initialize(policy=st.sampled_from(POLICY_NAMES), batch=st.sampled_from([1, 2, 16]))
    def begin(self, policy: str, batch: int) -> None:
        self.policy = policy
        self.now = 100.0
        self.predictor = StepTimePredictor()
        self.queue = WaitingQueue()
        self.next_id = 0
        self._batch, waiting_queue.FIRST_BATCH = waiting_queue.FIRST_BATCH, batch

    def teardown(self) -> None:
        waiting_queue.FIRST_BATCH = getattr(self, "_batch", waiting_queue.FIRST_BATCH)

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.policy, self.now, self.predictor, CHUNK)

    @rule(
        priority=st.integers(-2, 2),
        waited=st.sampled_from([0.0, 0.5, 7.0, 40.0]),
        deadline=st.sampled_from([0.25, 1.0, 30.0, 1e6]),
        tokens=st.integers(1, 200),
        outputs=st.integers(1, 3),
    )
    def enter(self, priority: int, waited: float, deadline: float, tokens: int, outputs: int) -> None:
        job, _ = make_job([1] * tokens, SamplingParams(n=outputs), arrival=self.now - waited, priority=priority)
        job.deadline = deadline
        for index in range(outputs):
            seq = Sequence(self.next_id, job, index, [1] * tokens, None)  # type: ignore[arg-type]
            seq.last_token = self.now - waited / 2 if index == 1 else 0.0
            job.sequences.append(seq)
            self.queue[seq.seq_id] = seq
            self.next_id += 1

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        del self.queue[data.draw(st.sampled_from(sorted(self.queue)))]

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        job = self.queue[data.draw(st.sampled_from(sorted(self.queue)))].job
        if job.priority < 0:
            job.promoted = True
            self.queue.refile(job)

    @rule(seconds=st.sampled_from([0.01, 1.0, 20.0]), tokens=st.integers(1, 100))
    def step(self, seconds: float, tokens: int) -> None:
        self.now += seconds
        self.predictor.observe(tokens, 10 * tokens, 0.001 * tokens, 0.01)

    @rule(policy=st.sampled_from(POLICY_NAMES))
    def use_another_policy(self, policy: str) -> None:
        self.policy = policy

    @invariant()
    def its_order_is_the_plain_one(self) -> None:
        if hasattr(self, "queue"):
            assert list(self.queue.in_order(self.ranking)) == sorted_plainly(self.queue.values(), self.ranking)

    @invariant()
    def it_names_the_job_to_promote(self) -> None:
        if hasattr(self, "queue"):
            stalled = self.queue.stalled_longest(self.ranking)
            found = None if stalled is None or self.queue.has_promoted(self.ranking) else to_promote([stalled], self.now)
            assert found is to_promote(self.queue.values(), self.now)


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_the_queue_is_in_the_order_of_a_plain_sort_whatever_happens = QueueMachine.TestCase


class PlainScheduler(Scheduler):
    """Sorts all that wait at each step."""

    def _in_order(self, queue: WaitingQueue, ranking: Ranking) -> Iterator[Sequence]:
        return iter(sorted_plainly(queue.values(), ranking))


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(POLICY_NAMES),
    jobs=st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1), st.integers(1, 3), st.integers(0, 12)), max_size=12),
    blocks=st.integers(3, 30),
)
def test_every_step_decides_what_it_would_with_a_plain_sort(
    policy: str, jobs: list[tuple[int, int, int, int]], blocks: int
) -> None:
    config = EngineConfig(block_size=4, policy=policy, chunk=16, max_sequences=5)
    manager, predictor = manager_of(blocks), StepTimePredictor()
    kept, plain = Scheduler(config, predictor), PlainScheduler(config, predictor)
    for now in range(30):
        for number, (tokens, priority, outputs, arrival) in enumerate(jobs):
            if arrival == now:
                params = SamplingParams(n=outputs, temperature=0, max_tokens=6)
                job, _ = make_job([1 + number] * tokens, params, arrival=float(now), priority=priority)
                job.deadline = 1.0 + tokens / 8
                manager.add(job)
        expected = plain.schedule(manager.pool, manager.queued, manager.holders.values(), 4.0 * now)
        output = kept.schedule(manager.pool, manager.queued, manager.holders.values(), 4.0 * now)
        assert output == expected
        predictor.observe(now + 1, 10 * now, 0.01 * now)
        manager.on_step_completed([Step(span, 7 if span.rows else None) for span in manager.on_schedule(output)])


class _WatchedJob(Job):
    """Counts how often any is looked at."""

    __slots__ = ()
    looked_at = 0

    @property
    def effective_priority(self) -> int:
        _WatchedJob.looked_at += 1
        return super().effective_priority


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_step_looks_at_few_of_those_that_wait(policy: str) -> None:
    manager, scheduler = manager_of(8), Scheduler(EngineConfig(block_size=4, policy=policy), StepTimePredictor())

    def step() -> int:
        _WatchedJob.looked_at = 0
        output = scheduler.schedule(manager.pool, manager.queued, manager.holders.values(), 1.0)
        looked_at = _WatchedJob.looked_at
        manager.on_step_completed([Step(span, 7 if span.rows else None) for span in manager.on_schedule(output)])
        return looked_at

    for number in range(300):
        job, _ = make_job([1 + number % 90] * 14, SamplingParams(temperature=0, max_tokens=1000), arrival=number * 1e-3)
        job.deadline = 1.0
        job.__class__ = _WatchedJob
        manager.add(job)
    step()
    assert manager.holders
    assert len(manager.queued) > 290
    assert step() < 10 * len(manager.holders) + 10
