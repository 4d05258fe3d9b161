"""Pipes that are long, slow, or shared by many origins, on simulated time: nothing is given up that is only slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import Message
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, PackedHidden, Span
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.errors import MalformedMessage
from penstock.model.attention import BatchPiece
from penstock.network.codec import encode
from tests.engine.node import FakeLayers, Node, Place
from tests.engine.world import GREEDY, Asked, World


class TimedWorld(World):
    """A world of which only times are of interest: its layers compute nothing, and invariants are checked elsewhere."""

    def __init__(self, *places: Place, **more: Any) -> None:
        self.passes: list[int] = []  # tokens of each
        super().__init__(*places, **more)

    def start(self, place: Place) -> Node:
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
            segment._spend(hidden.shape[0])
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
        found = {node.name: (node.engine.stats.lost_jobs, node.engine.stats.last_break) for node in self if node.place.ends}
        return {name: trouble for name, trouble in found.items() if trouble != (0, "")}

    def run_until_trouble(self, asked: Sequence[Asked], limit: float) -> None:
        """Until these have ended, or something counts as lost."""
        until = self.now + limit
        while not all(one.final for one in asked) and not self.troubles() and self.now < until:
            self.step()


class SlowLinks(TimedWorld):
    """Links that carry so many tokens of hidden states a second, one NetworkJob after the other."""

    def __init__(self, *places: Place, tokens_per_second: float, **more: Any) -> None:
        self._rate = tokens_per_second
        self._free: dict[tuple[str, str], float] = {}  # when a link has sent what it was given
        super().__init__(*places, **more)

    def post(self, sender: Node, destination: str, message: Message) -> None:
        tokens = 0
        if isinstance(message, NetworkJob):
            tokens = sum(span.n if message.step is ComputeStep.LAYER else span.rows for span in message.spans)
        pair, now = (sender.name, destination), sender.clock()
        self._free[pair] = max(now, self._free.get(pair, 0.0)) + tokens / self._rate
        self._due[pair] = max(self._due.get(pair, 0.0), self._free[pair] + self.latency)
        super().post(sender, destination, message)


# ---- long and slow ----


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="Until a first NetworkJob has come home, one that takes over 2 s counts as lost if all nodes answer pings.",
)
def test_a_long_route_does_not_lose_its_first_network_job() -> None:
    nodes = [Place(f"n{layer}", ((layer, layer + 1),), seconds=1.2) for layer in range(8)]
    world = TimedWorld(Place("a", (), ends=True), *nodes, layers=8, recovery_timeout=60.0)
    world.open_routes("a")
    one = world.ask_for("a", 4, 1)
    world.run_until_trouble([one], 12.0)
    assert world.troubles() == {}
    assert isinstance(one.final, JobDone)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="How long a chunk takes on the links is not predicted, so that a long prompt after short ones counts as lost.",
)
def test_a_long_prompt_over_slow_links_does_not_count_as_lost() -> None:
    nodes = [Place(f"n{layer}", ((layer, layer + 1),), blocks=200, seconds=0.02, per_token=0.001) for layer in range(3)]
    config = EngineConfig(block_size=16, chunk=512, policy="lrs")
    # 8,192 numbers of two bytes for each token, at 20 Mbit/s
    world = SlowLinks(Place("a", (), ends=True), *nodes, tokens_per_second=152, config=config, layers=3, latency=0.02)
    world.open_routes("a")
    for first in range(4):
        world.answer(world.ask_for("a", 20, 8, first=first))
    long = world.ask_for("a", 2000, 2, first=9)
    world.run_until_trouble([long], 60.0)
    assert world.troubles() == {}
    assert isinstance(long.final, JobDone)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="The thread that computes also renews the leases, so that they expire during a long pass, even on its own node.",
)
def test_an_origin_keeps_its_route_during_a_pass_of_its_own_that_is_longer_than_the_lease() -> None:
    world = TimedWorld(Place("a", ((0, 2),), ends=True, seconds=6.0), Place("b", ((2, 4),)), lease=5.0)
    world.open_routes("a")
    one = world.ask_for("a", 4, 1)
    world.run_until_trouble([one], 10.0)
    assert world.troubles() == {}
    assert isinstance(one.final, JobDone)


# ---- layers on another node ----

REMOTE_TIMES = "The predictor learns only what is computed on the origin itself, so that remote layers seem to take no time"


@pytest.mark.parametrize(
    "node",
    ["a", pytest.param("b", marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"{REMOTE_TIMES}."))],
)
def test_a_short_prompt_overtakes_a_long_one_wherever_the_layers_are(node: str) -> None:
    config = EngineConfig(block_size=16, chunk=128, idle_chunk=128, policy="lrs")
    layers = Place(node, ((0, 4),), ends=node == "a", blocks=400, seconds=0.005, per_token=0.001)
    world = TimedWorld(*([layers] if node == "a" else [Place("a", (), ends=True), layers]), config=config)
    world.open_routes("a")
    for first in range(12):
        world.answer(world.ask_for("a", 20 + 20 * first, 3, first=first))
    long = world.ask_for("a", 5000, 2, first=20)
    world.run(0.5)
    short = world.ask_for("a", 60, 2, first=30)
    assert world.seconds_until_first_tokens([short], 3.0) < 1.0
    assert not long.said()


@pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"{REMOTE_TIMES}, and a chunk is as large as one may be.")
def test_a_step_target_bounds_passes_on_another_node() -> None:
    config = EngineConfig(block_size=16, chunk=64, policy="lrs", step_target=0.05)
    world = TimedWorld(
        Place("a", (), ends=True), Place("b", ((0, 4),), blocks=200, seconds=0.005, per_token=0.001), config=config
    )
    world.open_routes("a")
    for first in range(12):
        world.answer(world.ask_for("a", 20 + first, 4, first=first))
    world.passes.clear()
    world.answer(world.ask_for("a", 2000, 2, first=20))
    assert 0.005 + 0.001 * max(world.passes) <= 2 * 0.05


@pytest.mark.xfail(
    strict=True,
    raises=MalformedMessage,
    reason="The largest chunk that a step target allows takes no account of how wide the model is.",
)
def test_the_largest_chunk_of_a_step_target_fits_a_message_of_a_wide_model() -> None:
    rows, width = StepTimePredictor().chunk_within(1e9, 0, 0), 8192
    hidden = PackedHidden("float32", rows, width, bytes(4 * rows * width))
    encode(NetworkJob(RouteId("a", 1, 0), 5, [Span(1, 0, 0, 0, 0, rows, 0)], step=ComputeStep.LAYER, hidden=hidden))


# ---- shared ----


def many_origins(count: int, config: EngineConfig, **more: Any) -> TimedWorld:
    """Origins `o0`, `o1`, … without layers, over one node that has them all."""
    origins = [Place(f"o{number}", (), ends=True) for number in range(count)]
    node = Place("s", ((0, 4),), blocks=2000, seconds=0.01, per_token=0.002)
    world = TimedWorld(node, *origins, config=config, recovery_timeout=120.0, **more)
    world.open_routes(*(origin.name for origin in origins))
    world.run(1.0)
    return world


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="The time-out of a NetworkJob leaves out the passes of other origins that it waits for.",
)
def test_an_answer_is_not_lost_while_other_origins_read_long_prompts_on_the_same_node() -> None:
    world = many_origins(3, EngineConfig(block_size=16, chunk=512, policy="lrs"))
    answer = world.ask_for("o0", 20, 100)
    world.run(1.0)
    prompts = [world.ask_for(f"o{number}", 4000, 4, first=7 * number) for number in (1, 2)]
    world.run_until_trouble([answer, *prompts], 120.0)
    assert world.troubles() == {}
    assert all(isinstance(one.final, JobDone) for one in world.asked)


def test_a_pass_stays_bounded_however_many_origins_share_a_node() -> None:
    world = many_origins(6, EngineConfig(block_size=16, chunk=64, idle_chunk=64, policy="lrs"))
    for number in range(6):
        world.ask_for(f"o{number}", 320, 2, first=6 * number)
    world.run_until_trouble(world.asked, 30.0)
    assert world.troubles() == {}
    assert all(isinstance(one.final, JobDone) for one in world.asked)
    assert max(world.passes) <= 2 * 64


@pytest.mark.parametrize("policy", ["fcfs", "edf", "lrs"])
@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="A prompt that waits for memory which other origins have leased stops admission for all behind it.",
)
def test_a_prompt_that_waits_for_leased_memory_holds_up_no_shorter_ones(policy: str) -> None:
    config = EngineConfig(block_size=16, chunk=512, policy=policy)
    world = TimedWorld(
        Place("s", ((0, 4),), blocks=40, seconds=0.05), Place("a", (), ends=True), Place("b", (), ends=True), config=config
    )
    world.open_routes("a", "b")
    world.ask_for("b", 40, 500)
    world.ask_for("a", 30, 200, first=9)
    world.run_until(lambda: world["a"].origin.sequences.pool.capacity == 20, what="giving each its half of the memory")
    world.run(1.0)
    world.ask_for("a", 480, 4, first=20)  # 31 of the 40 blocks
    world.run(0.2)
    shorts = [world.ask_for("a", 30, 2, first=30 + number) for number in range(3)]
    assert world.seconds_until_first_tokens(shorts, 3.0) < 2.0
