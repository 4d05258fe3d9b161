"""The engine over fake stages: the worked example of pipelining, preemption, priorities, n > 1, failures, the thread."""

from __future__ import annotations

import itertools
import threading

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.job import SequenceState
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, PrefillProgress, TokensOut
from penstock.engine.engine import Engine
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequences.engine_sequences import EngineSequenceManager, Step
from penstock.errors import ComputeFailed, ConfigError, EngineStopped, NotReady, PromptTooLong
from tests.engine.fakes import FakeSegment, FakeStream, finish, make_engine, make_job, oracle, own


def submit(engine: Engine, prompt: list[int], sampling: SamplingParams, **details: object) -> tuple[object, list[JobUpdate]]:
    job, updates = make_job(prompt, sampling, **details)  # type: ignore[arg-type]
    engine.submit(job)
    engine.take_commands(wait=False)
    return job, updates


def said(updates: list[JobUpdate], index: int = 0) -> list[int]:
    return [token for u in updates if isinstance(u, TokensOut) and u.index == index for token in u.token_ids]


GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def test_a_thousand_tokens_over_two_stages_as_in_the_worked_example() -> None:
    """Vajra's example: 1,000 tokens in two halves over two stages, and the value of each cursor at each time."""
    engine = make_engine(EngineConfig(chunk=500), stages=2, blocks=100)
    job, _ = submit(engine, [1] * 1000, GREEDY)
    (seq,) = job.sequences  # type: ignore[attr-defined]
    first, second = engine.stages.values()
    seen: list[tuple[int, int, int]] = []

    def look() -> tuple[int, int, int]:
        stages = [own(stage).replicas[seq.seq_id].stage_processed if own(stage).replicas else 0 for stage in (first, second)]
        return (seq.step_processed, *stages)  # type: ignore[return-value]

    while seq.step_processed < 1000 and len(seen) < 100:
        engine.turn()
        if not seen or look() != seen[-1]:
            seen.append(look())
    assert seen == [
        # step, stage 0, stage 1
        (0, 0, 0),  # time 0: stage 0 has started
        (0, 500, 0),  # time 1: the first half is through stage 0
        (0, 500, 500),  # one thread runs both stages, so they take turns between the example's times
        (0, 1000, 500),
        (500, 1000, 500),  # time 2: the first half is through both, the second through stage 0
        (500, 1000, 1000),
        (1000, 1000, 1000),  # time 3
    ]
    assert seq.stage_processed == 1000


def test_two_chunks_of_one_prompt_are_in_flight_together() -> None:
    engine = make_engine(EngineConfig(chunk=4), stages=3)
    job, _ = submit(engine, list(range(1, 13)), GREEDY)
    most = 0
    for _ in range(12):
        engine.turn()
        most = max(most, job.sequences[0].in_flight)  # type: ignore[attr-defined]
    assert most >= 2


def test_prefill_progress_reaches_the_client_chunk_by_chunk() -> None:
    engine = make_engine(EngineConfig(idle_chunk=4))
    _, updates = submit(engine, list(range(1, 11)), GREEDY)
    finish(engine)
    assert [(u.done, u.total) for u in updates if isinstance(u, PrefillProgress)] == [(4, 10), (8, 10), (10, 10)]


def test_preempted_work_goes_on_where_it_was_and_says_nothing_twice() -> None:
    """Two jobs of which only one fits: the later is preempted, and still gets the same tokens as when alone."""
    engine = make_engine(EngineConfig(block_size=2, prefix_cache=False), blocks=12)
    sampling = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
    jobs = [submit(engine, prompt, sampling, seed=i, arrival=float(i)) for i, prompt in enumerate(([1, 2, 3], [4, 5, 6]))]
    finish(engine)
    assert engine.sequences.preemptions > 0
    for i, ((_, updates), prompt) in enumerate(zip(jobs, ([1, 2, 3], [4, 5, 6]), strict=True)):
        assert said(updates) == oracle(prompt, sampling, stages=1, seed=i)
        assert isinstance(updates[-1], JobDone)
    assert jobs[1][1][-1].timings.preemptions > 0  # type: ignore[union-attr]


def test_an_important_job_takes_the_memory_of_a_less_important_one() -> None:
    engine = make_engine(EngineConfig(block_size=2), blocks=6)
    low, _ = submit(engine, [1] * 9, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), priority=0)
    while not low.sequences[0].generated:  # type: ignore[attr-defined]
        engine.turn()
    high, _ = submit(engine, [2] * 9, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), priority=5, arrival=1.0)
    engine.turn()
    assert high.sequences[0].state in (SequenceState.RUNNING, SequenceState.PAUSED)  # type: ignore[attr-defined]
    assert low.sequences[0].state is SequenceState.WAITING_PREEMPT  # type: ignore[attr-defined]
    finish(engine)


def test_several_outputs_compute_their_prompt_once() -> None:
    engine = make_engine(EngineConfig(block_size=2))
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    _, updates = submit(engine, prompt, SamplingParams(n=3, temperature=1.0, max_tokens=4, ignore_eos=True))
    finish(engine)
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    prompt_tokens = sum(piece.n for batch in segment.passes for piece in batch if piece.start_pos < len(prompt))
    assert prompt_tokens == 9 + 1 + 1, "the other two compute only the last, partial block"
    assert len({tuple(said(updates, i)) for i in range(3)}) > 1, "each output has its own noise"


def test_a_prompt_that_can_never_fit_is_ignored_with_the_limit_and_the_rest_goes_on() -> None:
    engine = make_engine(EngineConfig(block_size=2), blocks=4)
    _, too_long = submit(engine, [1] * 20, GREEDY)
    _, fits = submit(engine, [1] * 2, GREEDY, arrival=1.0)
    finish(engine)
    assert isinstance(too_long[-1], JobFailed)
    assert isinstance(too_long[-1].error, PromptTooLong)
    assert "8" in str(too_long[-1].error)
    assert isinstance(fits[-1], JobDone)


def test_a_failed_pass_ends_its_jobs_and_nobody_elses() -> None:
    engine = make_engine(EngineConfig())
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    segment.break_next = RuntimeError("no memory")
    _, broken = submit(engine, [1, 2], GREEDY)
    finish(engine)
    _, fine = submit(engine, [1, 2], GREEDY, arrival=1.0)
    finish(engine)
    assert isinstance(broken[-1], JobFailed)
    assert isinstance(broken[-1].error, ComputeFailed)
    assert said(fine) == oracle([1, 2], GREEDY, stages=1, seed=1)
    assert engine.sequences.pool.held == 0


def test_cancelling_frees_the_memory_at_every_stage() -> None:
    engine = make_engine(EngineConfig(), stages=2)
    job, updates = submit(engine, [1, 2, 3], SamplingParams(max_tokens=1000, ignore_eos=True))
    for _ in range(30):
        engine.turn()
    engine.cancel(job)  # type: ignore[arg-type]
    finish(engine)
    assert [u.reason for u in updates if isinstance(u, OutputFinished)] == [FinishReason.CANCELLED]
    assert isinstance(updates[-1], JobDone)
    assert all(own(stage).pool.held == 0 for stage in engine.stages.values())


def test_a_cancelled_neighbour_in_a_merged_batch_harms_nobody() -> None:
    """With two NetworkJobs in flight to one stage, the later one's notice must not free the earlier one's memory."""
    engine = make_engine(EngineConfig(block_size=2), stages=2)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for arrives, leaves in itertools.product(range(16), range(8)):
        _, updates = submit(engine, [1, 2], sampling)
        for _ in range(arrives):
            engine.turn()
        other, _ = submit(engine, [3, 4, 5], sampling, arrival=1.0)
        for _ in range(leaves):
            engine.turn()
        engine.cancel(other)  # type: ignore[arg-type]
        finish(engine)
        assert said(updates) == oracle([1, 2], sampling, stages=2, seed=1)


def test_text_that_was_held_back_comes_when_a_job_is_cancelled() -> None:
    engine = make_engine(EngineConfig())
    job, updates = submit(engine, [1, 2], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop=["<" + "x" * 40]))
    while not said(updates):
        engine.turn()
    engine.cancel(job)  # type: ignore[arg-type]
    finish(engine)
    shown = "".join(u.text for u in updates if isinstance(u, TokensOut))
    assert shown == "".join(f"<{token}>" for token in said(updates))


def test_an_answer_that_cannot_be_made_into_text_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(EngineConfig())
    _, broken = submit(engine, [1, 2], GREEDY)
    _, fine = submit(engine, [1, 2, 3], GREEDY, arrival=1.0)

    class Bad:
        def push(self, token_id: int, *, may_stop: bool = True) -> str:
            raise ValueError("no text")

    engine.sequences.answers._texts[0] = Bad()  # type: ignore[assignment]
    finish(engine)
    assert isinstance(broken[-1], JobFailed)
    assert said(fine) == oracle([1, 2, 3], GREEDY, stages=1, seed=1)


def test_a_stage_that_lost_a_prefix_gets_the_prompt_again() -> None:
    engine = make_engine(EngineConfig(block_size=2))
    prompt = [1, 2, 3, 4, 5, 6, 7]
    submit(engine, prompt, GREEDY)
    finish(engine)
    stage = own(engine.stages[0]).pool
    stage._by_key.clear()  # as if another origin had evicted it
    stage._key = dict.fromkeys(stage._key)
    _, updates = submit(engine, prompt, GREEDY, arrival=1.0)
    finish(engine)
    assert said(updates) == oracle(prompt, GREEDY, stages=1, seed=1)
    assert engine.sequences.preemptions == 1


def test_several_outputs_of_a_prompt_that_cannot_fit_end_once() -> None:
    engine = make_engine(EngineConfig(block_size=2, prefix_cache=False), blocks=4)
    _, updates = submit(engine, [1] * 20, SamplingParams(n=3))
    finish(engine)
    assert [type(u) for u in updates] == [JobFailed]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("behind", [0, 1])
def test_a_job_ends_whole_when_only_some_of_its_outputs_still_fit_the_memory(cache: bool, behind: int) -> None:
    config = EngineConfig(block_size=4, policy="fcfs", prefix_cache=cache)
    pool = BlockPool(32, 4, prefix_cache=cache)
    manager = EngineSequenceManager(pool, eos_ids=frozenset(), text_stream=lambda skip: FakeStream(), secret=b"x" * 32)
    scheduler = Scheduler(config, StepTimePredictor())
    job, updates = make_job([1, 2, 3, 4, 5], SamplingParams(n=2, temperature=0, max_tokens=50))
    manager.add(job)

    def step(only: int | None = None) -> None:
        output = scheduler.schedule(manager.pool, manager.queued, manager.holders.values(), 0.0)
        output.grants = [grant for grant in output.grants if only in (None, grant.seq.index)]
        spans = manager.on_schedule(output)
        manager.on_step_completed([Step(span, 7 if span.rows else None) for span in spans])

    step()
    step()
    for index, length in ((1 - behind, 12), (behind, 10)):
        while len(job.sequences[index].tokens) < length:
            step(only=index)
    for seq in list(manager.holders.values()):
        manager.preempt_seq(seq)  # the route breaks, and the next one has memory for the shorter output only
    manager.use(BlockPool(3, 4, prefix_cache=cache))
    step()
    step()
    assert [type(update) for update in updates if isinstance(update, JobDone | JobFailed)] == [JobFailed]
    assert isinstance(updates[-1], JobFailed)
    assert isinstance(updates[-1].error, NotReady)
    assert not manager.queued
    assert not manager.holders
    assert manager.pool.held == 0


def test_an_engine_that_was_never_started_still_ends_its_jobs() -> None:
    engine = make_engine(EngineConfig())
    job, updates = make_job([1], GREEDY)
    engine.submit(job)
    engine.stop()
    assert isinstance(updates[-1], JobFailed)


def test_decodes_of_many_sequences_share_one_pass() -> None:
    engine = make_engine(EngineConfig())
    for i in range(6):
        submit(engine, [1, 2, i + 1], GREEDY, arrival=float(i))
    finish(engine)
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    assert any(len(batch) == 6 and all(piece.n == 1 for piece in batch) for batch in segment.passes)


def test_a_long_prompt_does_not_stall_those_who_are_decoding() -> None:
    """Every pass that carries a chunk of the long prompt also carries the decode of the short one."""
    engine = make_engine(EngineConfig(chunk=4), blocks=64)
    submit(engine, [1], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.turn()
    submit(engine, [2] * 40, GREEDY, arrival=1.0)
    finish(engine)
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    chunks = [batch for batch in segment.passes if any(piece.n == 4 for piece in batch)]
    assert len(chunks) == 10
    assert all(any(piece.n == 1 for piece in batch) for batch in chunks)


@pytest.mark.parametrize("policy,first", [("fcfs", 0), ("edf", 2), ("lrs", 1)])
def test_each_policy_has_its_own_idea_of_who_is_next(policy: str, first: int) -> None:
    """Arrived first; least slack for its length; earliest deadline."""
    engine = make_engine(EngineConfig(policy=policy, chunk=8, max_sequences=1), blocks=200)
    engine._predictor.prefill = lambda tokens, chunk: tokens * 0.1  # type: ignore[method-assign]
    now = __import__("time").monotonic()
    details = [([1] * 4, now, 20.0), ([1] * 99, now + 0.001, 10.0), ([1] * 4, now + 0.002, 9.0)]
    jobs = [make_job(prompt, GREEDY, arrival=at, deadline=deadline)[0] for prompt, at, deadline in details]
    for job in jobs:
        engine.submit(job)
    engine.take_commands(wait=False)
    engine.turn()
    started = [i for i, job in enumerate(jobs) if job.sequences[0].state not in (SequenceState.WAITING,)]
    assert started == [first]


def test_dynamic_chunks_shrink_until_the_step_is_quick_enough() -> None:
    engine = make_engine(EngineConfig(step_target=0.1, chunk=512), blocks=200)
    for tokens in (1, 10, 50, 100) * 30:
        engine._predictor.observe(tokens, tokens, 0.001 + tokens * 0.001)
    submit(engine, [1] * 400, GREEDY)
    engine.turn()
    segment = engine.pipe.segments[0]
    engine.turn()
    assert isinstance(segment, FakeSegment)
    assert 80 <= segment.passes[0][0].n <= 110


def test_stopping_the_engine_ends_every_job_with_an_error() -> None:
    engine = make_engine(EngineConfig(), blocks=2000)
    ended = threading.Event()
    updates: list[JobUpdate] = []
    job, _ = make_job([1, 2], SamplingParams(max_tokens=100_000, ignore_eos=True))

    def sink(update: JobUpdate) -> None:
        updates.append(update)
        if isinstance(update, JobFailed):
            ended.set()

    job.sink = sink
    engine.start()
    engine.submit(job)
    engine.stop()
    assert ended.wait(10)
    assert isinstance(updates[-1], JobFailed)
    assert isinstance(updates[-1].error, EngineStopped)
    with pytest.raises(EngineStopped):
        engine.submit(job)


def test_a_defect_in_the_loop_ends_the_jobs_instead_of_hanging_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(EngineConfig())
    ended = threading.Event()
    job, _ = make_job([1, 2], GREEDY)
    job.sink = lambda update: ended.set() if isinstance(update, JobFailed) else None

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    assert isinstance(engine.origin, Origin)
    monkeypatch.setattr(engine.origin._scheduler, "schedule", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine.start()
    engine.submit(job)
    assert ended.wait(10)
    engine.stop()  # waits for the thread, whose exception is expected


def test_a_prompt_is_read_in_larger_pieces_while_nobody_waits_for_a_token() -> None:
    engine = make_engine(EngineConfig(chunk=4, idle_chunk=20), blocks=64)
    submit(engine, [2] * 40, GREEDY)
    finish(engine)
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    assert [batch[0].n for batch in segment.passes][:3] == [20, 20, 1]


@pytest.mark.parametrize("newcomers,longest", [(1, 6), (2, 12), (4, 24), (5, 24)])
def test_the_more_prompts_wait_the_larger_are_the_pieces(newcomers: int, longest: int) -> None:
    engine = make_engine(EngineConfig(chunk=6, idle_chunk=100, crowd_chunk=24), blocks=200)
    for _ in range(16):
        submit(engine, [2, 3, 4], GREEDY)
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    while not segment.passes or [piece.n for piece in segment.passes[-1]] != [1] * 16:
        engine.turn()
    before = len(segment.passes)
    for _ in range(newcomers):
        submit(engine, [5] * 24, GREEDY)
    while len(segment.passes) == before:
        engine.turn()
    assert max(piece.n for piece in segment.passes[before]) == longest


def test_a_gpu_reads_larger_pieces_unless_the_settings_say_otherwise() -> None:
    assert EngineConfig().on("cpu") == EngineConfig()
    ours, set_by_user = EngineConfig().on("cuda"), EngineConfig(idle_chunk=1000, crowd_chunk=600).on("cuda")
    assert (ours.chunk, ours.idle_chunk, ours.crowd_chunk, ours.max_pass_tokens) == (256, 4096, 4096, 4096)
    assert (set_by_user.idle_chunk, set_by_user.crowd_chunk) == (1000, 600)


@pytest.mark.parametrize(
    "bad",
    [
        {"policy": "random"},
        {"idle_chunk": 0},
        {"crowd_chunk": 0},
        {"gpu_memory": 0},
        {"gpu_memory": 1.1},
        {"chunk": 0},
        {"window": 0},
        {"step_target": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**bad)  # type: ignore[arg-type]
