"""Which prompts are admitted: one that waits for other origins holds up none, one that waits for its own is not overtaken."""

from __future__ import annotations

import pytest

from penstock.config.engine import POLICY_NAMES, EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.job import Job
from penstock.domain.sampling import SamplingParams
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequences.engine_sequences import EngineSequenceManager, Step
from tests.engine.fakes import FakeStream, make_job

BLOCK = 4
LEASE, REACH = 8, 16  # blocks
LONG, SHORT, TOO_LONG = 40, 7, 70  # tokens: more than the lease, little of it, more than it can become


class Admission:
    """A scheduler and its sequences on a lease. All jobs come with the same deadline, so every policy ranks them by arrival."""

    def __init__(self, policy: str) -> None:
        self.manager = EngineSequenceManager(
            BlockPool(LEASE, BLOCK), eos_ids=frozenset(), text_stream=lambda skip: FakeStream(), secret=b"x" * 32
        )
        self._scheduler = Scheduler(EngineConfig(block_size=BLOCK, policy=policy, chunk=512), StepTimePredictor())
        self._arrivals = 0

    def ask(self, tokens: int, priority: int = 0) -> Job:
        self._arrivals += 1
        prompt = [1 + self._arrivals] * tokens
        params = SamplingParams(temperature=0, max_tokens=1000)
        job, _ = make_job(prompt, params, arrival=float(self._arrivals), priority=priority)
        job.deadline = 1e9
        self.manager.add(job)
        return job

    def step(self) -> None:
        manager = self.manager
        output = self._scheduler.schedule(
            manager.pool, manager.queued, manager.holders.values(), float(self._arrivals), reach=REACH
        )
        manager.on_step_completed([Step(span, 7 if span.rows else None) for span in manager.on_schedule(output)])

    def runs(self, job: Job) -> bool:
        return job.sequences[0].seq_id in self.manager.holders


@pytest.fixture(params=POLICY_NAMES)
def admission(request: pytest.FixtureRequest) -> Admission:
    return Admission(request.param)


def test_a_prompt_that_no_lease_can_hold_fails_and_one_that_a_larger_lease_can_hold_waits(admission: Admission) -> None:
    too_long, long, short = (admission.ask(tokens) for tokens in (TOO_LONG, LONG, SHORT))
    admission.step()
    assert not too_long.open
    assert long.open
    assert not admission.runs(long)
    assert admission.runs(short)


def test_once_the_lease_has_grown_no_later_prompt_is_admitted_before_the_one_that_waited(admission: Admission) -> None:
    first = admission.ask(SHORT)
    long = admission.ask(LONG)
    second = admission.ask(SHORT)
    admission.step()
    assert [admission.runs(job) for job in (first, long, second)] == [True, False, True]
    admission.manager.resize(12)  # it needs ten and a reserve: with two short ones beside it, it does not fit
    third = admission.ask(SHORT)
    admission.step()
    assert [admission.runs(job) for job in (long, third)] == [False, False]
    admission.manager.cancel(first)
    admission.manager.cancel(second)
    admission.step()
    assert admission.runs(long)
    assert not admission.runs(third), "there is no room beside it"


def test_an_urgent_prompt_that_waits_for_a_larger_lease_keeps_no_other_from_preempting(admission: Admission) -> None:
    background = [admission.ask(2 * SHORT, priority=-1) for _ in range(2)]
    admission.step()
    long, short = admission.ask(LONG, priority=1), admission.ask(SHORT, priority=1)
    admission.step()
    assert [admission.runs(job) for job in (*background, long, short)] == [True, False, False, True]


def test_while_memory_is_full_the_cache_is_not_searched_for_those_that_wait(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [admission.ask(SHORT) for _ in range(4)]
    admission.step()
    assert [admission.runs(job) for job in jobs] == [True, True, True, False]
    searched: list[object] = []
    monkeypatch.setattr(admission.manager.pool, "lookup", searched.append)
    admission.step()
    assert not searched
