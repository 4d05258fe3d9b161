"""Background jobs wait for all others, but not for ever: one that has stood still for long is lifted, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.config.engine import POLICY_NAMES, EngineConfig
from penstock.domain.job import HOLDS_KV, Job, SequenceState
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import JobDone, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.scheduling import policies
from penstock.engine.scheduling.policies import STARVED_S
from penstock.engine.scheduling.scheduler import SchedulerOutput
from penstock.errors import EngineStopped, QueueFull
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import VOCAB, FakeEnds, FakeSegment, FakeStream, finish, make_engine, make_job, oracle

TURN = 0.1  # seconds that pass with each turn of the engine
ONE_PLACE = (EngineConfig(block_size=2, max_sequences=1), 200)
ONE_MEMORY = (EngineConfig(block_size=2), 9)  # blocks: two of the jobs below do not fit together


def answer_of(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class Busy:
    """An engine on simulated time."""

    def __init__(self, config: EngineConfig, blocks: int) -> None:
        self.now = 1000.0
        segment = FakeSegment(0, 2, blocks, config.block_size)
        self.engine = Engine(
            config, Pipe("fake", 2, [segment]), FakeEnds(), lambda skip_special: FakeStream(), clock=lambda: self.now
        )
        self.interactive: list[tuple[Job, list[JobUpdate]]] = []
        self.lifts: list[Job] = []  # in the order in which they were lifted

    def submit(
        self, priority: int, *, prompt: list[int] | None = None, tokens: int = 4, deadline: float | None = None
    ) -> tuple[Job, list[JobUpdate]]:
        job, updates = make_job(
            prompt or [1 + len(self.interactive) % 40] * 9,
            answer_of(tokens),
            arrival=self.now,
            priority=priority,
            deadline=deadline,
        )
        self.engine.submit(job)
        self.engine.take_commands(wait=False)
        return job, updates

    def turn(self) -> None:
        self.engine.turn()
        self.now += TURN
        manager = self.engine.sequences
        promoted = {seq.job for seq in [*manager.queued.values(), *manager.holders.values()] if seq.job.promoted}
        assert len(promoted) <= 1, "one at a time"
        self.lifts += promoted - set(self.lifts)

    def crowd(self, seconds: float, until: Callable[[], bool] = lambda: False, priority: int = 0) -> bool:
        """Interactive work without end: somebody always waits. Whether `until` came true in so many seconds."""
        end = self.now + seconds
        while self.now < end and not until():
            while sum(job.open for job, _ in self.interactive) < 3:
                self.interactive.append(self.submit(priority))
            self.turn()
        return until()


def said(updates: list[JobUpdate]) -> list[int]:
    return [token for u in updates if isinstance(u, TokensOut) for token in u.token_ids]


def done(updates: list[JobUpdate]) -> bool:
    return bool(updates) and isinstance(updates[-1], JobDone)


# ---- lifted ----


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("saturated", [ONE_PLACE, ONE_MEMORY])
def test_a_background_job_ends_though_interactive_work_never_does(saturated: tuple[EngineConfig, int], policy: str) -> None:
    config, blocks = saturated
    busy = Busy(EngineConfig(block_size=2, max_sequences=config.max_sequences, policy=policy), blocks)
    busy.crowd(2.0)
    background, updates = busy.submit(-1, prompt=[7] * 9, tokens=6)
    assert busy.crowd(STARVED_S + 10.0, lambda: done(updates))
    assert said(updates) == oracle([7] * 9, answer_of(6), stages=1, seed=1)
    assert busy.lifts == [background]
    assert all(done(others) for job, others in busy.interactive if not job.open)


@pytest.mark.parametrize("saturated", [ONE_PLACE, ONE_MEMORY])
def test_without_being_lifted_it_would_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, saturated: tuple[EngineConfig, int]
) -> None:
    """What the test above can fail for."""
    monkeypatch.setattr(policies, "STARVED_S", 1e9)
    busy = Busy(*saturated)
    busy.crowd(2.0)
    _, updates = busy.submit(-1, tokens=6)
    assert not busy.crowd(5 * STARVED_S, lambda: bool(updates))


def test_a_job_is_lifted_when_it_has_stood_still_for_long_and_not_before() -> None:
    busy = Busy(*ONE_PLACE)
    busy.crowd(2.0)
    background, _ = busy.submit(-1)
    busy.crowd(STARVED_S - 1.0)
    assert not background.promoted
    assert busy.crowd(2.0, lambda: background.promoted)


def test_a_background_job_that_goes_on_is_not_lifted_however_long_it_takes() -> None:
    busy = Busy(EngineConfig(block_size=2), 300)
    background, updates = busy.submit(-1, tokens=500)
    while not done(updates):
        busy.turn()
    assert busy.now - background.arrival > 1.5 * STARVED_S
    assert not busy.lifts


def test_a_job_that_was_preempted_is_lifted_so_long_after_its_last_token() -> None:
    busy = Busy(*ONE_PLACE)
    background, updates = busy.submit(-1, tokens=200)
    while len(said(updates)) < 100:
        busy.turn()
    stood_still = busy.now
    assert busy.crowd(STARVED_S + 2.0, lambda: background.promoted)
    assert busy.now - stood_still > STARVED_S - 1.0
    assert busy.crowd(60.0, lambda: done(updates))
    assert background.preemptions == 1


def test_nobody_of_priority_zero_is_lifted() -> None:
    busy = Busy(*ONE_PLACE)
    busy.crowd(2.0, priority=1)
    waiting, _ = busy.submit(0)
    busy.crowd(2 * STARVED_S, priority=1)
    assert not waiting.promoted
    assert not busy.lifts


# ---- one at a time ----


def test_two_that_starve_are_lifted_one_after_the_other() -> None:
    busy = Busy(*ONE_PLACE)
    busy.crowd(2.0)
    first, first_updates = busy.submit(-2, tokens=20)
    busy.crowd(0.5)
    second, second_updates = busy.submit(-1, tokens=20)
    assert busy.crowd(STARVED_S + 20.0, lambda: done(first_updates))
    assert busy.lifts == [first], "the longest wait counts, not the priority among them"
    assert said(second_updates) == []
    assert busy.crowd(20.0, lambda: done(second_updates))
    assert busy.lifts == [first, second]


def test_when_a_lifted_job_is_cancelled_the_next_one_is_lifted() -> None:
    busy = Busy(*ONE_PLACE)
    busy.crowd(2.0)
    first, _ = busy.submit(-1)
    second, updates = busy.submit(-1)
    assert busy.crowd(STARVED_S + 2.0, lambda: first.promoted)
    busy.engine.cancel(first)
    busy.engine.take_commands(wait=False)
    assert busy.crowd(20.0, lambda: done(updates))
    assert busy.lifts == [first, second]


def test_to_lift_somebody_is_a_decision_after_which_the_engine_looks_again() -> None:
    job, _ = make_job([1], answer_of(1), priority=-1)
    assert SchedulerOutput(promoted=job)
    assert not SchedulerOutput()


# ---- how it ranks then ----


def running_in_the_background(busy: Busy, *, promoted: bool) -> Job:
    job, updates = busy.submit(-1, tokens=6)
    while not said(updates):
        busy.turn()
    job.promoted = promoted
    return job


@pytest.mark.parametrize("promoted,priority,stays", [(True, 0, True), (False, 0, False), (True, 1, False), (True, -1, True)])
@pytest.mark.parametrize("saturated", [ONE_PLACE, ONE_MEMORY])
def test_whom_a_running_job_gives_way_to(saturated: tuple[EngineConfig, int], promoted: bool, priority: int, stays: bool) -> None:
    busy = Busy(*saturated)
    job = running_in_the_background(busy, promoted=promoted)
    newcomer, _ = busy.submit(priority, prompt=[9] * 9)
    busy.turn()
    assert (job.sequences[0].state in HOLDS_KV) == stays
    assert (newcomer.sequences[0].state is SequenceState.WAITING) == stays


def test_a_lifted_job_takes_the_place_of_another_background_job() -> None:
    busy = Busy(*ONE_PLACE)
    other = running_in_the_background(busy, promoted=False)
    promoted, _ = busy.submit(-2)
    promoted.promoted = True
    busy.turn()
    assert promoted.sequences[0].state in HOLDS_KV
    assert other.sequences[0].state is SequenceState.WAITING_PREEMPT


@pytest.mark.parametrize("promoted", [True, False])
def test_nobody_is_sent_away_for_a_newcomer_who_would_need_the_place_of_a_lifted_job_too(promoted: bool) -> None:
    busy = Busy(EngineConfig(block_size=2), 12)
    jobs = [busy.submit(-1, prompt=[token] * 5, tokens=9)[0] for token in (7, 8)]
    jobs[0].promoted = promoted
    for _ in range(4):
        busy.turn()
    newcomer, _ = busy.submit(0, prompt=[9] * 19)
    busy.turn()
    assert [job.sequences[0].state in HOLDS_KV for job in (*jobs, newcomer)] == [promoted, promoted, not promoted]


@pytest.mark.parametrize("promoted", [True, False])
def test_when_other_nodes_call_memory_back_a_lifted_job_is_not_the_first_to_go(promoted: bool) -> None:
    busy = Busy(EngineConfig(block_size=2), 12)
    older, younger = (busy.submit(-1, prompt=[token] * 5, tokens=9)[0] for token in (7, 8))
    younger.promoted = promoted
    for _ in range(4):
        busy.turn()
    origin = busy.engine.origin
    assert isinstance(origin, Origin)
    assert origin.route is not None
    origin.route.shares["another"] = 5
    origin._lease._shrink(origin.route)
    assert [job.preemptions for job in (older, younger)] == ([1, 0] if promoted else [0, 1])


@pytest.mark.parametrize("promoted", [True, False])
def test_when_memory_runs_out_a_lifted_job_is_a_victim_by_its_age_like_any_other(promoted: bool) -> None:
    busy = Busy(EngineConfig(block_size=2, policy="fcfs", prefix_cache=False), 14)
    background, updates = busy.submit(-1, prompt=[7] * 5, tokens=14)
    background.promoted = promoted
    busy.turn()
    younger, more = busy.submit(0, prompt=[8] * 5, tokens=14)
    while not (done(updates) and done(more)):
        busy.turn()
    assert (background.preemptions > 0, younger.preemptions > 0) == (not promoted, promoted)


# ---- jobs out of a queue with a bound of its own ----


def factory(max_jobs: int) -> JobFactory:
    return JobFactory(make_engine(EngineConfig()), None, context=60, vocab=VOCAB, max_jobs=max_jobs)  # type: ignore[arg-type]


def ignore(update: JobUpdate) -> None:
    pass


REQUEST = JobRequest(prompt=[1, 2, 3], sampling=answer_of(2))


def test_jobs_that_are_not_counted_are_never_refused_and_take_no_room_from_others() -> None:
    jobs = factory(max_jobs=2)
    for _ in range(5):
        jobs.start_job(REQUEST, ignore, counted=False)
    jobs.start_job(REQUEST, ignore)
    jobs.check_room()
    jobs.start_job(REQUEST, ignore)
    with pytest.raises(QueueFull, match="2 answers are open"):
        jobs.start_job(REQUEST, ignore)
    jobs.start_job(REQUEST, ignore, counted=False)
    assert len(jobs.open_jobs) == 8


def test_open_jobs_are_listed_until_they_end_counted_or_not() -> None:
    jobs = factory(max_jobs=2)
    handles = [jobs.start_job(REQUEST, ignore, counted=counted) for counted in (True, False)]
    assert {job.job_id for job in jobs.open_jobs} == {handle.job_id for handle in handles}
    finish(jobs._engine)
    assert jobs.open_jobs == []


@pytest.mark.parametrize("counted", [True, False])
def test_a_job_that_a_stopped_engine_refuses_is_not_open(counted: bool) -> None:
    jobs = factory(max_jobs=2)
    jobs._engine.stop()
    with pytest.raises(EngineStopped):
        jobs.start_job(REQUEST, ignore, counted=counted)
    assert jobs.open_jobs == []
