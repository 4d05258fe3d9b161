"""Pipes that are long, slow, or shared by many origins, on simulated time: nothing is given up that is only slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from penstock.config.engine import MAX_CHUNK, POLICY_NAMES, EngineConfig
from penstock.domain.fsm import ComputeStep
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, PackedHidden, Span
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone
from penstock.engine.routing.origin.pacing import Pacing
from penstock.model.batch import BatchPiece
from penstock.network.codec import encode
from penstock.simulate.node import Machine, SimulatedNode
from tests.engine.fakes import FakeLayers
from tests.engine.world import GREEDY, Asked, World


class TimedWorld(World):
    """A world of which only times are of interest: its layers compute nothing, and invariants are checked elsewhere."""

    def __init__(self, *places: Machine, **more: Any) -> None:
        self.passes: list[int] = []  # tokens of each
        super().__init__(*places, **more)

    def start(self, place: Machine) -> SimulatedNode:
        node = super().start(place)
        for stage in node.engine.stages.values():
            assert isinstance(stage.segment, FakeLayers)
            stage.segment.process = self._timed(stage.segment)  # type: ignore[method-assign]
        return node

    def check(self) -> None:
        pass

    def _timed(self, segment: FakeLayers) -> Any:
        def process(hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
            self.passes.append(hidden.shape[0])
            segment._spend(hidden.shape[0], segment.layers.size)
            return hidden

        return process

    def ask_for(self, name: str, prompt_tokens: int, tokens: int, *, first: int = 1) -> Asked:
        """Submit a prompt of so many tokens; prompts with a different `first` share no prefix."""
        prompt = [1 + (first + position) % 40 for position in range(prompt_tokens)]
        return self.ask(name, prompt, replace(GREEDY, max_tokens=tokens), may_fail=True)

    def seconds_until_first_tokens(self, asked: Sequence[Asked], limit: float) -> float:
        start = self.now
        while not all(one.said() for one in asked) and self.now - start < limit:
            self.step()
        return self.now - start

    def run_until(self, condition: Callable[[], bool], seconds: float = 120.0, what: str = "it") -> None:
        """As ever, but a scenario that does not get under way is not taken for the failure that a test expects."""
        try:
            super().run_until(condition, seconds, what)
        except AssertionError as error:
            pytest.fail(str(error))

    def answer(self, one: Asked) -> None:
        self.run_until(lambda: one.final is not None, what="an answer")

    def troubles(self) -> dict[str, tuple[int, str]]:
        """By origin: how many NetworkJobs counted as lost, and why its route broke."""
        found = {node.name: (node.engine.stats.lost_jobs, node.engine.stats.last_break) for node in self if node.machine.ends}
        return {name: trouble for name, trouble in found.items() if trouble != (0, "")}

    def run_until_trouble(self, asked: Sequence[Asked], limit: float) -> None:
        """Until these have ended, or something counts as lost."""
        until = self.now + limit
        while not all(one.final for one in asked) and not self.troubles() and self.now < until:
            self.step()


# ---- long and slow ----


def test_the_first_token_over_twenty_nodes_takes_little_more_than_their_passes() -> None:
    nodes = [Machine(f"n{layer:02d}", ((layer, layer + 1),), seconds=0.45) for layer in range(20)]
    world = TimedWorld(Machine("a", (), ends=True), *nodes, layers=20, recovery_timeout=60.0)
    one = world.ask_for("a", 4, 2)
    assert world.seconds_until_first_tokens([one], 60.0) < 1.2 * 20 * 0.45
    world.answer(one)
    assert world.troubles() == {}
    assert isinstance(one.final, JobDone)


@pytest.mark.parametrize("megabits", [20, *(pytest.param(rate, marks=pytest.mark.slow) for rate in (50, 100))])
def test_a_long_prompt_takes_as_long_as_the_links_need(megabits: int) -> None:
    """A model 8,192 wide in float32, over three nodes, after short prompts and beside a running answer."""
    rate = megabits * 1e6 / 8 / (8192 * 4)
    nodes = [Machine(f"n{layer}", ((layer, layer + 1),), blocks=400, seconds=0.02, per_token=0.001) for layer in range(3)]
    config = EngineConfig(block_size=16, chunk=512, policy="lrs")
    world = TimedWorld(Machine("a", (), ends=True), *nodes, tokens_per_second=rate, config=config, layers=3, latency=0.02)
    world.open_routes("a")
    for first in range(4):
        world.answer(world.ask_for("a", 20, 8, first=first))
    world.ask_for("a", 20, 300, first=20)
    long = world.ask_for("a", 4000, 2, first=9)
    started = world.now
    world.run_until_trouble([long], 200.0)
    assert world.troubles() == {}
    assert isinstance(long.final, JobDone)
    assert world.now - started < 1.25 * 4000 / rate


def over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> TimedWorld:
    """A model 4,096 wide in bfloat16, over two nodes and links of 1.3 Mbit/s, which carry 20 tokens a second."""
    monkeypatch.setattr(Pacing, "size", lambda self, tokens: tokens * 4096 * 4)
    nodes = [Machine(f"n{number}", ((2 * number, 2 * number + 2),), blocks=400, seconds=0.01) for number in range(2)]
    world = TimedWorld(Machine("a", (), ends=True), *nodes, tokens_per_second=20.0, config=EngineConfig(prefix_cache=False))
    world.run(2.0)
    world["a"].engine.stats.last_break = ""
    return world


def test_the_first_prompt_over_a_slow_link_breaks_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    world = over_a_slow_link(monkeypatch)
    one = world.ask_for("a", 600, 2)
    world.run_until_trouble([one], 120.0)
    assert world.troubles() == {}
    assert isinstance(one.final, JobDone)


def test_a_prompt_after_a_long_answer_over_a_slow_link_breaks_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was seen of the link for long were single tokens, which do not tell how long a chunk takes."""
    world = over_a_slow_link(monkeypatch)
    for prompt_tokens, tokens in ((4, 300), (300, 2)):
        one = world.ask_for("a", prompt_tokens, tokens, first=tokens)
        world.run_until_trouble([one], 200.0)
        assert world.troubles() == {}
        assert isinstance(one.final, JobDone)


@pytest.mark.slow
def test_many_streams_fill_many_hops() -> None:
    """64 answers over 20 nodes with 100 ms between them: as many steps are on the way as make them fastest."""
    nodes = [Machine(f"n{layer:02d}", ((layer, layer + 1),), blocks=400, seconds=0.01, per_token=0.000625) for layer in range(20)]
    config = EngineConfig(block_size=16, chunk=512)
    world = TimedWorld(Machine("a", (), ends=True), *nodes, layers=20, latency=0.05, config=config)
    world.open_routes("a")
    streams = [world.ask_for("a", 20, 400, first=first) for first in range(64)]
    world.seconds_until_first_tokens(streams, 120.0)
    world.run(40.0)
    before, started = sum(len(one.said()) for one in streams), world.now
    world.run(20.0)
    rate = (sum(len(one.said()) for one in streams) - before) / (world.now - started)

    def best(parts: int) -> float:
        stage = 0.01 + 0.000625 * 64 / parts
        return 64 / max(parts * stage, 21 * 0.1 + 20 * stage)

    assert best(1) == pytest.approx(64 / 3.1)  # a stage takes 50 ms for all
    assert rate > 0.8 * max(map(best, range(1, 65)))
    assert world.troubles() == {}


def test_an_origin_keeps_its_route_during_a_pass_of_its_own_that_is_longer_than_the_lease() -> None:
    world = TimedWorld(Machine("a", ((0, 2),), ends=True, seconds=6.0), Machine("b", ((2, 4),)), lease=5.0)
    world.open_routes("a")
    one = world.ask_for("a", 4, 1)
    world.run_until_trouble([one], 10.0)
    assert world.troubles() == {}
    assert isinstance(one.final, JobDone)


def test_a_node_that_takes_long_at_the_head_is_not_taken_for_one_that_hangs() -> None:
    """The scores of a long prompt on a slow machine. Neither its own route nor another's that passes it breaks."""
    world = TimedWorld(
        Machine("a", (), ends=True), Machine("b", ((0, 2),), ends=True, blocks=60), Machine("c", ((2, 4),), blocks=60), lease=5.0
    )
    world.open_routes("a", "b")
    world.run(1.0)
    world["a"].engine.stats.last_break = world["b"].engine.stats.last_break = ""
    ends = world["b"].engine._context.own_end_model
    fast = ends.compute_head

    def slow(normed: Tensor) -> Tensor:
        world["b"].busy_until = world["b"].clock() + 8.0
        return fast(normed)

    ends.compute_head = slow  # type: ignore[method-assign]
    asked = [world.ask_for("b", 4, 2), world.ask_for("a", 4, 40)]
    world.run_until_trouble(asked, 60.0)
    assert world.troubles() == {}
    assert all(isinstance(one.final, JobDone) for one in asked)


@pytest.mark.parametrize("seconds", [10.0, 25.0])
def test_a_node_that_became_much_slower_breaks_a_route_only_once(seconds: float) -> None:
    """Its machine swaps, or lowers its clock. The first long pass looks as if it hung; after that it says what to expect."""
    world = TimedWorld(Machine("a", (), ends=True), Machine("b", ((0, 4),), blocks=60, seconds=0.5), recovery_timeout=60.0)
    world.open_routes("a")
    world.answer(world.ask_for("a", 4, 60))
    object.__setattr__(world["b"].machine, "seconds", seconds)
    first = world.ask_for("a", 4, 3, first=9)
    world.run_until(lambda: first.final is not None, 20 * seconds)
    assert world.troubles() == {"a": (0, "node b answers but computes nothing")}
    world["a"].engine.stats.last_break = ""
    second = world.ask_for("a", 4, 3, first=20)
    world.run_until_trouble([second], 5 * seconds)
    assert world.troubles() == {}
    assert isinstance(first.final, JobDone)
    assert isinstance(second.final, JobDone)


def test_nodes_keep_a_route_that_another_node_takes_long_to_join() -> None:
    """It is in a pass that is longer than the lease, and no other node has its layers."""
    world = TimedWorld(Machine("a", (), ends=True), Machine("b", ((0, 2),)), lease=5.0)
    world.start(Machine("c", ((2, 4),))).busy_until = world.now + 15.0
    world.run(1.0)
    one = world.ask_for("a", 4, 2)
    world.run_until_trouble([one], 25.0)
    assert world.troubles() == {}
    assert isinstance(one.final, JobDone)


# ---- layers on another node ----


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_short_prompt_overtakes_a_long_one_wherever_the_layers_are(node: str) -> None:
    config = EngineConfig(block_size=16, chunk=128, idle_chunk=128, policy="lrs")
    layers = Machine(node, ((0, 4),), ends=node == "a", blocks=400, seconds=0.005, per_token=0.001)
    world = TimedWorld(*([layers] if node == "a" else [Machine("a", (), ends=True), layers]), config=config)
    world.open_routes("a")
    for first in range(12):
        world.answer(world.ask_for("a", 20 + 20 * first, 3, first=first))
    long = world.ask_for("a", 5000, 2, first=20)
    world.run(0.5)
    short = world.ask_for("a", 60, 2, first=30)
    assert world.seconds_until_first_tokens([short], 3.0) < 1.5 * 0.17, "as long as on one node, and half as much again"
    assert not long.said()


def test_a_step_target_bounds_passes_on_another_node() -> None:
    config = EngineConfig(block_size=16, chunk=64, policy="lrs", step_target=0.05)
    world = TimedWorld(
        Machine("a", (), ends=True), Machine("b", ((0, 4),), blocks=200, seconds=0.005, per_token=0.001), config=config
    )
    world.open_routes("a")
    for first in range(12):
        world.answer(world.ask_for("a", 20 + first, 4, first=first))
    world.passes.clear()
    world.answer(world.ask_for("a", 2000, 2, first=20))
    assert 0.005 + 0.001 * max(world.passes) <= 2 * 0.05


@pytest.mark.parametrize("width", [1, 2048, 8192, 16384])
def test_the_largest_chunk_fits_a_message_however_wide_the_model_is(width: int) -> None:
    world = TimedWorld(Machine("a", (), ends=True), Machine("b", ((0, 4),)), config=EngineConfig(block_size=16, step_target=1e9))
    world.open_routes("a")
    world.answer(world.ask_for("a", 20, 4))
    origin = world["a"].origin
    origin.pacing._width = width
    assert origin.route is not None
    rows = min(MAX_CHUNK, origin.pacing.max_chunk(origin.route)) + world.config.max_sequences
    hidden = PackedHidden("float32", rows, width, bytes(4 * rows * width))
    encode(NetworkJob(RouteId("a", 1, 0), 5, [Span(1, 0, 0, 0, 0, rows, 0)], step=ComputeStep.LAYER, hidden=hidden))


# ---- shared ----


def many_origins(count: int, config: EngineConfig, **more: Any) -> TimedWorld:
    """Origins `o0`, `o1`, … without layers, over one node that has them all."""
    origins = [Machine(f"o{number}", (), ends=True) for number in range(count)]
    node = Machine("s", ((0, 4),), blocks=2000, seconds=0.01, per_token=0.002)
    world = TimedWorld(node, *origins, config=config, recovery_timeout=120.0, **more)
    world.open_routes(*(origin.name for origin in origins))
    world.run(1.0)
    return world


def test_three_origins_that_read_long_prompts_on_one_node_lose_nothing_and_go_on_answering() -> None:
    world = many_origins(3, EngineConfig(block_size=16, chunk=512, policy="lrs"))
    answers = [world.ask_for(f"o{number}", 20, 200, first=number) for number in range(3)]
    world.run(1.0)
    prompts = [world.ask_for(f"o{number}", 4000, 4, first=10 + 7 * number) for number in range(3)]
    world.run(2.0)
    last = {one.node: (len(one.said()), len(world.passes)) for one in answers}
    while not any(one.final for one in [*prompts, *answers]):
        world.step()
        for one in answers:
            said, passes = last[one.node]
            if len(one.said()) > said:
                last[one.node] = len(one.said()), len(world.passes)
                assert len(world.passes) - passes <= 2, "a token every two passes"
    world.run_until_trouble([*answers, *prompts], 120.0)
    assert world.troubles() == {}
    assert all(isinstance(one.final, JobDone) for one in world.asked)


def test_a_pass_stays_bounded_however_many_origins_share_a_node() -> None:
    world = many_origins(6, EngineConfig(block_size=16, chunk=64, idle_chunk=64, policy="lrs"))
    for number in range(6):
        world.ask_for(f"o{number}", 320, 2, first=6 * number)
    world.run_until_trouble(world.asked, 30.0)
    assert world.troubles() == {}
    assert all(isinstance(one.final, JobDone) for one in world.asked)
    assert max(world.passes) <= 2 * 64 + world.config.max_sequences


def test_a_long_queue_at_a_shared_node_loses_nothing() -> None:
    """Eight origins with 24 chunks each on their way, of which two fit into a pass: the last one waits for 96 passes."""
    world = many_origins(8, EngineConfig(block_size=16, chunk=16, idle_chunk=16, max_sequences=4, window=24))
    for number in range(8):
        world.ask_for(f"o{number}", 560, 2, first=number)
    world.run_until_trouble(world.asked, 60.0)
    assert world.troubles() == {}
    assert all(isinstance(one.final, JobDone) for one in world.asked)


def with_a_prompt_that_waits_for_leased_memory(policy: str) -> tuple[TimedWorld, Asked]:
    """`a` and `b` have half of the memory each, and `a` has a prompt that needs more than that."""
    config = EngineConfig(block_size=16, chunk=512, policy=policy)
    world = TimedWorld(
        Machine("s", ((0, 4),), blocks=40, seconds=0.05), Machine("a", (), ends=True), Machine("b", (), ends=True), config=config
    )
    world.open_routes("a", "b")
    world.ask_for("b", 40, 500)
    world.ask_for("a", 30, 200, first=9)
    world.run_until(lambda: world["a"].origin.sequences.pool.capacity == 20, what="giving each its half of the memory")
    world.run(1.0)
    long = world.ask_for("a", 480, 4, first=20)  # 31 of the 40 blocks
    world.run(0.2)
    return world, long


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_that_waits_for_leased_memory_holds_up_no_shorter_ones(policy: str) -> None:
    world, long = with_a_prompt_that_waits_for_leased_memory(policy)
    shorts = [world.ask_for("a", 30, 2, first=30 + number) for number in range(3)]
    assert world.seconds_until_first_tokens(shorts, 3.0) < 2.0
    assert not long.said()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_prompt_that_waited_for_leased_memory_gets_it_though_shorter_ones_keep_coming(policy: str) -> None:
    """Alone, the short ones would use all the memory that there is, all the time."""
    world, long = with_a_prompt_that_waits_for_leased_memory(policy)
    shorts: list[Asked] = []

    def keep_coming(seconds: float) -> None:
        until = world.now + seconds
        while world.now < until and not long.said():
            shorts.append(world.ask_for("a", 30, 40, first=len(shorts)))
            world.run(0.1)

    keep_coming(4.0)
    waiting = [one for one in shorts if not one.said()]
    if not waiting or len(waiting) == len(shorts):
        pytest.fail("some of the short ones should be answered, and some should wait")
    world.kill("b")
    keep_coming(15.0)
    assert long.said()
    assert any(not one.said() for one in shorts), "it did not have to wait for them to end"
