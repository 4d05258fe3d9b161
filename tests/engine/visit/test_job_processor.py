"""Visits in production: which rows of the state machine they reach, which steps they pass, and what is dropped on the way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import ComputeStep, Facts, JobState, next_state
from penstock.domain.messages import CloseRoute
from penstock.domain.route import RouteId
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone, JobUpdate, PrefillProgress, TokensOut
from penstock.engine import engine as engine_module
from penstock.engine.engine import Engine
from penstock.engine.visit import job_processor, visit_queue
from penstock.errors import NotReady
from penstock.model.batch import BatchPiece
from penstock.pipes.pipe import Pipe
from penstock.simulate.node import Machine
from tests.domain.test_fsm_page import ROWS, all_hold
from tests.engine.fakes import FakeEnds, FakeSegment, FakeStream, finish, make_engine, make_job
from tests.engine.world import Asked, Faults, World

FIRST_HERE = (Machine("a", ((0, 2),), ends=True), Machine("b", ((2, 4),)))
FIRST_REMOTE = (Machine("a", ((2, 4),), ends=True), Machine("b", ((0, 2),)))
PROMPT = list(range(1, 41))  # five chunks of 8


def returned(origin: str) -> NetworkJob:
    return NetworkJob(RouteId(origin, 1, 0), 0, [], step=ComputeStep.HEAD, current_layer=4)


def refuse_from(world: World, asked: Asked, kind: type[JobUpdate]) -> None:
    """The client takes no updates from the first of this kind on, not even the last one, for which the world would wait."""

    def sink(update: JobUpdate) -> None:
        asked.updates.append(update)
        if isinstance(update, kind):
            raise BrokenPipeError

    asked.job.sink = sink
    world.asked.remove(asked)


# ---- the steps ----


def test_a_visit_passes_embed_layer_norm_and_head_in_this_order() -> None:
    granted: list[NetworkJob] = []
    steps: list[tuple[str, ComputeStep]] = []

    def note(what: str) -> None:
        steps.append((what, granted[-1].step))

    class Ends(FakeEnds):
        def compute_embed(self, token_ids: Sequence[int]) -> Tensor:
            note("embed")
            return super().compute_embed(token_ids)

        def compute_norm(self, hidden: Tensor) -> Tensor:
            note("norm")
            return super().compute_norm(hidden)

        def compute_head(self, normed: Tensor) -> Tensor:
            note("head")
            return super().compute_head(normed)

    class Layers(FakeSegment):
        def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
            note("layers")
            return super().process(hidden, pieces, layers)

    config = EngineConfig(block_size=4, chunk=8)
    engine = Engine(config, Pipe("fake", 2, [Layers(0, 2, 32, 4)]), Ends(), lambda skip_special: FakeStream())
    grant = engine.origin.grant

    def granting() -> tuple[NetworkJob | None, bool]:
        job, decided = grant()
        granted.extend([job] if job is not None else [])
        return job, decided

    engine.origin.grant = granting  # type: ignore[method-assign]
    job, updates = make_job([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    engine.submit(job)
    finish(engine)
    assert isinstance(updates[-1], JobDone)
    step = [("embed", ComputeStep.EMBED), ("layers", ComputeStep.LAYER), ("norm", ComputeStep.NORM), ("head", ComputeStep.HEAD)]
    assert steps[:4] == step
    assert [what for what, _ in steps[4:]] == [what for what, _ in step], "the second token needs no visit"


def test_what_goes_back_to_its_origin_says_head_on_the_wire() -> None:
    world = World(*FIRST_HERE)
    world.watching = True
    world.ask("a", PROMPT)
    world.finish()
    sent = {(sender, message.step) for sender, _, message in world.seen if isinstance(message, NetworkJob)}
    assert sent == {("a", ComputeStep.LAYER), ("b", ComputeStep.HEAD)}


# ---- what is dropped ----


@pytest.mark.parametrize("origin,reason", [("a", "not_at_origin"), ("b", "no_end_model")])
def test_what_comes_to_the_wrong_head_is_counted_and_logged_once(
    origin: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second reason is that of a node that was an origin before it was restarted without the ends."""
    world = World(*FIRST_HERE)
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        for _ in range(3):
            world["b"].engine.deliver("a", returned(origin))
        world.run(0.1)
    assert world["b"].engine.stats.refused == {reason: 3}
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"refused a message from node a: {reason.replace('_', ' ')}"
    ]


def test_a_repeated_return_is_counted_and_changes_nothing() -> None:
    world = World(*FIRST_HERE, faults=Faults(duplicate=1.0, hits=lambda sender, to, message: isinstance(message, NetworkJob)))
    asked = world.ask("a", PROMPT)
    world.finish()
    assert isinstance(asked.final, JobDone)
    assert world["a"].engine.stats.refused["not_expected"] > 0


def test_a_visit_whose_route_closes_while_it_waits_is_dropped_and_counted() -> None:
    world = World(*FIRST_HERE)
    world.open_routes("a")
    route = world["a"].origin.route
    assert route is not None
    engine = world["b"].engine
    number = engine.host.routes[route.id].arrivals[2]._next
    engine.deliver("a", NetworkJob(route.id, number, [], step=ComputeStep.LAYER, current_layer=2))
    engine.deliver("a", CloseRoute(route.id))
    engine.take_commands(wait=False)
    assert len(engine._processor.visits) == 1
    engine.turn()
    assert len(engine._processor.visits) == 0
    assert engine.stats.refused == {"closed_route": 1}


@pytest.mark.parametrize("places", [FIRST_HERE, FIRST_REMOTE], ids=["first stage here", "first stage remote"])
def test_a_job_whose_prefill_update_cannot_be_sent_ends_at_once(
    places: tuple[Machine, ...], caplog: pytest.LogCaptureFixture
) -> None:
    world = World(*places, config=EngineConfig(block_size=4, chunk=8, window=1, policy="fcfs"))
    world.open_routes("a")
    lost, other = world.ask("a", PROMPT), world.ask("a", PROMPT[::-1])
    refuse_from(world, lost, PrefillProgress)
    with caplog.at_level(logging.INFO, "penstock.engine"):
        world.finish()
    assert lost.job.prefilled < len(PROMPT), "the rest of its prompt was not computed"
    assert isinstance(other.final, JobDone)
    stats = world["a"].engine.stats
    assert (stats.unreachable_clients, stats.jobs) == (1, {"cancelled": 1, "done": 1})
    assert f"job {lost.job.job_id} was cancelled: its client took no more updates (1 so far)" in caplog.text


def test_a_job_whose_token_cannot_be_sent_ends_at_the_head() -> None:
    engine = make_engine(EngineConfig(block_size=4, chunk=8))
    job, updates = make_job([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))

    def sink(update: JobUpdate) -> None:
        updates.append(update)
        if isinstance(update, TokensOut):
            raise BrokenPipeError

    job.sink = sink
    engine.submit(job)
    finish(engine)
    assert sum(isinstance(update, TokensOut) for update in updates) == 1
    assert (engine.stats.unreachable_clients, engine.sequences.pool.held) == (1, 0)


# ---- every row ----


def test_production_reaches_every_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: set[int] = set()

    def recorded(state: JobState, facts: Facts) -> JobState:
        reached.add(next(i for i, (row, conditions, _) in enumerate(ROWS) if row == state.name and all_hold(conditions, facts)))
        return next_state(state, facts)

    for module in (job_processor, visit_queue, engine_module):
        monkeypatch.setattr(module, "next_state", recorded)
    for places in (FIRST_HERE, FIRST_REMOTE, (Machine("a", ((0, 2), (2, 3)), ends=True), Machine("b", ((3, 4),)))):
        world = World(*places)
        world.open_routes("a")
        asked = [world.ask("a", PROMPT) for _ in range(3)]
        refuse_from(world, asked[1], PrefillProgress)
        refuse_from(world, asked[2], TokensOut)
        world.finish()
    for origin in "ab":
        world["b"].engine.deliver("a", returned(origin))
    world["a"].engine.deliver("b", returned("a"))
    world.run(0.1)
    _ask_while_a_layer_is_missing()
    for state in (JobState.EMBED, JobState.PROCESS_LAYERS, JobState.HEAD, JobState.VALIDATING):
        _lose_the_route_in(state)
    missed = [ROWS[i] for i in range(len(ROWS)) if i not in reached]
    assert missed == []


def _ask_while_a_layer_is_missing() -> None:
    world = World(Machine("a", ((0, 2),), ends=True))
    asked = world.ask("a", PROMPT, may_fail=True)
    world.run(0.1)
    assert isinstance(asked.error, NotReady)


def _lose_the_route_in(state: JobState) -> None:
    """A visit waits in this state at its origin as the route breaks; then the job is computed again on another one."""
    world = World(Machine("a", ((0, 2), (2, 4)), ends=True))
    world.open_routes("a")
    asked = world.ask("a", PROMPT)
    node, processor = world["a"], world["a"].engine._processor
    node.engine.take_commands(wait=False)
    for _ in range(100):
        if any(visit.state is state for visit in processor.visits):
            break
        if state is JobState.EMBED:  # a visit leaves it in the turn that grants it
            job, _ = node.origin.grant()
            assert job is not None
            processor.accept(job)
        else:
            node.engine.turn()
    node.origin.lose_route("a test")
    world.finish()
    done: Any = asked.final
    assert done.timings.preemptions == 1
