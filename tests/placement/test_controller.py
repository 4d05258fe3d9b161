"""When a node acts on placement: single steps of the state machine, and whole networks of placers in simulated time."""

from __future__ import annotations

from itertools import combinations
from math import inf
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from penstock.placement.controller import (
    CLAIM_DELAY_S,
    FILL_TIMEOUT_S,
    GAP_DELAY_S,
    MAX_SETTLE_S,
    MIN_BACKOFF_S,
    SETTLE_S,
    Claim,
    Drop,
    Load,
    PlacementController,
    Wait,
    Withdraw,
)
from penstock.placement.plan import Member, lacking
from tests.placement.placing_world import Event, Machine, World, layers_of
from tests.placement.test_plan import MODEL, member, ranges

LAYERS = 30
A, B = ranges("0:15"), ranges("15:30")


def placer(node: str = "b") -> PlacementController:
    return PlacementController(node, MODEL, LAYERS)


def claimed(*others: Member, room: int = 15) -> PlacementController:
    """`b`, which came to `others` at 0 and has claimed something at SETTLE_S."""
    found = placer()
    found.next_act(0.0, [*others, member("b", room=room)])
    assert isinstance(found.next_act(SETTLE_S, [*others, member("b", room=room)]), Claim)
    return found


def loading(*others: Member) -> PlacementController:
    found = claimed(*others)
    me = Member(node="b", claims=found.claims)
    found.next_act(SETTLE_S, [*others, me])
    assert isinstance(found.next_act(SETTLE_S + CLAIM_DELAY_S, [*others, me]), Load)
    return found


# ---- step by step ----


def test_a_newcomer_looks_around_before_it_claims() -> None:
    found = placer()
    view = [member("a", "0:15"), member("b", room=15)]
    assert found.next_act(0.0, view) == Wait(SETTLE_S)
    assert found.claims == ()
    assert found.next_act(SETTLE_S, view) == Claim(B, "Layers 15:30 of smollm2-135m are missing, and all of them fit here.")
    assert found.claims == B


def test_a_change_makes_it_look_around_again_but_not_for_ever() -> None:
    found, now = placer(), 0.0
    while isinstance(act := found.next_act(now, [member("a", "0:15", room=0 if now % 1 else 1), member("b", room=15)]), Wait):
        assert act.until > now
        now += 0.5
    assert isinstance(act, Claim)
    assert now == MAX_SETTLE_S


def test_it_loads_what_it_claimed_when_its_record_has_been_seen_for_a_while() -> None:
    other = member("a", "0:15")
    found = claimed(other)
    assert found.next_act(5.0, [other, member("b", room=15)]) == Wait(inf)  # the record is not published yet
    mine = member("b", claims="15:30")
    assert found.next_act(6.0, [other, mine]) == Wait(6.0 + CLAIM_DELAY_S)
    assert found.next_act(6.0 + CLAIM_DELAY_S, [other, mine]) == Load(
        B, "Layers 15:30 of smollm2-135m are missing, and all of them fit here."
    )
    assert found.claims == B
    assert found.explain() == (
        "Layers 15:30 of smollm2-135m are missing, and all of them fit here. Layers 15:30 are being loaded."
    )


def test_it_withdraws_when_another_has_a_better_right_and_decides_anew() -> None:
    found = claimed(member("a", "0:10"))
    assert found.claims == ranges("10:25")
    rival = member("a", "0:10", claims="10:25")
    act = found.next_act(1.1, [rival, member("b", claims="10:25")])
    assert isinstance(act, Withdraw)
    assert act.why.endswith("Another node takes some of them.")
    assert found.claims == ()
    assert found.next_act(1.2, [rival, member("b", room=15)]) == Wait(1.2 + SETTLE_S)
    assert found.next_act(1.2 + SETTLE_S, [rival, member("b", room=15)]) == Claim(
        ranges("25:30"), "Layers 25:30 of smollm2-135m are missing, and all of them fit here."
    )


def test_it_goes_on_when_its_claim_has_become_a_copy_and_nothing_is_missing() -> None:
    found = claimed(member("a", "0:15"))
    view = [member("a", "0:15", claims="15:30"), member("b", claims="15:30")]
    found.next_act(1.1, view)
    act = found.next_act(1.1 + CLAIM_DELAY_S, view)
    assert isinstance(act, Load)


def test_it_goes_on_with_the_part_of_a_claim_that_nobody_else_wants() -> None:
    found = claimed(member("a", "0:15"))
    act = found.next_act(1.1, [member("a", "0:15", claims="15:20"), member("b", claims="15:30")])
    assert isinstance(act, Claim)
    assert (act.layers, found.claims) == (ranges("20:30"), ranges("20:30"))


def test_it_does_not_withdraw_for_a_name_that_comes_later() -> None:
    found = claimed(member("a", "0:15"))
    assert isinstance(found.next_act(1.1, [member("a", "0:15"), member("b", claims="15:30"), member("c", claims="15:30")]), Wait)


def test_it_does_one_thing_at_a_time() -> None:
    found = loading(member("a", "0:15"))
    assert found.next_act(50.0, [member("b", claims="15:30", room=40)]) == Wait(inf)
    found.loaded(B)
    assert found.claims == ()
    assert found.next_act(50.0, [member("b", claims="15:30", room=40)]) == Wait(inf)  # its record still says that it loads
    assert found.next_act(51.0, [member("b", "15:30", room=40)]) == Wait(50.0 + GAP_DELAY_S)


def test_a_node_that_has_something_gives_others_time_to_come_back() -> None:
    found = placer()
    both = [member("a", "0:15"), member("b", "15:30", room=15)]
    assert found.next_act(0.0, both) == Wait(inf)
    alone = both[1:]
    assert found.next_act(100.0, alone) == Wait(100.0 + GAP_DELAY_S)
    assert found.next_act(105.0, both) == Wait(inf)
    assert found.next_act(200.0, alone) == Wait(200.0 + GAP_DELAY_S)
    assert isinstance(found.next_act(200.0 + GAP_DELAY_S, alone), Claim)


def test_a_node_that_stands_by_with_nothing_is_quicker() -> None:
    found = placer()
    assert found.next_act(0.0, [member("a", "0:30"), member("b", room=20)]) == Wait(inf)
    view = [member("c", "0:15"), member("b", room=20)]
    assert found.next_act(100.0, view) == Wait(100.0 + SETTLE_S)


def test_pinned_ranges_do_not_make_a_newcomer_slow() -> None:
    ends = member("b", "0:2,28:30", room=26, pinned="0:2,28:30")
    found = placer()
    assert found.next_act(0.0, [ends]) == Wait(SETTLE_S)
    assert found.next_act(SETTLE_S, [ends]) == Claim(
        ranges("2:28"), "Layers 2:28 of smollm2-135m are missing, and all of them fit here."
    )


def test_pinned_ranges_that_are_still_being_loaded_are_not_its_business() -> None:
    found = placer()
    ends = member("b", claims="0:2,28:30", room=26, pinned="0:2,28:30")
    found.next_act(0.0, [ends])
    assert isinstance(found.next_act(SETTLE_S, [ends]), Claim)


def test_a_load_that_failed_is_not_tried_again_at_once_and_ever_more_seldom() -> None:
    found = loading(member("a", "0:15"))
    found.failed(10.0, B, "The disk is full.")
    view = [member("a", "0:15"), member("b", room=15)]
    assert (found.claims, found.is_backing_off(10.0)) == ((), True)
    assert found.explain().endswith("The last load failed: The disk is full. This node tries again in 60 seconds.")
    assert found.next_act(11.0, view) == Wait(10.0 + MIN_BACKOFF_S)
    assert not found.is_backing_off(10.0 + MIN_BACKOFF_S)
    assert isinstance(found.next_act(10.0 + MIN_BACKOFF_S, view), Claim)
    found.failed(100.0, B, "The disk is full.")
    assert found.next_act(101.0, view) == Wait(100.0 + 2 * MIN_BACKOFF_S)


def test_a_load_may_fail_in_part() -> None:
    found = claimed(member("a", "5:15"), room=20)
    mine = member("b", claims="0:5,15:30")
    found.next_act(1.0, [member("a", "5:15"), mine])
    assert isinstance(found.next_act(2.0, [member("a", "5:15"), mine]), Load)
    found.loaded(ranges("0:5"))
    assert found.claims == B
    found.failed(3.0, B, "The peer went away.")
    assert found.claims == ()
    assert found.next_act(4.0, [member("a", "5:15"), member("b", "0:5")]) == Wait(3.0 + MIN_BACKOFF_S)


def test_what_is_superfluous_is_dropped_after_a_while_and_once() -> None:
    found = placer()
    view = [member("a", "0:15"), member("b", "0:15")]
    assert found.next_act(0.0, view) == Wait(GAP_DELAY_S)
    act = found.next_act(GAP_DELAY_S, view)
    assert isinstance(act, Drop)
    assert act.layers == A
    assert found.next_act(GAP_DELAY_S, view) == Wait(inf)  # its owner is at it
    found.dropped(A)
    assert found.next_act(11.0, view) == Wait(inf)  # its record still has them
    moved = [member("a", "0:15"), member("b", room=15)]
    assert found.next_act(12.0, moved) == Wait(12.0 + SETTLE_S)
    assert found.next_act(12.0 + SETTLE_S, moved) == Claim(
        B, "Layers 15:30 of smollm2-135m are missing, and all of them fit here."
    )


def test_what_was_superfluous_for_a_moment_stays() -> None:
    found = placer()
    found.next_act(0.0, [member("a", "0:15"), member("b", "0:15")])
    assert found.next_act(9.0, [member("a", "0:15"), member("b", "0:15"), member("c", "15:30")]) == Wait(inf)
    assert found.next_act(11.0, [member("a", "0:15"), member("b", "0:15")]) == Wait(11.0 + GAP_DELAY_S)


def test_another_that_should_fill_a_hole_is_waited_for_but_not_for_ever() -> None:
    view = [member("a", room=15), member("b", room=20), member("c", "0:15")]
    found = placer()
    assert found.next_act(0.0, view) == Wait(FILL_TIMEOUT_S)
    act = found.next_act(FILL_TIMEOUT_S, view)
    assert isinstance(act, Claim)
    assert act.layers == B


# ---- whole networks ----


def test_a_pair_that_starts_at_the_same_instant_shares_the_model() -> None:
    world = World({"a": Machine(9), "b": Machine(40)}).run(20)
    assert world.held() == {"a": "", "b": "0:30"}
    world = World({"a": Machine(9), "b": Machine(21)}).run(20)
    assert world.held() == {"a": "21:30", "b": "0:21"}


def test_two_that_did_not_see_each_other_when_they_began_mend_it() -> None:
    world = World({"a": Machine(15), "b": Machine(15)}, links={frozenset("ab"): 8.0}).run(60)
    assert world.held() == {"a": "0:15", "b": "15:30"}
    assert [event.node for event in world.acts(Drop)] == ["b"]


def pinned_and_free() -> World:
    """`a` has 0:15 by its settings, `b` has taken 15:30 and has room for as many more. At 100 s `a` dies."""
    world = World({"a": Machine(15, pinned=A), "b": Machine(30)})
    world.dies("a", 100.0)
    assert world.run(99.0).held() == {"a": "0:15", "b": "15:30"}
    return world


def test_a_node_that_leaves_is_replaced_by_one_with_room_but_not_before_it_could_be_back() -> None:
    world = pinned_and_free().run(130.0)
    assert world.held() == {"b": "0:15,15:30"}
    (claim,) = (event for event in world.acts(Claim) if event.at > 100.0)
    assert claim.at == 100.0 + GAP_DELAY_S


def test_a_node_that_restarts_in_time_is_not_replaced() -> None:
    world = pinned_and_free()
    world.starts("a", 100.0 + GAP_DELAY_S - 1)
    assert world.run(200.0).held() == {"a": "0:15", "b": "15:30"}


def test_a_replica_takes_the_place_of_a_node_that_is_gone() -> None:
    world = World({"a": Machine(15), "b": Machine(15), "c": Machine(15)}).run(50)
    assert world.held() == {"a": "0:15", "b": "15:30", "c": "0:15"}
    world.dies("b", 60.0)
    assert world.run(100).held() == {"a": "0:15", "c": "15:30"}


def test_a_node_whose_loads_fail_is_replaced() -> None:
    world = World({"a": Machine(15), "b": Machine(15), "c": Machine(15)}, fails=lambda node: node == "b").run(50)
    assert world.held() == {"a": "0:15", "b": "", "c": "15:30"}
    assert len(world.acts(Load, "b")) == 1


def test_a_node_that_offers_room_and_never_acts_is_not_waited_for_for_ever() -> None:
    world = World({"a": Machine(30, listens=False), "b": Machine(30)}).run(40)
    assert world.held() == {"a": "", "b": "0:30"}


# ---- random networks ----

NAMES = "abcdef"
starts = st.one_of(st.just(0.0), st.floats(0, 5), st.floats(0, 60))
capacities = st.sampled_from([0, 3, 5, 10, 15, 20, 30, 40])
machines = st.builds(Machine, capacity=capacities, start=starts, max_pipes=st.integers(1, 3))
pins = st.sampled_from(["0:2,28:30", "0:15", "10:20", "14:26"]).map(ranges)
pinning = st.builds(
    lambda pinned, more: Machine(sum(found.size for found in pinned) + more, pinned=pinned), pins, st.sampled_from([0, 0, 10, 26])
)


def named(found: list[Machine]) -> dict[str, Machine]:
    return dict(zip(NAMES, found, strict=False))


some_machines = st.lists(machines, min_size=1, max_size=len(NAMES)).map(named)
seeds = st.integers(0, 2**32).map(Random)
QUIET = 800.0  # seconds of simulated time, after which nothing moves any more


def no_layer_twice_while_another_is_missing(world: World, event: Event) -> None:
    if isinstance(event.act, Load) and lacking(world.members(), LAYERS):
        others = [other for other in world.members() if other.node != event.node]
        held = {layer for other in others for layer in layers_of(other.held)}
        acts = [begun.act for begun in world.log if begun is not event]
        loading = {layer for act in acts if isinstance(act, Load) for layer in layers_of(act.layers)}
        assert layers_of(event.act.layers).isdisjoint(held | loading), event


@given(some_machines, seeds)
def test_with_records_in_time_nothing_is_loaded_twice_while_something_is_missing(
    found: dict[str, Machine], random: Random
) -> None:
    world = World(found, random=random, delay=0.4, load_time=(0.2, 30), watch=no_layer_twice_while_another_is_missing)
    world.run(QUIET)
    assert world.is_complete() == world.could_be_complete()
    assert world.acts(Drop) == []
    for node in found:
        assert len(world.acts(Load, node)) <= 2, node


@given(st.lists(st.one_of(machines, machines, pinning), min_size=1, max_size=len(NAMES)).map(named), st.data(), seeds)
def test_whatever_happens_the_model_is_complete_in_the_end_if_the_rooms_allow_it(
    found: dict[str, Machine], data: st.DataObject, random: Random
) -> None:
    pairs = [frozenset(pair) for pair in combinations(found, 2)]
    late = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    world = World(found, random=random, delay=0.4, load_time=(0.2, 30), links=dict.fromkeys(late, 8.0))
    times = st.tuples(st.sampled_from(sorted(found)), st.floats(0, 150), st.one_of(st.none(), st.floats(0.5, 30)))
    deaths = data.draw(st.lists(times, max_size=3))
    for node, at, away in deaths:
        world.dies(node, at)
        if away is not None:
            world.starts(node, at + away)
    world.run(QUIET)
    done = len(world.log)
    assert world.is_complete() == world.could_be_complete()
    for node in found:
        assert len(world.acts(Load, node)) <= 4 + 2 * len(deaths), node
        assert len(world.acts(Drop, node)) <= 2 + len(deaths), node
    assert len(world.run(2 * QUIET).log) == done, "somebody is never content"


def test_among_a_hundred_nodes_each_knows_its_part() -> None:
    view = [Member(node=f"n{number:02}", room=3) for number in range(100)]
    found = placer("n07")
    found.next_act(0.0, view)
    act = found.next_act(SETTLE_S, view)
    assert isinstance(act, Claim)
    assert act.layers == ranges("21:24")
