"""Steady steps do what the general way does, only faster; whatever is special is left to it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, TokensOut
from penstock.engine.engine import Engine
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import FakeDecoder, FakeSegment, Windows, finish, make_engine, make_job, oracle, own
from tests.engine.sequences.test_properties import check_pool
from tests.examples import examples

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def count_steady(engine: Engine) -> list[int]:
    """The sizes of the steady steps that the engine takes from now on."""
    steady = engine._processor._steady
    step, sizes = steady.step, list[int]()

    def counted() -> bool:
        if done := step():
            sizes.append(engine.stats.generated_tokens - before[0])
        before[0] = engine.stats.generated_tokens
        return done

    before = [0]
    steady.step = counted  # type: ignore[method-assign]
    return sizes


def submit(engine: Engine, prompt: list[int], params: SamplingParams = LONG, **more: Any) -> tuple[Job, list[JobUpdate]]:
    job, updates = make_job(prompt, params, **more)
    engine.submit(job)
    engine.take_commands(wait=False)
    return job, updates


def tokens(updates: list[JobUpdate]) -> list[int]:
    return [token for update in updates if isinstance(update, TokensOut) for token in update.token_ids]


def check(engine: Engine) -> None:
    """Origin and stages count the same blocks, and each sequence is as far here as there."""
    sequences = engine.sequences
    check_pool(sequences.pool, [seq.table for seq in sequences.holders.values()])
    for stage in engine.stages.values():
        lease = own(stage)
        check_pool(lease.pool, [replica.table for replica in lease.replicas.values()])
        if not (sequences.notices or engine.origin.in_flight or engine._processor.visits):
            assert lease.pool.available == sequences.pool.available
            for seq in sequences.holders.values():
                assert lease.replicas[seq.seq_id].kv_len >= seq.step_processed


# ---- against the general way ----

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    max_tokens=st.integers(5, 30),
    min_tokens=st.sampled_from([0, 0, 5]),
    n=st.sampled_from([1, 1, 1, 2]),
    logprobs=st.sampled_from([None, None, 2]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3,), (7, 9)]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
)
jobs = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=20), params, st.sampled_from([-1, 0, 0, 0, 5]))
events = st.one_of(
    jobs.map(lambda job: ("submit", job)),
    st.integers(0, 20).map(lambda number: ("cancel", number)),
    st.integers(0, 20).map(lambda number: ("hang up", number)),
    st.integers(1, 20).map(lambda turns: ("turn", turns)),
)


def play(
    script: list[tuple[str, Any]],
    config: EngineConfig,
    *,
    stages: int,
    blocks: int,
    steady: bool,
    windows: Windows = (None,),
    ahead: bool = False,
) -> list[list[Any]]:
    """What the client of each job got, without times. Turns are counted in tokens, which do not depend on the way.

    ahead: steps begin before the tokens of those before are known.
    """
    engine = make_engine(config, stages=stages, blocks=blocks, windows=windows, decodes=ahead)
    if not steady:
        engine._processor.decode = lambda: False  # type: ignore[method-assign]
    taken: list[tuple[Job, list[JobUpdate]]] = []
    for event, value in script:
        if event == "submit":
            prompt, sampling, priority = value
            taken.append(submit(engine, prompt, sampling, seed=len(taken), arrival=float(len(taken)), priority=priority))
        elif event == "turn":
            until = engine.stats.generated_tokens + value
            while engine.stats.generated_tokens < until and engine.turn():
                check(engine)
        elif value < len(taken):
            job = taken[value][0]
            if event == "cancel":
                engine.cancel(job)
                engine.take_commands(wait=False)
            else:
                job.sink = _gone
    finish(engine)
    assert not engine.sequences.holders
    check(engine)
    return [_seen(updates) for _, updates in taken]


def _gone(update: JobUpdate) -> None:
    raise ConnectionError


def _seen(updates: list[JobUpdate]) -> list[Any]:
    """Output by output, since who is preempted for whom, and so which output comes first, depends on the size of the steps."""
    updates = sorted(updates, key=lambda update: getattr(update, "index", 1 << 10))
    seen: list[Any] = []
    for update in updates:
        match update:
            case TokensOut() | OutputFinished():
                seen.append(update)
            case JobDone(usage):
                seen.append((usage.prompt_tokens, usage.completion_tokens))
            case JobFailed(error):
                seen.append(error.code)
    return seen


@examples(
    few=20,
    many=60,
    script=st.lists(events, min_size=1, max_size=12),
    way=st.sampled_from([(1, False), (1, True), (2, False)]),
    blocks=st.sampled_from([16, 24, 200]),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["fcfs", "lrs"]),
    windows=st.sampled_from([(None,), (1,), (7,), (12,), (None, 7), (5, 5, None)]),
)
def test_all_clients_get_what_the_general_way_gives_them(
    script: list[tuple[str, Any]], way: tuple[int, bool], blocks: int, prefix_cache: bool, policy: str, windows: Windows
) -> None:
    if any(event == "turn" for event, _ in script):  # when exactly a cancellation comes depends on the size of the steps
        script = [(event, value) for event, value in script if event not in ("cancel", "hang up")]
    config = EngineConfig(block_size=4, chunk=8, max_sequences=6, prefix_cache=prefix_cache, policy=policy)
    stages, ahead = way
    fast = play(script, config, stages=stages, blocks=blocks, steady=True, windows=windows, ahead=ahead)
    general = play(script, config, stages=stages, blocks=blocks, steady=False, windows=windows)
    assert fast == general


@examples(
    few=20,
    many=60,
    script=st.lists(events, min_size=1, max_size=25),
    blocks=st.sampled_from([16, 24, 200]),
    ahead=st.booleans(),
)
def test_answers_are_right_and_memory_is_accounted_for_whatever_happens(
    script: list[tuple[str, Any]], blocks: int, ahead: bool
) -> None:
    config = EngineConfig(block_size=4, chunk=8, max_sequences=6)
    seen = play(script, config, stages=1, blocks=blocks, steady=True, ahead=ahead)
    submitted = [value for event, value in script if event == "submit"]
    for number, (got, (prompt, sampling, _)) in enumerate(zip(seen, submitted, strict=True)):
        for output in range(sampling.n):
            whole = oracle(prompt, sampling, stages=1, seed=number, output=output)
            own_tokens = [
                t for update in got if isinstance(update, TokensOut) and update.index == output for t in update.token_ids
            ]
            assert own_tokens == whole[: len(own_tokens)]
            ends = [update.reason for update in got if isinstance(update, OutputFinished) and update.index == output]
            if ends and ends[0] is not FinishReason.CANCELLED:
                assert own_tokens == whole


# ---- which steps are steady ----


def test_a_steady_sequence_holds_only_what_its_next_token_sees() -> None:
    engine = make_engine(EngineConfig(block_size=4), stages=2, blocks=100, windows=(10,))
    sizes = count_steady(engine)
    held = []
    for i in range(2):
        submit(engine, list(range(1, 30)), arrival=float(i))
    while engine.turn():
        held.append((engine.sequences.pool.held, *(own(stage).pool.held for stage in engine.stages.values())))
        check(engine)
    assert len(sizes) > 30
    assert max(held[-30:]) <= (2 * 4,) * 3, "three blocks of four cover ten positions, and one is being written"


@pytest.mark.parametrize("stages", [1, 3])
def test_sequences_that_only_decode_take_steady_steps(stages: int) -> None:
    engine = make_engine(EngineConfig(block_size=4), stages=stages, blocks=100)
    sizes = count_steady(engine)
    asked = [submit(engine, [1, 2, 3 + i], arrival=float(i)) for i in range(3)]
    finish(engine)
    assert sizes.count(3) >= 35
    for i, (_, updates) in enumerate(asked):
        assert tokens(updates) == oracle([1, 2, 3 + i], LONG, stages=stages, seed=1)
    assert engine.stats.generated_tokens == 120
    assert engine.stats.steps < 60


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_segments_on_one_card_compute_all_sequences_together(stages: int) -> None:
    """Two batches would each take a whole step's time of the card."""
    engine = make_engine(EngineConfig(block_size=4), stages=stages, blocks=100, device=torch.device("cuda", 1))
    sizes = count_steady(engine)
    asked = []
    for i in range(3):
        asked.append(submit(engine, [1, 2, 3 + i], arrival=float(i)))
        for _ in range(2 * stages + 3):  # in the middle of the steps of those before
            engine.turn()
    finish(engine)
    assert sizes.count(3) >= 20
    for i, (_, updates) in enumerate(asked):
        assert tokens(updates) == oracle([1, 2, 3 + i], LONG, stages=stages, seed=1)


def test_those_that_are_left_go_on_when_one_ends() -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=100)
    sizes = count_steady(engine)
    for i in range(4):
        submit(engine, [1, 2, 3 + i], SamplingParams(temperature=0, max_tokens=10 + 5 * i, ignore_eos=True), arrival=float(i))
    finish(engine)
    assert [sizes.count(size) for size in (4, 3, 2, 1)] == pytest.approx([8, 5, 5, 5], abs=2)


def test_while_others_wait_the_scheduler_looks_at_them_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(EngineConfig(block_size=4, max_sequences=2), blocks=100)
    sizes, looked = count_steady(engine), []
    schedule = engine.origin._scheduler.schedule  # type: ignore[union-attr]
    monkeypatch.setattr(engine.origin._scheduler, "schedule", lambda *a, **k: looked.append(len(sizes)) or schedule(*a, **k))  # type: ignore[union-attr]
    for i in range(3):
        submit(engine, [1, 2, 3 + i], arrival=float(i))
    while not engine.stats.jobs:
        engine.turn()
    assert len(sizes) > 25
    assert 2 <= len([at for at in looked if 0 < at < len(sizes) - 1]) <= 6


def test_a_more_urgent_job_is_seen_at_once() -> None:
    engine = make_engine(EngineConfig(block_size=4, max_sequences=1), blocks=100)
    submit(engine, [1, 2, 3])
    for _ in range(20):
        engine.turn()
    _, urgent = submit(engine, [4, 5], priority=5)
    before = engine.stats.generated_tokens
    while not tokens(urgent):
        engine.turn()
    assert engine.stats.generated_tokens - before <= 2


def test_a_pass_that_fails_is_repeated_the_general_way() -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=100)
    (segment,) = engine.pipe.segments
    process, calls = segment.process, [0]

    def failing(hidden: Tensor, *more: Any) -> Tensor:
        calls[0] += 1
        if calls[0] % 5 == 0:
            raise RuntimeError("for once")
        return process(hidden, *more)

    segment.process = failing  # type: ignore[method-assign]
    sizes = count_steady(engine)
    asked = [submit(engine, [1, 2, 3 + i], arrival=float(i)) for i in range(2)]
    finish(engine)
    assert len(sizes) > 10
    for i, (_, updates) in enumerate(asked):
        assert tokens(updates) == oracle([1, 2, 3 + i], LONG, stages=1, seed=1)
    check(engine)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_client_that_is_gone_frees_its_memory_at_once(gone: int) -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=100)
    asked = [submit(engine, [1, 2, 3 + i], arrival=float(i)) for i in range(2)]
    for _ in range(15):
        engine.turn()
    asked[gone][0].sink = _gone
    engine.turn()
    assert engine.stats.unreachable_clients == 1
    assert list(engine.sequences.holders.values()) == [asked[1 - gone][0].sequences[0]]
    finish(engine)
    assert tokens(asked[1 - gone][1]) == oracle([1, 2, 4 - gone], LONG, stages=1, seed=1)


@pytest.mark.parametrize("cancelled", [True, False])
def test_jobs_that_have_ended_are_let_go(cancelled: bool) -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=100)
    sizes = count_steady(engine)
    job, _ = submit(engine, [1, 2, 3])
    job.sink = lambda update: None
    gone = weakref.ref(job.sink)
    while len(sizes) < 5:
        engine.turn()
    if cancelled:
        engine.cancel(job)
        engine.take_commands(wait=False)
    finish(engine)
    del job
    gc.collect()
    assert gone() is None


def test_layers_that_are_dropped_free_their_memory_at_once() -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=100)
    sizes = count_steady(engine)
    submit(engine, [1, 2, 3])
    while len(sizes) < 5:
        engine.turn()
    (segment,) = engine.pipe.segments
    gone, layers = weakref.ref(segment), segment.layers
    del segment
    engine.drop_segment(layers)
    engine.take_commands(wait=False)
    assert gone() is None  # without a collection of garbage


def test_a_node_without_the_models_ends_drops_layers_too() -> None:
    segment = FakeSegment(0, 2, 100, 4, (None,))
    engine = Engine(EngineConfig(block_size=4), Pipe("fake", 4, [segment]))
    engine.drop_segment(segment.layers)
    engine.take_commands(wait=False)
    assert engine.stages == {}
    assert engine.pipe.segments == []


def test_parts_are_timed_as_on_the_general_way() -> None:
    times = {}
    for steady in (True, False):
        engine = make_engine(EngineConfig(block_size=4, time_parts=True), stages=2, blocks=100)
        if not steady:
            engine._processor.decode = lambda: False  # type: ignore[method-assign]
        _, updates = submit(engine, [1, 2, 3])
        finish(engine)
        (done,) = [update for update in updates if isinstance(update, JobDone)]
        times[steady] = [(p.part, p.nodes, p.layers, p.prefill_passes, p.decode_passes) for p in done.timings.parts]
    assert times[True] == times[False]


@pytest.mark.parametrize("event", ["attempt and base", "incarnation", "lease", "size of the lease", "route"])
def test_columns_are_not_used_after_what_they_were_made_of_has_changed(event: str) -> None:
    engine = make_engine(EngineConfig(block_size=4), blocks=100)
    sizes = count_steady(engine)
    asked = [submit(engine, [1, 2, 3 + i], arrival=float(i)) for i in range(2)]
    while len(sizes) < 5:
        engine.turn()
    steady, sequences = engine._processor._steady, engine.sequences
    (stage,) = engine.stages.values()
    seq = asked[0][0].sequences[0]
    assert steady._is_current()
    match event:
        case "attempt and base":
            sequences.rewind_seq(seq)
        case "incarnation":
            sequences.preempt_seq(seq)
        case "size of the lease":
            sequences.resize(90)
        case "lease":
            stage.leases[next(iter(stage.leases))] = own(stage).__class__(own(stage).pool)
        case "route":
            engine.host.routes.clear()
    assert not steady._is_current()


# ---- steps that begin before their turn ----


@pytest.mark.parametrize("stages", [1, 3])
def test_the_next_step_begins_before_the_tokens_of_this_one_are_known(stages: int) -> None:
    engine = make_engine(EngineConfig(block_size=4, chunk=8), stages=stages, decodes=True)
    _, updates = submit(engine, [1, 2, 3])
    finish(engine)
    assert tokens(updates) == oracle([1, 2, 3], LONG, stages=stages, seed=1)
    assert engine._processor._context.end_model.decoder(None).ahead == 38  # all but the first two and none after the last


def test_a_stop_that_is_seen_a_step_late_is_seen_by_nobody() -> None:
    engine = make_engine(EngineConfig(block_size=4, chunk=8, max_sequences=6), decodes=True)
    whole = oracle([5, 6], LONG, stages=1, seed=1)
    stopped = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(whole[9],))
    _, one = submit(engine, [5, 6], stopped)
    _, other = submit(engine, [7, 8, 9])
    finish(engine)
    assert tokens(one) == whole[: whole.index(whole[9]) + 1]
    assert tokens(other) == oracle([7, 8, 9], LONG, stages=1, seed=1)
    assert engine.sequences.pool.available == engine.sequences.pool.capacity


def test_rows_whose_choice_depends_on_their_tokens_wait_for_them() -> None:
    engine = make_engine(EngineConfig(block_size=4, chunk=8), decodes=True)
    penalised = SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True, frequency_penalty=0.5)
    _, updates = submit(engine, [1, 2, 3], penalised, seed=3)
    finish(engine)
    assert tokens(updates) == oracle([1, 2, 3], penalised, stages=1, seed=3)
    assert engine._processor._context.end_model.decoder(None).ahead == 0


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_step_that_cannot_begin_ahead_leaves_no_blocks_unused(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, failed, most = FakeDecoder.launch, 0, 0

    def launch_unless_blocks_grow(self: FakeDecoder, batches: Any, ids: Any, rows: Any) -> Any:
        nonlocal failed
        if ids is None and batches[0].starts[0] % 4 == 0:
            failed += 1
            raise RuntimeError("out of memory")
        return launch(self, batches, ids, rows)

    monkeypatch.setattr(FakeDecoder, "launch", launch_unless_blocks_grow)
    engine = make_engine(EngineConfig(block_size=4, chunk=8), windows=windows, decodes=True)
    _, updates = submit(engine, [1, 2, 3])
    engine.take_commands(wait=False)
    while engine.turn():
        for seq in engine.sequences.holders.values():
            most = max(most, 4 * engine.sequences.pool.rows_of(seq.table) - len(seq.tokens))
    assert failed > 5
    assert most <= 4
    assert len(tokens(updates)) == 40
