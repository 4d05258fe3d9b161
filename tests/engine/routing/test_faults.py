"""Answers over a bad network: whatever is lost, repeated, late or damaged, every job gets its own tokens and one end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import Bounce, CloseRoute, Lease, Mark, Message, OpenRoute, Ping, Pong, RouteOffer, StageProgress
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob
from penstock.simulate.node import Machine
from tests.engine import layouts
from tests.engine.world import GREEDY, Faults, World
from tests.examples import examples

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
asks = st.lists(
    st.tuples(layouts.prompts, layouts.params | st.none(), st.floats(0, 0.3), st.booleans()), min_size=1, max_size=6
)  # None: an embedding


@examples(
    few=12,
    many=40,
    network=layouts.networks(most_nodes=3, most_layers=4),
    config=layouts.configs,
    faults=layouts.faults,
    jobs=asks,
    seed=st.integers(0, 99),
)
def test_every_job_gets_its_own_tokens_and_one_end_over_any_bad_network(
    network: tuple[int, list[Machine]],
    config: EngineConfig,
    faults: Faults,
    jobs: list[tuple[list[int], SamplingParams | None, float, bool]],
    seed: int,
) -> None:
    layers, places = network
    places = [replace(place, blocks=24) for place in places]
    world = World(*places, layers=layers, config=config, faults=faults, seed=seed, recovery_timeout=300.0)
    world.open_routes("a")
    for prompt, sampling, later, cancel in jobs:
        prompt = prompt[: world["a"].engine.max_tokens - 1]
        asked = world.embed("a", prompt) if sampling is None else world.ask("a", prompt, sampling)
        world.run(later)
        if cancel and later < 0.05:
            world.withdraw(asked)
    world.finish(600.0)
    assert "NO_ROOM" not in world.refusals, "the origin knows what fits"
    for asked in world.asked:
        if not asked.may_fail and asked.job.sampling.prompt_logprobs is not None:
            assert len(asked.prompt_logprobs) == len(asked.job.prompt_ids) - 1


def three(faults: Faults, *, seed: int = 0, **config: object) -> World:
    """An origin with the ends only, and two nodes behind it."""
    engine = EngineConfig(**({"block_size": 4, "chunk": 4, "policy": "fcfs"} | config))  # type: ignore[arg-type]
    places = [Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),))]
    return World(*places, config=engine, faults=faults, seed=seed, recovery_timeout=300.0)


def answer_some(world: World, sampling: SamplingParams = GREEDY, count: int = 4) -> None:
    world.open_routes("a")
    world.run(1.0)  # until all have heard of all
    for i in range(count):
        world.ask("a", PROMPT[i:], sampling)
        world.run(0.02)
    world.finish(600.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_fifth_of_everything_may_go_wrong(seed: int) -> None:
    faults = Faults(drop=0.2, duplicate=0.2, delay=0.2, reorder=0.2, corrupt=0.05)
    world = World(Machine("a", ((0, 2),), ends=True), Machine("b", ((2, 4),)), faults=faults, seed=seed, recovery_timeout=300.0)
    answer_some(world)


@pytest.mark.parametrize("kind", [OpenRoute, RouteOffer, CloseRoute, Ping, Pong, Lease, Mark, StageProgress, Bounce])
def test_each_kind_of_message_may_be_lost_repeated_and_late(kind: type) -> None:
    faults = Faults(drop=0.3, duplicate=0.3, reorder=0.3, hits=lambda sender, destination, message: isinstance(message, kind))
    world = three(faults)
    world.open_routes("a")
    for i in range(3):
        world.ask("a", PROMPT[i:])
        world.run(0.3)
        world.restart("b" if i % 2 else "c")  # so that routes are opened and closed
    world.finish()


@pytest.mark.parametrize("chunk", [2, 40])
@pytest.mark.parametrize("hop", ["b", "c", "a"])
def test_the_first_span_of_an_attempt_may_be_lost_on_every_hop(hop: str, chunk: int) -> None:
    seen: set[tuple[int, int, int]] = set()

    def first(sender: str, destination: str, message: Message) -> bool:
        if not isinstance(message, NetworkJob) or destination != hop:
            return False
        new = {span[:3] for span in message.spans if span.start_pos == span.base and span.attempt < 2} - seen
        seen.update(new)
        return bool(new)

    world = three(Faults(drop=1.0, hits=first), chunk=chunk, window=3)
    answer_some(world, replace(GREEDY, max_tokens=4), count=2)
    assert world["a"].engine.stats.lost_jobs > 0


@pytest.mark.parametrize("seed", range(3))
def test_no_release_is_ever_lost(seed: int) -> None:
    """Memory comes back at every stage although much of what tells them so does not arrive."""

    def tells(sender: str, destination: str, message: Message) -> bool:
        return isinstance(message, NetworkJob) and bool(message.notices)

    world = three(Faults(drop=0.3, duplicate=0.3, reorder=0.3, hits=tells), seed=seed)
    world.open_routes("a")
    for i in range(3):
        asked = world.ask("a", PROMPT[i:])
        world.run(0.1)
        if i == 1:
            world.withdraw(asked)
    world.finish(600.0)


def comes_home(sender: str, destination: str, message: Message) -> bool:
    return isinstance(message, NetworkJob) and message.step is ComputeStep.HEAD


def test_what_comes_home_twice_counts_once() -> None:
    world = three(Faults(duplicate=1.0, hits=comes_home), window=3)
    world.latency = 0.0  # so that both are there at the same instant
    answer_some(world)
    assert world["a"].engine.stats.lost_jobs == 0


@pytest.mark.parametrize("scores", [None, 1])
def test_chunks_of_a_prompt_may_come_home_in_any_order(scores: int | None) -> None:
    sampling = replace(GREEDY, prompt_logprobs=scores)
    for seed in range(5):
        world = three(Faults(reorder=0.7, hits=comes_home, hold=(0.0, 0.02)), seed=seed, window=5, chunk=1)
        answer_some(world, sampling, count=2)
        for asked in world.asked:
            assert len(asked.prompt_logprobs) == (0 if scores is None else len(asked.job.prompt_ids) - 1)


def test_a_route_on_which_later_ones_come_home_is_not_broken() -> None:
    def some(sender: str, destination: str, message: Message) -> bool:
        return comes_home(sender, destination, message) and isinstance(message, NetworkJob) and message.number in (2, 3, 4, 5)

    world = three(Faults(drop=1.0, hits=some), window=6, chunk=1)
    answer_some(world)
    assert world["a"].engine.stats.lost_jobs == 4
    assert world["a"].engine.stats.last_break != "no NetworkJob returns"


def test_chunks_of_a_prompt_may_be_lost_on_the_way_home() -> None:
    world = three(Faults(drop=0.4, hits=comes_home), window=5, chunk=1)
    answer_some(world, replace(GREEDY, prompt_logprobs=1), count=2)
    for asked in world.asked:
        assert len(asked.prompt_logprobs) == len(asked.job.prompt_ids) - 1


def test_a_span_that_comes_after_its_sequence_is_over_holds_no_memory() -> None:
    """It was overtaken for so long that the stage went on without it, and meanwhile its job was cancelled."""

    def is_first(sender: str, destination: str, message: Message) -> bool:
        return isinstance(message, NetworkJob) and destination == "b" and any(span.seq_id == 0 for span in message.spans)

    world = three(Faults(reorder=1.0, hits=is_first, hold=(0.5, 0.5)), window=5)
    world.open_routes("a")
    gone = world.ask("a", PROMPT)
    world.run(0.001)
    other = world.ask("a", PROMPT, replace(GREEDY, max_tokens=30))
    world.run(0.02)
    world.withdraw(gone)
    world.run_until(lambda: other.final is not None)
    world.run(1.0)
    assert [lease.pool.held for stage in world["b"].engine.stages.values() for lease in stage.leases.values()] == [0]
    world.finish()


def test_what_was_damaged_on_the_way_home_is_sent_again_at_once() -> None:
    damaged: set[int] = set()

    def once(sender: str, destination: str, message: Message) -> bool:
        if not comes_home(sender, destination, message) or not isinstance(message, NetworkJob) or message.number in damaged:
            return False
        damaged.add(message.number)
        return message.number % 3 == 2

    world = three(Faults(corrupt=1.0, hits=once, part=(0.97, 0.99)))
    world.open_routes("a")
    started = world.now
    asked = world.ask("a", PROMPT)
    world.run_until(lambda: asked.final is not None)
    assert world["a"].engine.stats.lost_jobs > 0
    assert world.now - started < 2.0, "nobody waited for the time to run out"
    world.finish()
