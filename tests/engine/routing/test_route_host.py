"""Routes that pass a node: who may hand over, in which order, how memory is leased, called back and freed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import Bounce, BounceReason, Lease, OpenRoute, Ping
from penstock.domain.route import Hop, Leg, RouteId, legs_of
from penstock.domain.span import NetworkJob, Notice, NoticeKind, PackedHidden, Span
from penstock.domain.topology import LayerRange
from penstock.engine.routing.host.arrivals import CREDITS, Arrivals
from penstock.engine.routing.host.leg_log import REORDER_TIMEOUT_S
from penstock.engine.routing.host.route_host import RECALL_TIMEOUT_S, RouteHost
from penstock.engine.routing.host.stage import Stage
from tests.clock import Clock
from tests.engine.fakes import FakeSegment

ROUTE = RouteId("a", 1, 0)


def job(number: int = 0, route: RouteId = ROUTE, **more: Any) -> NetworkJob:
    facts: dict[str, Any] = {"spans": [Span(0, 0, 0, 0, 0, 1, 1)], "step": ComputeStep.LAYER, "current_layer": 2}
    facts["hidden"] = PackedHidden("float32", 1, 1, b"\0\0\0\0")
    return NetworkJob(route, number, **(facts | more))


# ---- the order of arrivals ----


@given(numbers=st.lists(st.integers(0, CREDITS - 1), max_size=60), pauses=st.lists(st.floats(0, 0.05), max_size=60))
def test_everything_goes_on_once_and_in_order_except_for_what_was_waited_for_in_vain(
    numbers: list[int], pauses: list[float]
) -> None:
    arrivals, now, gone = Arrivals(), 0.0, list[int]()
    given_up = set[int]()

    def go(ready: list[NetworkJob]) -> None:
        for one in ready:
            later = [n for n in gone if n > one.number]
            assert not later or one.number in given_up
            gone.append(one.number)
        given_up.update(set(range(max(gone, default=0))) - set(gone))

    for place, number in enumerate(numbers):
        go(arrivals.take(job(number), now))
        now += pauses[place] if place < len(pauses) else 0.0
        go(arrivals.overdue(now))
    now += 2 * REORDER_TIMEOUT_S
    go(arrivals.overdue(now))
    assert sorted(gone) == sorted(set(numbers)), "each once"
    assert not arrivals.waiting


def test_one_that_is_late_is_waited_for() -> None:
    arrivals = Arrivals()
    assert arrivals.take(job(1), 0.0) == []
    assert arrivals.overdue(REORDER_TIMEOUT_S / 2) == []
    assert [one.number for one in arrivals.take(job(0), REORDER_TIMEOUT_S / 2)] == [0, 1]


def test_one_that_is_far_ahead_lets_those_go_that_were_held() -> None:
    arrivals = Arrivals()
    arrivals.take(job(2), 0.0)
    assert [one.number for one in arrivals.take(job(2 + 2 * CREDITS), 0.0)] == [2, 2 + 2 * CREDITS]
    assert arrivals.take(job(2 + 2 * CREDITS), 0.0) == [], "the order never goes back"
    assert [one.number for one in arrivals.take(job(3 + 2 * CREDITS), 0.0)] == [3 + 2 * CREDITS]


@given(numbers=st.lists(st.integers(0, 2**47), max_size=300))
def test_what_is_remembered_is_bounded_whatever_the_numbers(numbers: list[int]) -> None:
    arrivals = Arrivals()
    for number in numbers:
        arrivals.take(job(number), 0.0)
        assert len(arrivals._held) <= CREDITS
        assert len(arrivals._skipped) <= 4 * CREDITS


# ---- opening ----


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def host(clock: Clock) -> RouteHost:
    stages = {start: Stage(FakeSegment(start, start + 2, 16, 4), 4, "b") for start in (2, 4)}
    return RouteHost(stages, model="fake", shape="s1", width=1, block_size=4, clock=clock)


def ask(route: RouteId = ROUTE, *, layers: tuple[int, int] = (2, 6), **more: Any) -> OpenRoute:
    facts: dict[str, Any] = {"model": "fake", "shape": "s1", "width": 1, "block_size": 4, "blocks": 16, "prefix_cache": True}
    facts |= {"lease": 10.0, "legs": (Leg(LayerRange(*layers), route.origin, route.origin),)}
    return OpenRoute(route=route, **(facts | more))


@pytest.mark.parametrize(
    "wrong,why",
    [
        ({"model": "other"}, "a different one"),
        ({"shape": "s2"}, "a different one"),
        ({"width": 2}, "numbers"),
        ({"block_size": 8}, "scheduler.block_size"),
        ({"layers": (4, 8)}, "does not hold"),
        ({"layers": (0, 6)}, "does not hold"),
        ({"layers": (0, 2)}, "does not hold"),
        ({"layers": (3, 3)}, "does not hold"),
        ({"layers": (5, 3)}, "does not hold"),
        ({"legs": ()}, "does not hold"),
        ({"legs": (Leg(LayerRange(2, 3), "a", "c"), Leg(LayerRange(3, 4), "c", "a"))}, "only once"),
        ({"legs": (Leg(LayerRange(2, 6), "a", "a"), Leg(LayerRange(2, 6), "a", "a"))}, "only once"),
    ],
)
def test_what_does_not_fit_is_refused_for_good_with_a_reason(host: RouteHost, wrong: dict[str, Any], why: str) -> None:
    offer = host.open("a", ask(**wrong))
    assert offer.blocks == 0
    assert offer.retry_after == 0
    assert why in offer.reason
    assert not host.routes


@pytest.mark.parametrize(
    "layers,parts", [((2, 6), ["2:4", "4:6"]), ((3, 6), ["3:4", "4:6"]), ((2, 5), ["2:4", "4:5"]), ((3, 4), ["3:4"])]
)
def test_a_leg_may_begin_and_end_inside_a_stage(host: RouteHost, layers: tuple[int, int], parts: list[str]) -> None:
    assert host.open("a", ask(layers=layers)).blocks == 16
    found = host.routes[ROUTE].parts
    assert [str(part.layers) for part in found.values()] == parts
    assert [stage for stage in host._stages.values() if ROUTE in stage.leases] == [part.stage for part in found.values()]
    assert isinstance(host.arrive("a", job(current_layer=layers[0])), list)
    assert host.routes[ROUTE].successor(layers[1]) == "a"


def test_layers_with_a_gap_between_them_are_no_leg() -> None:
    stages = {start: Stage(FakeSegment(start, start + 2, 16, 4), 4, "b") for start in (0, 3)}
    gap = RouteHost(stages, model="fake", shape="s1", width=1, block_size=4)
    assert "does not hold" in gap.open("a", ask(layers=(1, 4))).reason
    legs = (Leg(LayerRange(1, 2), "a", "c"), Leg(LayerRange(3, 4), "c", "a"))
    assert gap.open("a", ask(legs=legs)).blocks == 16, "but two legs they are"


def test_nobody_opens_a_route_in_another_nodes_name(host: RouteHost) -> None:
    assert host.open("x", ask()).blocks == 0
    assert not host.routes


def test_a_question_that_comes_twice_gets_the_same_answer(host: RouteHost) -> None:
    assert host.open("a", ask()) == host.open("a", ask())
    assert len(host.routes) == 1


def test_a_later_life_of_an_origin_ends_the_routes_of_the_former_and_not_the_other_way_round(host: RouteHost) -> None:
    host.open("a", ask())
    assert host.open("a", ask(RouteId("a", 2, 0))).blocks == 16
    assert list(host.routes) == [RouteId("a", 2, 0)]
    assert host.open("a", ask(RouteId("a", 1, 1))).blocks == 0


def test_a_node_that_leaves_opens_no_routes(host: RouteHost) -> None:
    host.draining = True
    assert "leaving" in host.open("a", ask()).reason


# ---- handing over ----


@pytest.mark.parametrize(
    "sender,wrong",
    [
        ("x", {}),
        ("a", {"current_layer": 4}),
        ("a", {"current_layer": 0}),
        ("a", {"hidden": PackedHidden("float32", 1, 2, b"\0" * 8)}),
        ("a", {"hidden": PackedHidden("bfloat16", 1, 1, b"\0" * 2)}),
    ],
)
def test_spans_come_from_the_predecessor_at_the_leg_and_in_the_width_and_format_that_were_agreed(
    host: RouteHost, sender: str, wrong: dict[str, Any]
) -> None:
    host.open("a", ask())
    assert host.arrive(sender, job(**wrong)) == Bounce(ROUTE, 0, BounceReason.MALFORMED)
    assert isinstance(host.arrive("a", job()), list), "and nothing was spoiled"


def test_a_route_that_nobody_opened_is_unknown(host: RouteHost) -> None:
    assert host.arrive("a", job()) == Bounce(ROUTE, 0, BounceReason.UNKNOWN_ROUTE)
    assert host.answer("a", Ping(ROUTE, 1, 1)) == Bounce(ROUTE, -1, BounceReason.UNKNOWN_ROUTE)


def test_more_than_the_credits_is_a_flood(host: RouteHost) -> None:
    host.open("a", ask())
    assert all(host.arrive("a", job(number)) for number in range(CREDITS))
    assert host.arrive("a", job(CREDITS)) == Bounce(ROUTE, CREDITS, BounceReason.FLOOD)
    host.on_job_left(job(0), arrived=True)
    assert isinstance(host.arrive("a", job(CREDITS)), list)


def test_a_node_that_is_passed_twice_has_two_legs() -> None:
    hops = [Hop(LayerRange(0, 2), "b"), Hop(LayerRange(2, 3), "c"), Hop(LayerRange(3, 4), "b"), Hop(LayerRange(4, 6), "b")]
    legs = legs_of(hops, "a")
    assert legs["b"] == (Leg(LayerRange(0, 2), "a", "c"), Leg(LayerRange(3, 6), "c", "a"))
    assert legs["c"] == (Leg(LayerRange(2, 3), "b", "b"),)


# ---- memory ----


def resize(host: RouteHost, route: RouteId, blocks: int, number: int) -> None:
    for stage in host._stages.values():
        stage.leases[route].on_notices([Notice(number, NoticeKind.RESIZED, 0, 0, blocks=blocks)])


def test_the_first_gets_all_and_is_asked_for_the_half_when_a_second_comes(host: RouteHost, clock: Clock) -> None:
    other = RouteId("c", 1, 0)
    assert host.open("a", ask()).blocks == 16
    assert not host.recalls(), "nobody else needs it"
    refused = host.open("c", ask(other))
    assert refused.blocks == 0
    assert refused.retry_after > 0
    assert host.recalls() == [Lease(ROUTE, 0, 16, 8)]
    resize(host, ROUTE, 8, 0)
    assert host.open("c", ask(other)).blocks == 8
    assert not host.recalls()
    assert host.renew("a", Ping(ROUTE, 5, 16)) == Lease(ROUTE, 5, 8, 8)
    host.close(other)
    clock.now += 60.0
    host.recalls()
    assert host.renew("a", Ping(ROUTE, 6, 16)) == Lease(ROUTE, 6, 16, 16)


def test_an_origin_that_has_nothing_to_do_gives_back_what_another_needs(host: RouteHost) -> None:
    other = RouteId("c", 1, 0)
    host.open("a", ask())
    host.open("c", ask(other))
    host.recalls()
    resize(host, ROUTE, 8, 0)
    host.open("c", ask(other))
    host.renew("c", Ping(other, 5, 4))  # idle: it would like to have four
    assert host.renew("a", Ping(ROUTE, 5, 16)) == Lease(ROUTE, 5, 8, 12)
    assert host.recalls() == [Lease(other, 0, 8, 4)]
    resize(host, other, 4, 0)
    assert host.renew("a", Ping(ROUTE, 6, 16)) == Lease(ROUTE, 6, 12, 12)
    assert host.renew("c", Ping(other, 7, 8)) == Lease(other, 7, 4, 8)  # it has work again: the half is its right
    assert host.recalls() == [Lease(ROUTE, 0, 12, 8)]


def test_an_origin_keeps_its_place_while_it_tries_elsewhere(host: RouteHost, clock: Clock) -> None:
    """It got memory here and had to give it back, since another node had none: it is counted on to come again."""
    other = RouteId("c", 1, 0)
    host.open("a", ask())
    host.open("c", ask(other))
    resize(host, ROUTE, 8, 0)
    host.open("c", ask(other))
    host.close(other)
    assert host.renew("a", Ping(ROUTE, 5, 16)) == Lease(ROUTE, 5, 8, 8)
    clock.now += 2.5
    assert host.open("c", ask(RouteId("c", 1, 1))).blocks == 8


def test_an_origin_that_keeps_what_is_called_back_loses_its_route(host: RouteHost, clock: Clock) -> None:
    host.open("a", ask())
    until = clock.now + RECALL_TIMEOUT_S + 1.0
    while clock.now < until:
        host.renew("a", Ping(ROUTE, 1, 16))
        host.open("c", ask(RouteId("c", 1, 0)))
        host.recalls()
        clock.now += 0.25
    assert [route.origin for route in host.routes] == ["c"]


@pytest.mark.parametrize("blocks", [0, 1, 5, 16, 17, 2**47])
def test_an_origin_can_count_on_what_it_likes_and_has_no_more_than_its_lease(host: RouteHost, blocks: int) -> None:
    host.open("a", ask(blocks=10))
    host.open("c", ask(RouteId("c", 1, 0)))
    resize(host, ROUTE, blocks, 0)
    for stage in host._stages.values():
        assert stage.leases[ROUTE].granted <= 10
        assert stage.leases[RouteId("c", 1, 0)].granted == 6
    host.close(ROUTE)
    assert all(stage.unleased == 10 for stage in host._stages.values())


def test_a_lease_ends_after_its_time_of_silence(host: RouteHost, clock: Clock) -> None:
    host.open("a", ask())
    clock.now += 9.0
    host.renew("a", Ping(ROUTE, 1, 16))
    clock.now += 9.0
    assert host.expire() == []
    host.arrive("a", job())
    clock.now += 9.0
    assert host.expire() == []
    clock.now += 2.0
    assert host.expire() == [ROUTE]
    assert all(stage.unleased == 16 for stage in host._stages.values())


def test_only_the_origin_keeps_its_route_open(host: RouteHost, clock: Clock) -> None:
    host.open("a", ask())
    clock.now += 9.0
    assert isinstance(host.answer("x", Ping(ROUTE, 1, 16)), Bounce)
    assert host.renew("x", Ping(ROUTE, 1, 16)) is None
    assert isinstance(host.arrive("x", job()), Bounce)
    clock.now += 2.0
    assert host.expire() == [ROUTE]


def test_only_the_origin_makes_a_node_send_marks(host: RouteHost) -> None:
    host.open("a", ask())
    host.on_handed_over(job(3, current_layer=6))
    ping = Ping(ROUTE, 1, 4, -1)
    assert [mark.number for _, mark in host.marks("a", ping)] == [3]
    assert host.marks("x", ping) == []


def test_an_origin_that_sends_many_pings_makes_a_node_send_few_marks(host: RouteHost, clock: Clock) -> None:
    host.open("a", ask())
    host.on_handed_over(job(3, current_layer=6))
    sent = [mark for stamp in range(1000) for mark in host.marks("a", Ping(ROUTE, stamp, 4, -1))]
    assert len(sent) == 1
    clock.now += 0.5
    assert len(host.marks("a", Ping(ROUTE, 1000, 4, -1))) == 1, "an honest origin sends two a second"


def test_an_origin_whose_record_is_late_keeps_its_route(host: RouteHost) -> None:
    host.open("a", ask())
    host.close_dead_origins({"b": 1})
    assert host.routes
    host.close_dead_origins({"a": 1, "b": 1})
    host.close_dead_origins({"b": 1})
    assert not host.routes


def test_a_route_waits_until_its_nodes_know_each_other(host: RouteHost) -> None:
    request = replace(ask(), legs=tuple(leg._replace(successor="c") for leg in ask().legs))
    host.close_dead_origins({"b": 1})
    offer = host.open("a", request)
    assert (offer.blocks, offer.reason) == (0, "it has not met node c yet")
    assert offer.retry_after, "it is asked again soon, and not avoided"
    host.close_dead_origins({"b": 1, "c": 1})
    assert host.open("a", request).blocks


def test_memory_is_kept_for_an_origin_that_waits_until_it_is_gone(host: RouteHost, clock: Clock) -> None:
    alive = {"a": 1, "b": 1, "z": 1}
    host.close_dead_origins(alive)
    whole = host.open("a", ask()).blocks
    assert not host.open("b", replace(ask(), route=RouteId("b", 1, 0))).blocks
    clock.now += 10.0  # it tries other paths in the meantime
    host.recalls()
    lease = host.renew("a", Ping(ROUTE, 1, whole, -1))
    assert lease is not None
    assert lease.target == whole // 2
    host.close_dead_origins({"a": 1, "z": 1})
    lease = host.renew("a", Ping(ROUTE, 2, whole, -1))
    assert lease is not None
    assert lease.target == whole


def test_a_stale_lease_of_an_earlier_route_of_the_origin_goes_when_it_opens_another(host: RouteHost) -> None:
    host.open("a", ask())
    assert host.open("a", replace(ask(), route=RouteId("a", 1, 1))).blocks == 16
    assert list(host.routes) == [RouteId("a", 1, 1)]
