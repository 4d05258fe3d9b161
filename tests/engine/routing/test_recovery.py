"""Nodes that die, hang, leave, come back or forget: answers go on where there is a way, and end with a reason where not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.messages import CloseRoute, Message, OpenRoute
from penstock.domain.span import NetworkJob
from penstock.domain.updates import JobDone
from penstock.errors import ComputeFailed, NotReady
from penstock.simulate.node import Machine
from tests.engine.fakes import FakeSegment
from tests.engine.world import GREEDY, Asked, Faults, World
from tests.examples import examples

LONG = replace(GREEDY, max_tokens=30)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


def with_replicas(**more: object) -> World:
    """Every layer twice, cut differently; the origin has none."""
    places = [
        Machine("a", (), ends=True),
        Machine("b", ((0, 2),)),
        Machine("c", ((2, 4),)),
        Machine("d", ((0, 2), (2, 3))),
        Machine("e", ((3, 4), (2, 3))),
    ]
    world = World(*places, **more)  # type: ignore[arg-type]
    world.open_routes("a")
    return world


def without_replicas(**more: object) -> World:
    world = World(Machine("a", ((0, 1),), ends=True), Machine("b", ((1, 3),)), Machine("c", ((3, 4),)), **more)  # type: ignore[arg-type]
    world.open_routes("a")
    return world


def ask_some(world: World, count: int = 4) -> list[Asked]:
    return [world.ask("a", PROMPT[i:], LONG) for i in range(count)]


def on_route(world: World) -> list[str]:
    route = world["a"].origin.route
    assert route is not None
    return [hop.node for hop in route.hops]


# ---- death ----


@examples(
    few=4,
    many=15,
    after=st.floats(0, 0.3),
    noticed=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    place=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_when_a_node_dies_its_replica_takes_over_and_no_token_is_lost_or_said_twice(
    after: float, noticed: float, place: int, seed: int
) -> None:
    world = with_replicas(seed=seed)
    ask_some(world)
    world.run(after)
    world.kill(on_route(world)[place], noticed=noticed)
    world.finish()


@examples(
    few=4,
    many=15,
    deaths=st.lists(st.tuples(st.sampled_from("bcde"), st.floats(0, 0.2)), min_size=1, max_size=6),
    faults=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 99),
)
def test_answers_survive_any_number_of_restarts(deaths: list[tuple[str, float]], faults: float, seed: int) -> None:
    world = with_replicas(seed=seed, faults=Faults(drop=faults, duplicate=faults, reorder=faults))
    ask_some(world)
    for name, later in deaths:
        world.run(later)
        world.restart(name)
    world.finish()


def test_a_node_that_hangs_in_its_computation_is_left_for_its_replica() -> None:
    world = with_replicas()
    ask_some(world)
    world.run(0.05)
    hung = world[on_route(world)[0]]
    hung.busy_until = float("inf")
    world.run_until(lambda: all(asked.final for asked in world.asked), 120.0)
    assert hung.name in world["a"].engine.stats.last_break
    hung.busy_until = world.now
    world.finish()


@pytest.mark.parametrize("how", ["dies", "hangs", "stops", "loses what it computes", "hears nothing"])
def test_a_node_that_fails_is_found_within_seconds(how: str) -> None:
    world = with_replicas()
    ask_some(world)
    world.run(0.05)
    victim = world[on_route(world)[0]]
    match how:
        case "dies":
            world.kill(victim.name, noticed=1.0)
        case "hangs":
            victim.busy_until = float("inf")
        case "stops":
            victim.stopped = True
        case "loses what it computes":
            world.faults = Faults(
                drop=1.0, hits=lambda sender, _, message: sender == victim.name and isinstance(message, NetworkJob)
            )
        case _:
            world.faults = Faults(drop=1.0, hits=lambda _, destination, message: destination == victim.name)
    started = world.now
    world.run_until(lambda: victim.name not in on_route_or_none(world) and world["a"].origin.route is not None, 30.0)
    assert world.now - started < {"dies": 2.0}.get(how, 7.0)
    world.all_answered(world.asked)


def test_an_answer_goes_on_quickly_when_every_tenth_message_is_lost() -> None:
    world = with_replicas(seed=3, faults=Faults(drop=0.1))
    (asked,) = ask_some(world, 1)
    started = world.now
    world.run_until(lambda: asked.final is not None, 60.0)
    world.finish()
    assert world.now - started < 60.0


def test_a_slow_node_is_waited_for() -> None:
    """Nobody knows beforehand how long a pass takes: the first must not be given up before it can be done."""
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 2),), seconds=7.0), Machine("c", ((2, 4),), seconds=7.0))
    world.open_routes("a")
    world.ask("a", PROMPT, replace(GREEDY, max_tokens=4))
    world.finish(400.0)
    assert world["a"].engine.stats.lost_jobs == 0


@pytest.mark.parametrize(
    "places",
    [
        (Machine("a", ((0, 4),), ends=True, seconds=9.0),),
        (Machine("a", ((0, 2),), ends=True, seconds=9.0), Machine("b", ((2, 4),))),
        (Machine("a", ((2, 4),), ends=True, seconds=9.0), Machine("b", ((0, 2),))),
    ],
    ids=["all at home", "the first at home", "the last at home"],
)
def test_a_slow_origin_does_not_take_its_own_passes_for_the_silence_of_others(places: tuple[Machine, ...]) -> None:
    world = World(*places)
    world.open_routes("a")
    world.ask("a", PROMPT, replace(GREEDY, max_tokens=4))
    world.finish(400.0)
    assert world["a"].engine.stats.lost_jobs == 0


def test_what_a_failed_pass_did_not_write_is_never_built_upon() -> None:
    """The first chunk fails at the last stage, and the news of it is lost; the next chunks must not pass, nor be cached."""
    config = EngineConfig(block_size=4, chunk=4, policy="fcfs", window=4)
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),)), config=config)
    world.open_routes("a")
    world.run(0.2)
    lost: list[int] = []

    def first_refusal(sender: str, destination: str, message: Message) -> bool:
        if isinstance(message, NetworkJob) and message.refusals and destination == "a" and not lost:
            lost.append(message.number)
            return True
        return False

    world.faults = Faults(drop=1.0, hits=first_refusal)
    (stage,) = world["c"].engine.stages.values()
    assert isinstance(stage.segment, FakeSegment)
    stage.segment.break_next = RuntimeError("out of memory")
    first = world.ask("a", list(range(1, 25)), GREEDY)
    world.run_until(lambda: first.final is not None)
    world.ask("a", list(range(1, 25)), GREEDY)
    world.finish(100.0)
    assert lost


def test_jobs_wait_for_a_node_without_a_replica_to_come_back() -> None:
    world = without_replicas(recovery_timeout=30.0)
    ask_some(world)
    world.run(0.05)
    place = world["b"].machine
    world.kill("b")
    world.run(20.0)
    assert not any(asked.final for asked in world.asked)
    world.start(place)
    world.finish()
    assert world["a"].engine.stats.recoveries == 1


def test_jobs_end_with_a_reason_that_names_the_layers_when_nobody_comes_back() -> None:
    world = without_replicas(recovery_timeout=5.0)
    asked = ask_some(world)
    world.run(0.05)
    world.kill("b")
    for one in asked:
        one.may_fail = True
    world.finish()
    for one in asked:
        assert isinstance(one.error, NotReady)
        assert "1:3" in str(one.error)


def test_an_answer_too_long_for_the_memory_that_is_left_ends_with_a_reason() -> None:
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 4),), blocks=24))
    world.open_routes("a")
    long = world.ask("a", PROMPT, replace(GREEDY, max_tokens=80), may_fail=True)
    short = world.ask("a", PROMPT)
    world.run_until(lambda: len(long.said()) > 30)
    world.start(Machine("c", ((0, 4),), blocks=6))
    world.run(0.01)
    assert long.final is None
    world.kill("b")
    world.finish()
    assert isinstance(long.error, NotReady)
    assert "24" in str(long.error), "as much as is left"
    assert isinstance(short.final, JobDone)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_cannot_compute_is_left_for_its_replica(seed: int) -> None:
    world = with_replicas(seed=seed)
    bad = world[on_route(world)[0]]
    asked = world.ask("a", PROMPT, LONG)
    for stage in bad.engine.stages.values():
        stage.segment.process = _fail  # type: ignore[method-assign]
    world.finish()
    assert isinstance(asked.final, JobDone)
    assert bad.name not in on_route_or_none(world)


def test_a_job_ends_when_the_only_node_cannot_compute() -> None:
    world = without_replicas()
    asked = world.ask("a", PROMPT, LONG, may_fail=True)
    for stage in world["b"].engine.stages.values():
        stage.segment.process = _fail  # type: ignore[method-assign]
    world.finish()
    assert isinstance(asked.error, ComputeFailed)


def _fail(*args: object) -> None:
    raise RuntimeError("out of memory")


def on_route_or_none(world: World) -> set[str]:
    route = world["a"].origin.route
    return set() if route is None else route.nodes


# ---- origins that go ----


def test_a_new_life_of_an_origin_frees_what_its_former_one_held_at_once() -> None:
    world = without_replicas(lease=1000.0)
    ask_some(world)
    world.run(0.05)
    world.restart("a")
    world.open_routes("a")
    assert {route.epoch for route in world["b"].engine.host.routes} == {world["a"].epoch}
    ask_some(world)
    world.finish()


def test_what_a_dead_origin_held_is_free_as_soon_as_its_death_is_known() -> None:
    world = without_replicas(lease=1000.0)
    ask_some(world)
    world.run(0.05)
    world.kill("a", noticed=0.5)
    world.run(0.7)
    assert not world["b"].engine.host.routes
    world.finish()


def test_what_a_silent_origin_held_is_free_when_its_lease_ends() -> None:
    world = without_replicas(lease=10.0)
    ask_some(world)
    world.run(0.05)
    world.faults = Faults(drop=1.0, hits=lambda sender, destination, message: sender == "a")
    world.run(5.0)
    assert world["b"].engine.host.routes, "not yet"
    world.run(8.0)
    assert not world["b"].engine.host.routes
    world.faults = Faults()
    world.finish()


def test_a_route_whose_opening_was_overtaken_by_its_closing_does_not_stay() -> None:
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 2),), blocks=48), Machine("c", ((2, 4),)), lease=1000.0)
    world.open_routes("a")
    world.watching = True
    world.restart("c")  # the origin gives its route up, and opens another
    world.run(1.0)
    world.open_routes("a")
    opened = [message for _, destination, message in world.seen if destination == "b" and isinstance(message, OpenRoute)]
    closed = [message for _, destination, message in world.seen if destination == "b" and isinstance(message, CloseRoute)]
    late = replace(opened[0], route=closed[0].route)
    world["b"].engine.deliver("a", late)
    world["b"].work()
    assert len(world["b"].engine.host.routes) == 2, "there is memory for both"
    world.run(0.1)
    assert len(world["b"].engine.host.routes) == 1
    world.finish()


# ---- leaving ----


def test_a_node_that_announces_to_leave_hands_over_to_its_replica() -> None:
    world = with_replicas()
    ask_some(world)
    world.run(0.03)
    leaving = on_route(world)[0]
    world.drain(leaving)
    world.run_until(lambda: not world[leaving].engine.host.routes, 5.0, "handing over")
    world.kill(leaving)
    world.finish()


def test_a_node_that_announces_to_leave_finishes_what_runs_if_nobody_else_can() -> None:
    world = without_replicas()
    asked = ask_some(world)
    world.run(0.03)
    world.drain("b")
    world.run_until(lambda: not world["b"].engine.host.routes, 30.0, "leaving")
    assert all(isinstance(one.final, JobDone) for one in asked)
    late = world.ask("a", PROMPT, may_fail=True)
    world.finish()
    assert isinstance(late.error, NotReady)


# ---- what is old changes nothing ----


@examples(
    few=5,
    many=30,
    replays=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.4)), min_size=5, max_size=40),
    seed=st.integers(0, 99),
)
def test_whatever_was_sent_once_changes_nothing_when_it_comes_again_later(replays: list[tuple[float, float]], seed: int) -> None:
    """Spans of older incarnations, attempts and routes, old notices, offers, pongs: any of them, at any time."""
    places = [
        Machine("a", ((0, 1),), ends=True, blocks=12),
        Machine("b", ((1, 3),), blocks=12),
        Machine("c", ((3, 4),), blocks=12),
    ]
    world = World(*places, seed=seed)
    world.open_routes("a")
    sent: list[tuple[str, str, bytes]] = []
    deliver = world.deliver

    def recording(sender: str, destination: str, data: bytes) -> None:
        sent.append((sender, destination, data))
        deliver(sender, destination, data)

    world.deliver = recording  # type: ignore[method-assign]
    for i in range(4):
        world.ask("a", PROMPT[i:], replace(GREEDY, max_tokens=12))
    world.run(0.02)
    for share, later in replays:
        world.run(later / 10)
        if sent:
            deliver(*sent[int(share * (len(sent) - 1))])
    world.finish()


@pytest.mark.parametrize("lost", ["b", "c"])
def test_answers_go_on_after_a_node_forgot_the_route(lost: str) -> None:
    world = without_replicas()
    ask_some(world)
    world.run(0.05)
    host = world[lost].engine.host
    for route in list(host.routes):
        host.close(route)
    world.finish()
