"""Routes over several nodes: however the layers are cut and dealt out, the answers are the same, and memory is shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.messages import Lease, Ping, Pong
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob
from penstock.domain.topology import PrivateLayers
from penstock.domain.updates import JobDone
from penstock.engine.routing.host.arrivals import CREDITS
from penstock.simulate.node import Machine
from tests.engine import layouts
from tests.engine.world import GREEDY, Faults, World
from tests.examples import examples

LONG = replace(GREEDY, max_tokens=40)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@examples(
    few=15,
    many=50,
    network=layouts.networks(),
    config=layouts.configs,
    jobs=st.lists(st.tuples(layouts.prompts, layouts.params), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_however_the_layers_are_dealt_out_the_answers_are_the_same(
    network: tuple[int, list[Machine]], config: EngineConfig, jobs: list[tuple[list[int], SamplingParams]], seed: int
) -> None:
    layers, places = network
    world = World(*places, layers=layers, config=config, seed=seed)
    world.open_routes("a")
    for prompt, sampling in jobs:
        world.ask("a", prompt[: world["a"].engine.max_tokens - 1], sampling)
    world.finish()
    assert not world.refusals, "where nothing is lost, stages take everything"


def test_what_leaves_an_origin_that_keeps_the_first_layers_is_never_an_embedding() -> None:
    world = World(Machine("a", ((0, 1), (3, 4)), ends=True), Machine("b", ((1, 3),)))
    world.watching = True
    world.ask("a", PROMPT)
    world.finish()
    jobs = [(sender, message) for sender, _, message in world.seen if isinstance(message, NetworkJob) and message.spans]
    assert {message.current_layer for sender, message in jobs if sender == "a"} == {1}
    assert {message.current_layer for sender, message in jobs if sender == "b"} == {3}


def test_an_origin_forgets_what_has_returned() -> None:
    world = World(Machine("a", ((0, 2),), ends=True), Machine("b", ((2, 4),)))
    asked = world.ask("a", PROMPT, LONG)
    world.run_until(lambda: asked.final, 60.0, "a job")
    world.run(1.0)
    route = world["a"].origin.route
    assert route is not None
    report = route.returns.report(0)
    assert report.newest > 20, "so many NetworkJobs have returned"
    assert not report.here


def test_private_layers_are_computed_at_home_and_a_neighbour_that_has_all_of_them_does_the_rest() -> None:
    world = World(Machine("a", ((0, 1), (3, 4)), ends=True, private=PrivateLayers(1, 1)), Machine("b", ((0, 4),)))
    world.watching = True
    for start in range(5):
        world.ask("a", PROMPT[start:])
    world.finish()
    jobs = [(sender, message) for sender, _, message in world.seen if isinstance(message, NetworkJob) and message.spans]
    assert {message.current_layer for sender, message in jobs if sender == "a"} == {1}
    assert {message.current_layer for sender, message in jobs if sender == "b"} == {3}


def test_ranges_that_overlap_make_a_route() -> None:
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 3),)), Machine("c", ((1, 4),)))
    for start in range(5):
        world.ask("a", PROMPT[start:])
    world.finish()
    assert not world.refusals


def test_origins_that_enter_a_segment_alike_and_leave_it_at_different_layers_share_it() -> None:
    """One keeps the last layer for itself: what it leaves out, the other still needs."""
    places = [Machine("a", ((3, 4),), ends=True), Machine("b", (), ends=True), Machine("x", ((0, 4),), seconds=0.01)]
    world = World(*places)
    world.open_routes("a", "b")
    for start in range(5):
        for name in "ab":
            world.ask(name, PROMPT[start:], replace(GREEDY, max_tokens=20))
    world.finish()
    assert world["x"].engine.stages[0].shared_passes == 0


def test_an_origin_needs_no_layers_of_its_own() -> None:
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 3),)), Machine("c", ((3, 4),)))
    for start in range(5):
        world.ask("a", PROMPT[start:])
    world.finish()
    assert world["a"].engine.stages == {}


def test_an_origin_that_keeps_only_the_last_layers_answers_for_as_long_as_it_is_asked() -> None:
    world = World(Machine("a", ((2, 4),), ends=True, blocks=120), Machine("b", ((0, 2),), blocks=120))
    asked = world.ask("a", PROMPT, replace(GREEDY, max_tokens=3 * CREDITS))
    world.finish()
    assert len(asked.said()) == 3 * CREDITS
    assert world["a"].engine.stats.lost_jobs == 0


def test_an_origin_in_the_middle_of_its_own_route_hands_on_and_takes_back() -> None:
    world = World(Machine("a", ((1, 2), (3, 4)), ends=True), Machine("b", ((0, 1), (2, 3), (4, 5))), layers=5)
    for start in range(5):
        world.ask("a", PROMPT[start:], replace(GREEDY, max_tokens=20))
    world.finish()


@pytest.mark.parametrize("cache", [True, False])
def test_a_prompt_that_was_seen_is_read_once_if_the_cache_is_on(cache: bool) -> None:
    config = EngineConfig(block_size=4, chunk=8, policy="fcfs", prefix_cache=cache)
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),)), config=config)
    first = world.ask("a", PROMPT)
    world.run_until(lambda: first.final is not None)
    second = world.ask("a", PROMPT)
    world.finish()
    assert isinstance(second.final, JobDone)
    assert second.final.usage.cached_tokens == (8 if cache else 0)


def test_answers_are_right_when_memory_is_so_short_that_some_must_start_again() -> None:
    world = World(Machine("a", (), ends=True, blocks=12), Machine("b", ((0, 2),), blocks=12), Machine("c", ((2, 4),), blocks=12))
    asked = [world.ask("a", [*PROMPT[:4], i], replace(GREEDY, max_tokens=25)) for i in range(1, 6)]
    world.finish()
    assert sum(one.job.preemptions for one in asked) > 0
    assert not world.refusals, "the origin knows what fits"


def test_several_outputs_of_a_job_share_their_prompt_at_every_stage() -> None:
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),)))
    world.ask("a", PROMPT, SamplingParams(n=4, temperature=0.9, max_tokens=6, ignore_eos=True))
    world.finish()
    assert world["a"].engine.stats.cached_tokens == 3 * 8


@pytest.mark.parametrize("window", [1, 4])
def test_the_likelihood_of_a_prompt_is_the_same_over_the_network(window: int) -> None:
    config = EngineConfig(block_size=4, chunk=2, policy="fcfs", window=window)
    sampling = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    alone = World(Machine("a", ((0, 4),), ends=True), config=config)
    spread = World(Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),)), config=config)
    answers = [world.ask("a", PROMPT, sampling) for world in (alone, spread)]
    alone.finish()
    spread.finish()
    assert answers[0].prompt_logprobs == answers[1].prompt_logprobs
    assert len(answers[1].prompt_logprobs) == len(PROMPT) - 1


# ---- several origins ----


def shared(origins: str = "ab", *, seconds: float = 0.0) -> World:
    """Two stages that all origins need."""
    stages = [Machine("x", ((0, 2),), seconds=seconds), Machine("y", ((2, 4),), seconds=seconds)]
    return World(*(Machine(name, (), ends=True) for name in origins), *stages)


def test_the_second_of_two_origins_gets_its_share_and_both_finish() -> None:
    world = shared()
    del world.nodes["b"]
    world.open_routes("a")
    assert world["x"].engine.stages[0].unleased == 0, "the first has all of it"
    for i in range(6):
        world.ask("a", [*PROMPT, i], replace(GREEDY, max_tokens=30))
    world.run(0.05)
    world.start(Machine("b", (), ends=True))
    world.open_routes("b")
    assert world["b"].origin.sequences.pool.capacity >= 8
    for i in range(6):
        world.ask("b", [*PROMPT, i], replace(GREEDY, max_tokens=20))
    world.run(3.0)
    shares = [world[name].origin.sequences.pool.capacity for name in "ab"]
    assert shares == [12, 12], "an equal part each"
    world.finish()
    assert "NO_ROOM" not in world.refusals


def test_memory_grows_back_when_an_origin_leaves() -> None:
    world = shared()
    world.open_routes("a", "b")
    world.run(2.0)
    assert world["a"].origin.sequences.pool.capacity == 12
    world.kill("b")
    world.run(2.0)
    assert world["a"].origin.sequences.pool.capacity == 24
    world.ask("a", PROMPT, replace(GREEDY, max_tokens=80))
    world.finish()


def test_an_answer_that_must_give_way_to_another_origin_waits_for_its_memory_to_come_back() -> None:
    world = shared(seconds=0.03)
    del world.nodes["b"]
    world.open_routes("a")
    long = world.ask("a", PROMPT, replace(GREEDY, max_tokens=80), may_fail=True)
    long.job.arrival -= 100.0  # it has been running for a long time
    world.run_until(lambda: len(long.said()) > 50)
    world.start(Machine("b", (), ends=True))
    world.open_routes("b")
    world.run(2.0)
    assert long.final is None, "it waits"
    world.kill("b")
    long.may_fail = False
    world.finish()


def test_three_origins_that_all_want_all_of_the_memory_get_a_third_each() -> None:
    world = shared("abc")
    world.open_routes("a", "b", "c")
    world.run(4.0)
    assert [world[name].origin.sequences.pool.capacity for name in "abc"] == [8, 8, 8]
    for name in "abc":
        world.ask(name, PROMPT, replace(GREEDY, max_tokens=15))
    world.finish()


def test_what_one_node_grants_and_another_does_not_is_given_back() -> None:
    """A node that is free must not hold blocks for an origin that cannot use them: others wait for these."""
    world = World(Machine("a", ((0, 3),), ends=True), Machine("b", (), ends=True), Machine("c", ((3, 4),)), seed=9)
    world.open_routes("a", "b")
    for name in "ab":
        world.ask(name, PROMPT)
    world.finish()


def test_blocks_that_an_origin_has_and_does_not_count_on_are_given_back_when_they_are_called() -> None:
    world = shared()
    del world.nodes["b"]
    world.open_routes("a")
    world.run(1.0)
    origin = world["a"].origin
    assert origin.route is not None
    assert not origin.sequences.has_new_notices
    origin.on_lease("x", Lease(origin.route.id, 0, 30, 24))
    assert origin.sequences.has_new_notices, "the stages hear again what it counts on"


def test_an_origin_grows_only_by_what_was_granted_after_it_gave_something_back() -> None:
    world = shared("a")
    world.open_routes("a")
    world.run(1.0)
    origin = world["a"].origin
    assert origin.route is not None
    origin.on_lease("x", Lease(origin.route.id, 0, 24, 12))
    origin.on_lease("x", Lease(origin.route.id, int(world.now * 1e9), 24, 24))  # said before it was given back
    assert origin.sequences.pool.capacity == 12
    world.run(2.0)
    assert origin.sequences.pool.capacity == 24
    world.finish()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_late_news_about_memory_makes_nobody_count_on_what_is_gone(seed: int) -> None:
    world = shared("abc")
    world.faults = Faults(
        reorder=0.7, hold=(0.1, 2.0), hits=lambda sender, destination, message: isinstance(message, Ping | Pong | Lease)
    )
    world.dice.seed(seed)
    world.open_routes("a", "b", "c")
    for i in range(5):
        for name in "ac":
            world.ask(name, [*PROMPT[:6], i], replace(GREEDY, max_tokens=20))
        world.run(1.0)
        if i == 1:
            world.kill("b", noticed=0.1)
        if i == 3:
            world.start(Machine("b", (), ends=True))
            world.run(0.2)
    world.finish()
    assert "NO_ROOM" not in world.refusals


@examples(
    few=8,
    many=25,
    network=layouts.networks(origins=2, most_layers=4),
    third=st.booleans(),
    jobs=st.lists(st.tuples(st.sampled_from("ab"), layouts.prompts, st.integers(1, 20)), min_size=2, max_size=8),
    seed=st.integers(0, 99),
)
def test_opposed_routes_never_wait_for_each_other(
    network: tuple[int, list[Machine]], third: bool, jobs: list[tuple[str, list[int], int]], seed: int
) -> None:
    layers, places = network
    places = [replace(place, blocks=24) for place in places]
    if third:
        places.append(Machine("z", (), ends=True))
    world = World(*places, layers=layers, seed=seed)
    world.open_routes("a", "b", *(["z"] if third else []))
    for name, prompt, tokens in jobs:
        world.ask(name, prompt[:12], replace(GREEDY, max_tokens=tokens))
    world.finish()
