"""Passes that fail: only the jobs that cannot be computed alone end, all others get their tokens, and nothing is left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import Engine
from penstock.engine.routing.host.stage import Stage
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.visit import job_processor
from penstock.errors import ComputeFailed
from penstock.model.batch import BatchPiece
from penstock.pipes.hidden_codec import unpack
from penstock.pipes.pipe import Pipe
from penstock.simulate.node import Machine
from tests.engine import layouts
from tests.engine.fakes import FakeEnds, FakeSegment, FakeStream, finish, last_rows, make_engine, make_job, oracle, own
from tests.engine.world import GREEDY, Asked, World
from tests.examples import examples

POISON = 2_000_003  # a token that only a prompt can hold, and that no pass survives
PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [11, 12, 13], [8], [21, 22, 23, 24]]
Fails = Callable[[Tensor, Sequence[BatchPiece]], bool]
Outcome = tuple[list[int], list[JobUpdate]]  # of a prompt


def poisoned(hidden: Tensor, pieces: Sequence[BatchPiece]) -> bool:
    return POISON + 7.0 in hidden[:, 0].tolist()  # as the fake embedding has it


def always(hidden: Tensor, pieces: Sequence[BatchPiece]) -> bool:
    return True


def over(limit: int) -> Fails:
    return lambda hidden, pieces: len(hidden) > limit


def break_passes(stage: Stage, fails: Fails) -> list[int]:
    """Let passes fail after they have written their KV, wrongly. Returns a list that will have the Spans of each that failed."""
    segment, process, broken = stage.segment, stage.segment.process, list[int]()

    def breaking(hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        if fails(hidden, pieces):
            process(hidden + 1, pieces, layers)
            broken.append(len(pieces))
            raise RuntimeError("out of memory")
        return process(hidden, pieces, layers)

    segment.process = breaking  # type: ignore[method-assign]
    return broken


def submit(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams = GREEDY) -> list[Outcome]:
    found: list[Outcome] = []
    for prompt in prompts:
        job, updates = make_job(prompt, sampling)
        engine.submit(job)
        found.append((prompt, updates))
    return found


def tokens_of(updates: Sequence[JobUpdate]) -> list[int]:
    return [token for update in updates if isinstance(update, TokensOut) for token in update.token_ids]


def check_right(outcome: Outcome, stages: int = 1) -> None:
    prompt, updates = outcome
    assert isinstance(updates[-1], JobDone), updates[-1]
    assert tokens_of(updates) == oracle(prompt, GREEDY, stages=stages, seed=1)


def check_failed(outcome: Outcome) -> None:
    final = outcome[1][-1]
    assert isinstance(final, JobFailed)
    assert isinstance(final.error, ComputeFailed)
    assert "RuntimeError: out of memory" in final.error.message


def check_outcomes(outcomes: Sequence[Outcome], stages: int = 1) -> None:
    for outcome in outcomes:
        if POISON in outcome[0]:
            check_failed(outcome)
        else:
            check_right(outcome, stages)


def check_nothing_left(engine: Engine) -> None:
    assert engine.sequences.pool.held == 0
    assert len(engine._processor.visits) == 0
    assert all((own(stage).pool.held, own(stage).replicas) == (0, {}) for stage in engine.stages.values())


# ---- layers, one origin ----


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("where", [0, 2, 5])
def test_a_job_that_no_pass_survives_ends_and_those_beside_it_get_their_tokens(stages: int, where: int) -> None:
    engine = make_engine(EngineConfig(block_size=2, chunk=64), stages=stages)
    broken = break_passes(engine.stages[0], poisoned)
    prompts = [*PROMPTS[:where], [POISON, 1, 2], *PROMPTS[where:]]
    outcomes = submit(engine, prompts)
    finish(engine)
    assert broken[0] == 6, "they were in one pass"
    check_outcomes(outcomes, stages)
    check_nothing_left(engine)


def test_a_pass_that_is_too_large_is_run_in_parts_and_no_job_ends() -> None:
    engine = make_engine(EngineConfig(block_size=2, chunk=64), stages=2)
    broken = [break_passes(stage, over(5)) for stage in engine.stages.values()]
    outcomes = submit(engine, PROMPTS)
    finish(engine)
    assert all(max(spans) == 5 for spans in broken)
    check_outcomes(outcomes, 2)
    check_nothing_left(engine)


def test_an_output_that_cannot_be_computed_ends_its_whole_job_and_no_other() -> None:
    engine = make_engine(EngineConfig(block_size=2, chunk=64, prefix_cache=False))
    broken = break_passes(engine.stages[0], poisoned)
    (several,) = submit(engine, [[POISON, 2]], replace(GREEDY, n=3))
    others = submit(engine, PROMPTS)
    finish(engine)
    assert max(broken) > 3
    check_outcomes([several, *others])
    assert sum(isinstance(update, JobFailed) for update in several[1]) == 1
    check_nothing_left(engine)


def test_a_chunk_that_fails_ends_its_job_though_more_of_its_prompt_is_on_its_way() -> None:
    engine = make_engine(EngineConfig(block_size=2, chunk=2, window=4), stages=2)
    broken = break_passes(engine.stages[2], lambda hidden, pieces: any(3 <= piece.start_pos < 6 for piece in pieces))
    long, short = submit(engine, [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3]], replace(GREEDY, max_tokens=2))
    finish(engine)
    assert broken
    check_failed(long)
    assert isinstance(short[1][-1], JobDone)
    check_nothing_left(engine)


def test_layers_that_always_fail_cost_twice_as_many_passes_as_jobs_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(EngineConfig(block_size=2, chunk=64))
    broken = break_passes(engine.stages[0], always)
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        outcomes = submit(engine, PROMPTS)
        finish(engine)
    for outcome in outcomes:
        check_failed(outcome)
    assert len(broken) == 2 * len(PROMPTS) - 1
    (record,) = caplog.records
    assert record.getMessage().startswith("a pass failed (1 so far): Traceback")
    check_nothing_left(engine)


# ---- the ends ----


class PickyEnds(FakeEnds):
    """Fails at what it is told to, for every batch with the poison in it. It knows it by its last row in the end."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.failed = 0
        self.bad_row = 0.0

    def compute_embed(self, token_ids: Sequence[int]) -> Tensor:
        self._check("embed", POISON in token_ids)
        return super().compute_embed(token_ids)

    def compute_norm(self, hidden: Tensor) -> Tensor:
        self._check("norm", self.bad_row in hidden[:, 0].tolist())
        return super().compute_norm(hidden)

    def compute_head(self, normed: Tensor) -> Tensor:
        self._check("head", self.bad_row in normed[:, 0].tolist())
        return super().compute_head(normed)

    def _check(self, what: str, bad: bool) -> None:
        if bad and self.fails_at == what:
            self.failed += 1
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("fails_at", ["embed", "norm", "head"])
@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize("scores", [None, 0])
def test_a_job_that_fails_at_an_end_of_the_model_ends_alone(fails_at: str, where: int, scores: int | None) -> None:
    ends, segment, bad = PickyEnds(fails_at), FakeSegment(0, 2, 32, 2), [POISON, 1, 2]
    engine = Engine(EngineConfig(block_size=2, chunk=64), Pipe("fake", 2, [segment]), ends, lambda skip_special: FakeStream())
    ends.bad_row = float(last_rows(bad, 1)[-1])
    sampling = replace(GREEDY, prompt_logprobs=scores)
    outcomes = submit(engine, [*PROMPTS[:where], bad, *PROMPTS[where:]], sampling)
    finish(engine)
    assert ends.failed > 1, "first in a batch, then alone"
    check_outcomes(outcomes)
    check_nothing_left(engine)


def test_embeddings_are_right_beside_a_job_that_fails_at_the_head() -> None:
    world = World(Machine("a", ((0, 4),), ends=True))
    world.open_routes("a")
    end_model = world["a"].engine._context.own_end_model
    compute_norm, failed = end_model.compute_norm, list[int]()

    def picky(hidden: Tensor) -> Tensor:
        if len(hidden) > 8:
            failed.append(len(hidden))
            raise RuntimeError("out of memory")
        return compute_norm(hidden)

    end_model.compute_norm = picky  # type: ignore[method-assign]
    for length in (3, 8, 5, 7):
        world.embed("a", list(range(1, length + 1)))
    bad = world.embed("a", list(range(1, 11)), may_fail=True)
    world.finish()
    assert max(failed) > 10, "several were in one batch"
    assert isinstance(bad.error, ComputeFailed)


# ---- what is measured ----


def test_a_pass_that_was_repeated_is_not_measured() -> None:
    engine = make_engine(EngineConfig(block_size=2, chunk=64))
    (stage,) = engine.stages.values()
    observed: list[int] = []
    engine._predictor.observe = lambda tokens, context, seconds, beyond: observed.append(tokens)  # type: ignore[method-assign]
    process, now = stage.segment.process, [0.0]
    stage._clock = lambda: now[0]

    def slow(hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        now[0] += 1.0
        if len(hidden) > 5:
            raise RuntimeError("out of memory")
        return process(hidden, pieces, layers)

    stage.segment.process = slow  # type: ignore[method-assign]
    outcomes = submit(engine, [[1, 2, 3], [4, 5, 6]])
    finish(engine)
    check_outcomes(outcomes)
    assert observed == [2] * 7, "the steps after the first"
    assert stage.mean_pass_seconds == pytest.approx(1.0), "the first took three seconds, in three parts"
    assert (stage.seconds, stage.passes) == (10.0, 8)


def test_a_head_that_was_repeated_is_not_measured() -> None:
    ends, now = PickyEnds("head"), [0.0]
    ends.bad_row = float(last_rows([5, 6], 1)[-1])
    engine = Engine(
        EngineConfig(block_size=2, chunk=64),
        Pipe("fake", 2, [FakeSegment(0, 2, 32, 2)]),
        ends,
        lambda skip_special: FakeStream(),
        clock=lambda: now[0],
    )
    compute_norm = ends.compute_norm

    def slow(hidden: Tensor) -> Tensor:
        now[0] += 1.0
        return compute_norm(hidden)

    ends.compute_norm = slow  # type: ignore[method-assign]
    assert isinstance(engine.origin, Origin)
    submit(engine, [[5, 6], [7, 8]], replace(GREEDY, max_tokens=1))
    finish(engine)
    assert (now[0], engine.origin.ends_seconds) == (3.0, 0.0)
    submit(engine, [[7, 8]], replace(GREEDY, max_tokens=1))
    finish(engine)
    assert engine.origin.ends_seconds == pytest.approx(0.2)


# ---- several origins ----


def shared(**more: Any) -> World:
    """`a` has the layers, and jobs of its own; `b` and `c` use them."""
    world = World(Machine("a", ((0, 4),), ends=True, blocks=60), Machine("b", (), ends=True), Machine("c", (), ends=True), **more)
    world.open_routes("a", "b", "c")
    world.run(1.0)
    return world


def ask_all(world: World, prompts: Sequence[list[int]]) -> list[Asked]:
    return [world.ask(name, prompt, may_fail=POISON in prompt) for name in "abc" for prompt in prompts]


def test_what_other_origins_send_fails_alone_too_and_is_refused() -> None:
    world = shared(latency=0.0)
    (stage,) = world["a"].engine.stages.values()
    broken = break_passes(stage, poisoned)
    asked = ask_all(world, [[5, 6, 7], [POISON, 1], [8]])
    world.finish()
    assert stage.shared_passes
    assert max(broken) > 3
    failed = [one for one in asked if isinstance(one.final, JobFailed)]
    assert failed == [one for one in asked if POISON in one.job.prompt_ids]
    assert all(isinstance(one.error, ComputeFailed) for one in failed)
    assert set(world.refusals) == {"FAILED"}
    stats = [world[name].engine.stats for name in "abc"]
    assert [(one.lost_jobs, one.last_break) for one in stats] == [(0, "")] * 3


def test_layers_that_always_fail_end_the_jobs_of_all_origins_after_a_bounded_number_of_passes() -> None:
    world = shared()
    (stage,) = world["a"].engine.stages.values()
    broken = break_passes(stage, always)
    asked = [world.ask(name, [number, 1], may_fail=True) for name in "abc" for number in (5, 6, 7)]
    world.finish()
    assert all(isinstance(one.error, ComputeFailed) for one in asked)
    assert len(broken) <= 9 * 8 * 2, "eight refusals of a sequence end its job"


def sometimes(dice: Random) -> Fails:
    return lambda hidden, pieces: dice.random() < 0.2


@examples(
    few=15,
    many=50,
    network=layouts.networks(most_nodes=3, most_layers=4, origins=2),
    config=layouts.configs,
    jobs=st.lists(
        st.tuples(st.sampled_from("ab"), layouts.prompts, layouts.params | st.none(), st.floats(0, 0.05), st.booleans()),
        min_size=2,
        max_size=8,
    ),
    kind=st.sampled_from(["poison", "size", "chance"]),
    seed=st.integers(0, 99),
)
def test_whatever_passes_fail_all_jobs_that_can_be_computed_get_their_tokens(
    network: tuple[int, list[Machine]],
    config: EngineConfig,
    jobs: list[tuple[str, list[int], SamplingParams | None, float, bool]],
    kind: str,
    seed: int,
) -> None:
    layers, places = network
    fails = {"poison": poisoned, "size": over(18), "chance": sometimes(Random(seed))}[kind]  # no prompt has more than 18 tokens
    world = World(
        *(replace(place, blocks=120) for place in places), layers=layers, config=config, seed=seed, recovery_timeout=300.0
    )
    world.open_routes("a", "b")
    for node in world:
        for start, stage in node.engine.stages.items():
            if kind != "poison" or start == 0:
                break_passes(stage, fails)
    for name, prompt, sampling, later, bad in jobs:
        prompt = [*prompt, POISON] if bad and kind == "poison" else prompt
        may_fail = kind == "chance" or POISON in prompt
        if sampling is None:
            world.embed(name, prompt, may_fail=may_fail)
        else:
            world.ask(name, prompt, sampling, may_fail=may_fail)
        world.run(later)
    world.finish(600.0)
    for asked in world.asked:
        assert kind == "chance" or isinstance(asked.final, JobFailed) == asked.may_fail


# ---- errors outside of a pass ----


def test_hidden_states_that_cannot_be_unpacked_harm_no_other_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = shared(latency=0.0)

    def picky(packed: Any, device: Any = "cpu") -> Tensor:
        hidden = unpack(packed, device)
        if poisoned(hidden, ()):
            raise RuntimeError("no memory")
        return hidden

    monkeypatch.setattr(job_processor, "unpack", picky)
    bad = world.ask("b", [POISON, 1], may_fail=True)
    others = [world.ask(name, [5, 6, 7]) for name in "ac"]
    world.finish()
    assert set(world.refusals) == {"FAILED"}
    assert bad.error.message == "Node a could not compute it."
    assert not any(isinstance(one.final, JobFailed) for one in others)


def test_a_visit_that_fails_without_its_spans_too_is_lost_and_counted_as_gone() -> None:
    world = shared()
    host, processor = world["a"].engine.host, world["a"].engine._processor
    (route,) = [route for route in host.routes if route.origin == "b"]
    lease = world["a"].engine.stages[0].leases[route]

    def broken(job: NetworkJob) -> Any:
        raise RuntimeError("a bug")

    lease.on_schedule = broken  # type: ignore[method-assign]
    world.ask("b", [5, 6, 7])
    with pytest.raises(RuntimeError, match="a bug"):
        world.run(1.0)
    assert host.routes[route].jobs_here == 0
    assert len(processor.visits) == 0
