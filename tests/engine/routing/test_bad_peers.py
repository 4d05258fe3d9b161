"""Peers that lie, flood or send nonsense: they are refused and counted, and nobody else notices."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import Tensor

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import (
    Bounce,
    BounceReason,
    CloseRoute,
    Lease,
    LegReport,
    Mark,
    Message,
    OpenRoute,
    Ping,
    Pong,
    RouteOffer,
    StageProgress,
)
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Position, Span
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobFailed
from penstock.engine.sequences import worker_sequences
from penstock.model.batch import BatchPiece
from penstock.network.codec import encode
from penstock.network.rate_limit import RateLimit
from penstock.simulate.node import MODEL, SHAPE, Machine
from tests.engine.world import GREEDY, Asked, World
from tests.examples import examples

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
LONG = replace(GREEDY, max_tokens=18)
HUGE = 2**47
POISON = 2_000_003  # no model would say it: a token that only a prompt can hold


def with_a_stranger() -> World:
    """Two honest origins over two honest stages, and `x`, who is a member of the network and means no good."""
    world = World(
        Machine("a", (), ends=True),
        Machine("b", ((0, 2),)),
        Machine("c", ((2, 4),)),
        Machine("o", (), ends=True),
        Machine("x"),
        lease=5.0,
    )
    world.open_routes("a", "o")
    world.run(1.0)
    return world


def send(world: World, destination: str, message: Message, sender: str = "x") -> None:
    world.deliver(sender, destination, encode(message))


def route_of(world: World, name: str) -> RouteId:
    route = world[name].origin.route
    assert route is not None
    return route.id


def job(route: RouteId, number: int = 0, spans: Iterable[Span] = (), **more: Any) -> NetworkJob:
    spans = list(spans)
    step = more.get("step", ComputeStep.LAYER)
    rows = sum(span.rows if step is ComputeStep.HEAD else span.n for span in spans)
    width = more.pop("width", 1)
    hidden = PackedHidden("float32", rows, width, b"\0" * 4 * rows * width) if rows else None
    return NetworkJob(route, number, spans, **({"step": step, "hidden": hidden} | more))


def own_route(world: World, blocks: int = 100, number: int = 0, **more: Any) -> RouteId:
    """The stranger opens a route over `b`, as it may."""
    route = RouteId("x", world["x"].epoch, number)
    facts: dict[str, Any] = {"legs": (Leg(LayerRange(0, 2), "x", "x"),), "width": 1, "block_size": 4, "lease": 1e9} | more
    send(world, "b", OpenRoute(route=route, model=MODEL, shape=SHAPE, blocks=blocks, prefix_cache=True, **facts))
    world["b"].work()
    return route


def ask_both(world: World) -> list[Asked]:
    return [world.ask(name, PROMPT[i:], LONG) for i in range(3) for name in "ao"]


# ---- somebody who is not on the route ----


def test_nobody_speaks_for_another_origin() -> None:
    world = with_a_stranger()
    asked = ask_both(world)
    route = route_of(world, "a")
    for number in itertools.chain(*(_under_way(world) for _ in range(12)), [HUGE]):
        send(world, "b", job(route, number, [Span(0, 0, 0, 0, 0, 1, 1)]))
        send(world, "b", job(route, number, notices=[Notice(number, NoticeKind.FREED, 0, HUGE)]))
        send(world, "b", job(route, number, [Span(0, 0, 0, 0, 0, 1, 1)], width=3))
        send(world, "b", CloseRoute(route))
        send(world, "b", Ping(route, 1, 1))
        send(world, "a", job(route, number, [Span(0, 0, 0, 0, 0, 1, 1)], step=ComputeStep.HEAD, current_layer=4))
        send(world, "a", RouteOffer(route, 1, 1))
        send(world, "a", Lease(route, 0, 1, 1))
        send(world, "a", Pong(route, 1, 0.0, 0.0, 0, (LegReport(0, number, HUGE, (), (number,)),)))
        send(world, "a", Mark(route, 4, number))
        send(world, "b", Mark(route, 0, number))
        send(world, "a", StageProgress(route, 2, (Position(0, 0, 0, 1),)))
        for reason in BounceReason:
            send(world, "a", Bounce(route, number, reason))
        world["b"].work()
    world.all_answered(asked)
    assert world["b"].engine.stats.refused["malformed"] > 20
    stats = world["a"].engine.stats
    assert (stats.lost_jobs, stats.last_break) == (0, ""), "the origin was not even told"
    world.finish()


def _under_way(world: World) -> Iterator[int]:
    """The numbers of what is in flight in a moment, and of what comes next."""
    world.run_until(lambda: bool(world["a"].origin.in_flight))
    newest = max(world["a"].origin.in_flight)
    return iter([newest, newest + 1])


def test_a_damaged_message_in_another_name_costs_its_owner_nothing() -> None:
    world = with_a_stranger()
    asked = ask_both(world)
    for number in itertools.chain(*(_under_way(world) for _ in range(15))):
        data = bytearray(encode(job(route_of(world, "a"), number, [Span(0, 0, 0, 0, 0, 1, 1)])))
        data[-1] ^= 1
        world.deliver("x", "b", bytes(data))
        world.run(0.001)
    world.all_answered(asked)
    assert world["a"].engine.stats.lost_jobs == 0
    assert world["b"].engine.stats.refused["damaged_message"] == 30


def test_routes_of_made_up_nodes_reach_nobody() -> None:
    world = with_a_stranger()
    asked = ask_both(world)
    for number in range(200):
        send(world, "b", job(RouteId(f"nobody{number}", 1, 0), number))
    world.all_answered(asked)
    assert world["b"].engine.stats.refused["unknown_route"] == 200


# ---- an origin that means no good ----


@pytest.mark.parametrize(
    "wrong",
    [
        {"width": 2},
        {"block_size": 1},
        {"legs": (Leg(LayerRange(0, 3), "x", "x"),)},
        {"legs": (Leg(LayerRange(0, 1), "x", "x"), Leg(LayerRange(1, 2), "x", "x"))},
    ],
    ids=str,
)
def test_a_route_that_does_not_fit_is_not_opened(wrong: dict[str, Any]) -> None:
    world = with_a_stranger()
    world.watching = True
    route = own_route(world, **wrong)
    (offer,) = [message for _, _, message in world.seen if isinstance(message, RouteOffer) and message.route == route]
    assert (offer.blocks, offer.retry_after) == (0, 0.0), "nor later"
    world.all_answered(ask_both(world))


absurd = st.builds(
    Span,
    st.sampled_from([0, 1, 2, HUGE]),
    st.sampled_from([0, 1, HUGE]),
    st.sampled_from([0, 1, HUGE]),
    st.sampled_from([0, 3, HUGE]),
    st.sampled_from([0, 1, 3, 4, HUGE]),
    st.integers(1, 60),
    st.sampled_from([0, 1]),
    st.lists(st.sampled_from([b"k" * 16, b"l" * 16]), max_size=3).map(tuple),
)
notices = st.builds(
    Notice,
    st.sampled_from([0, 1, 2, HUGE]),
    st.sampled_from(list(NoticeKind)),
    st.sampled_from([0, 1, HUGE]),
    st.sampled_from([0, 1, HUGE]),
    st.sampled_from([0, 1, HUGE]),
    st.lists(st.sampled_from([b"k" * 16, b"l" * 16]), max_size=3).map(tuple),
    st.sampled_from([0, 1, 5, HUGE]),
)
numbers = st.sampled_from([0, 1, 2, 3, 40, 41, 100, HUGE])
blocks = st.sampled_from([0, 1, 3, HUGE])


@examples(
    few=10,
    many=40,
    jobs=st.lists(
        st.tuples(numbers, st.lists(absurd, max_size=4), st.lists(notices, max_size=3), st.sampled_from([0, 2, 4])), max_size=20
    ),
)
def test_whatever_an_origin_sends_on_its_own_route_others_get_right_answers_and_keep_their_memory(
    jobs: list[tuple[int, list[Span], list[Notice], int]],
) -> None:
    world = World(
        Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),)), Machine("x"), seed=len(jobs), lease=5.0
    )
    world.open_routes("a")
    send(world, "b", Ping(RouteId("x", 1, 0), 1, 1))
    for _ in range(100):  # it gets its share, as everybody does
        route = own_route(world)
        if route in world["b"].engine.host.routes:
            break
        world.run(0.1)
    asked = [world.ask("a", PROMPT[i:]) for i in range(2)]
    for number, spans, news, layer in jobs:
        send(world, "b", job(route, number, spans, notices=news, current_layer=layer))
        world.run(0.002)
    world.all_answered(asked)
    assert world["a"].engine.stats.lost_jobs == 0


messages = st.one_of(
    st.builds(RouteOffer, st.just(0), blocks, blocks, st.just("why"), st.sampled_from([0.0, 1e9])),
    st.builds(Lease, st.just(0), st.sampled_from([0, 1, 2**61]), blocks, blocks),
    st.builds(
        Pong,
        st.just(0),
        st.sampled_from([0, 1, 2**61]),
        st.sampled_from([0.0, 1e9]),
        st.sampled_from([0.0, 1e9]),
        blocks,
        st.lists(st.builds(LegReport, st.integers(0, 5), numbers, blocks, st.tuples(numbers), st.tuples(numbers))).map(tuple),
    ),
    st.builds(Mark, st.just(0), st.integers(0, 5), numbers),
    st.builds(
        lambda layer, place: StageProgress(RouteId("x", 0, 0), layer, (place,)),
        st.integers(1, 5),
        st.builds(Position, *[st.sampled_from([0, 1, HUGE])] * 3, st.sampled_from([1, 5, HUGE])),
    ),
    st.builds(Ping, st.just(0), st.sampled_from([0, 2**61]), blocks),
    st.builds(Bounce, st.just(0), st.sampled_from([-1, 0, 1, HUGE]), st.sampled_from(list(BounceReason))),
    st.builds(CloseRoute, st.just(0)),
    st.builds(
        lambda number, spans, news, step, layer: job(
            RouteId("x", 0, 0), number, spans, notices=news, step=step, current_layer=layer
        ),
        numbers,
        st.lists(absurd, max_size=3),
        st.lists(notices, max_size=2),
        st.sampled_from([ComputeStep.LAYER, ComputeStep.HEAD]),
        st.integers(0, 5),
    ),
)


@examples(
    few=5,
    many=20,
    script=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["a", "o", "x", "none"]), messages), min_size=1, max_size=30
    ),
)
def test_nothing_that_a_stranger_says_ends_an_engine_or_an_answer(script: list[tuple[str, str, Any]]) -> None:
    world = with_a_stranger()
    asked = ask_both(world)
    routes = {"a": route_of(world, "a"), "o": route_of(world, "o"), "x": RouteId("x", 0, 0), "none": RouteId("none", 0, 0)}
    for destination, whose, message in script:
        send(world, destination, _about(message, routes[whose]))
        world.run(0.005)
    world.all_answered(asked)
    assert world["a"].engine.stats.lost_jobs == 0


def _about(message: Any, route: RouteId) -> Message:
    if isinstance(message, NetworkJob):
        return NetworkJob(
            route,
            message.number,
            message.spans,
            message.notices,
            step=message.step,
            current_layer=message.current_layer,
            hidden=message.hidden,
        )
    return replace(message, route=route)  # type: ignore[no-any-return]


def test_what_an_origin_can_make_a_stage_remember_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_sequences, "MAX_REPLICAS", 500)
    world = with_a_stranger()
    stage = world["b"].engine.stages[0]
    for _ in range(100):
        route = own_route(world)
        if route in stage.leases:
            break
        world.run(0.1)
    for number in range(3):
        spans = [Span(number * 400 + i, 0, 0, 0, 5, 1, 0) for i in range(400)]
        send(world, "b", job(route, number, spans))
        world.run(0.01)
    assert len(stage.leases[route].replicas) <= 500
    assert stage.leases[route].pool.held == 0
    world.all_answered(ask_both(world))


# ---- floods ----


def test_ten_thousand_messages_are_refused_counted_and_hardly_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = with_a_stranger()
    asked = ask_both(world)
    with caplog.at_level(logging.WARNING, logger="penstock.engine"):
        for number in range(10_000):
            world.deliver("x", "b", b"nonsense" * (number % 7))
    assert world["b"].engine.stats.refused["malformed_message"] == 10_000
    assert len(caplog.records) == 1
    world.all_answered(asked)
    caplog.clear()
    world.run(11.0)
    with caplog.at_level(logging.WARNING, logger="penstock.engine"):
        world.deliver("x", "b", b"nonsense")
    assert "10001 so far" in caplog.text


def test_a_flood_on_an_open_route_is_bounced_and_holds_up_nobody() -> None:
    world = with_a_stranger()
    for _ in range(100):
        route = own_route(world)
        if route in world["b"].engine.host.routes:
            break
        world.run(0.1)
    asked = ask_both(world)
    for number in range(10_000):
        send(world, "b", job(route, number))
    world.all_answered(asked)
    assert world["b"].engine.stats.refused["flood"] > 9000


def test_a_member_that_sends_more_than_anyone_must_holds_up_nobody() -> None:
    world = with_a_stranger()
    receiver, asked = world["b"].receiver, ask_both(world)
    receiver._control = RateLimit(100, 200, world["b"].clock)
    route = RouteId("x", 1, 0)
    for number in range(1000):
        world.deliver("x", "b", encode(Ping(route, number, 1, -1)))
    assert world["b"].engine.stats.refused["rate_limit"] == 800
    world.all_answered(asked)
    before = dict(world["b"].engine.stats.refused)
    world.run(5.0)
    for number in range(200):
        world.deliver("x", "b", encode(Ping(route, number, 1, -1)))
    assert world["b"].engine.stats.refused["rate_limit"] == before["rate_limit"], "it may send again after a while"


@pytest.mark.parametrize("gap", [False, True])
def test_hidden_states_count_as_pending_until_a_pass_takes_them(monkeypatch: pytest.MonkeyPatch, gap: bool) -> None:
    world = World(Machine("a", (), ends=True), Machine("s", ((0, 4),)))
    world.open_routes("a")
    route, engine = route_of(world, "a"), world["s"].engine
    monkeypatch.setattr("penstock.engine.inbox.MAX_PENDING_BYTES", 8 * 4096)
    for number in range(2 if gap else 1, 31):
        engine.deliver("a", job(route, number, [Span(number, 0, 0, 0, 0, 1024, 0)]))
        engine.take_commands(wait=False)
    if engine.host.reordering is not gap:
        pytest.fail("they should wait for the missing one, if there is one")
    assert engine.stats.refused.get("backlog", 0) == (29 if gap else 30) - 6, "three quarters are for one sender"


def test_a_pass_that_fails_because_of_one_origin_fails_for_nobody_else() -> None:
    """What one sends breaks every pass that it is in; a job of the node itself, which is run together with it, goes on."""
    world = World(Machine("a", ((0, 4),), ends=True), Machine("b", (), ends=True))
    world.open_routes("a", "b")
    world.run(1.0)
    engine = world["a"].engine
    (stage,) = engine.stages.values()
    process, deliver, fused, own = stage.segment.process, engine.deliver, list[int](), list[Asked]()

    def picky(hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        if POISON + 7.0 in hidden[:, 0].tolist():  # as the fake embedding has it
            fused.append(len(pieces))
            raise RuntimeError("out of memory")
        return process(hidden, pieces, layers)

    def at_the_same_moment(sender: str, message: Message, size: int = 0) -> None:
        deliver(sender, message, size)
        if isinstance(message, NetworkJob) and message.spans and not own:
            own.append(world.ask("a", PROMPT[:7], GREEDY))

    stage.segment.process = picky  # type: ignore[method-assign]
    engine.deliver = at_the_same_moment  # type: ignore[method-assign]
    bad = world.ask("b", [5, 6, POISON], GREEDY, may_fail=True)
    world.finish(200.0)
    assert isinstance(bad.final, JobFailed)
    assert max(fused) > 1, "they were in one pass"
    assert not isinstance(own[0].final, JobFailed)
