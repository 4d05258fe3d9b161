"""Which layers a node takes: each rule in examples, and over random networks what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.domain.topology import LayerRange
from penstock.placement.plan import Decision, DecisionKind, Member, decide, lacking, plan, superfluous, uncontested
from tests.pipes.network_of import pipe, segment
from tests.placement.placing_world import layers_of, size

MODEL, LAYERS = "smollm2-135m", 30


def ranges(text: str) -> tuple[LayerRange, ...]:
    return tuple(LayerRange.parse(part) for part in text.split(",") if part)


def member(node: str, held: str = "", room: int = 0, *, claims: str = "", pinned: str = "", max_pipes: int = 1) -> Member:
    """`member("a", "0:9", 21)`."""
    return Member(node=node, held=ranges(held), claims=ranges(claims), pinned=ranges(pinned), room=room, max_pipes=max_pipes)


def decided(node: str, *members: Member) -> Decision:
    return decide(node, members, LAYERS, MODEL)


def planned(*members: Member) -> dict[str, str]:
    """What each takes, of those that take something."""
    found = plan(members, LAYERS, MODEL)
    return {node: ",".join(map(str, decision.layers)) for node, decision in found.items() if decision.layers}


# ---- filling ----


def test_a_small_machine_and_a_large_one_share_the_model() -> None:
    assert planned(member("small", room=9), member("large", room=21)) == {"large": "0:21", "small": "21:30"}


def test_a_node_that_can_hold_everything_does() -> None:
    assert decided("a", member("a", room=100), member("b", room=9)) == Decision(
        DecisionKind.FILL, ranges("0:30"), "Layers 0:30 of smollm2-135m are missing, and all of them fit here."
    )


def test_a_hole_is_filled_as_far_as_there_is_room() -> None:
    found = decided("b", member("a", "0:9"), member("b", room=12))
    assert found.layers == ranges("9:21")
    assert found.why == "Layers 9:30 of smollm2-135m are missing. 12 of them fit here, so this node loads 9:21."


def test_three_nodes_make_three_parts_of_which_the_last_has_room_to_spare() -> None:
    trio = [member("a", room=10), member("b", room=10), member("c", room=12)]
    assert planned(*trio) == {"c": "0:12", "a": "12:22", "b": "22:30"}
    assert decided("b", *trio).why == "Layers 0:30 of smollm2-135m are missing. This node loads 22:30."


def test_the_smallest_node_that_can_take_a_whole_hole_does() -> None:
    assert planned(member("a", "0:20"), member("b", room=30), member("c", room=11)) == {"c": "20:30"}


def test_a_node_that_has_nothing_goes_before_one_that_has_something() -> None:
    assert planned(member("a", "0:20", 10), member("b", room=30)) == {"b": "20:30"}


def test_a_node_fills_several_holes_and_the_larger_one_is_not_cut_for_the_smaller() -> None:
    assert planned(member("a", "5:10"), member("b", room=25)) == {"b": "0:5,10:30"}
    assert planned(member("a", "5:10"), member("b", room=20), member("c", room=4), member("d", room=3)) == {
        "b": "10:30",
        "c": "0:4",
        "d": "4:5",
    }


def test_what_is_claimed_is_not_missing() -> None:
    assert planned(member("a", claims="0:20"), member("b", room=30)) == {"b": "20:30"}


def test_a_node_that_keeps_the_ends_at_home_gets_the_middle_from_another() -> None:
    assert planned(member("a", "0:2,28:30", pinned="0:2,28:30"), member("b", room=40)) == {"b": "2:28"}
    assert planned(member("a", "0:2,28:30", 26, pinned="0:2,28:30")) == {"a": "2:28"}


def test_ranges_that_overlap_lack_nothing() -> None:
    whole = [member("a", "0:10"), member("b", "5:30")]
    assert lacking(whole, LAYERS) == ()
    assert planned(*whole, member("c", room=10)) == {"c": "0:10"}
    assert planned(member("a", "2:10"), member("b", "5:28"), member("c", room=30)) == {"c": "0:2,28:30"}


def test_a_range_that_overlaps_others_makes_room_for_what_is_missing() -> None:
    members = [member("a", "0:20"), member("b", "10:25")]
    assert lacking(members, LAYERS) == ranges("20:30")
    assert superfluous("a", members, LAYERS) == ()
    assert superfluous("b", members, LAYERS) == ranges("10:25")


def test_ranges_that_pinned_ones_leave_no_room_for_are_not_built_upon() -> None:
    """With 0:20 in use, 24:30 would be missing for ever, and 20:24 be of no use."""
    members = [member("a", "0:20"), member("b", room=1), member("c", "15:24", pinned="15:24")]
    assert planned(*members) == {"b": "0:1"}
    assert superfluous("a", members, LAYERS) == ranges("0:20")


@pytest.mark.parametrize("layers", ["-1:30", "0:31", "10:10", "20:10"])
def test_a_range_that_the_model_cannot_have_counts_for_nothing(layers: str) -> None:
    evil = Member(node="evil", held=(LayerRange(*map(int, layers.split(":"))),), room=-5)
    assert lacking([evil], LAYERS) == ranges("0:30")
    assert planned(evil, member("a", room=30)) == {"a": "0:30"}


def test_who_takes_nothing_says_why() -> None:
    members = [member("a", "0:20"), member("b", room=10), member("c", room=5)]
    assert decided("c", *members).why == "Nothing to do. Layers 20:30 of smollm2-135m are missing, and b should load them."
    assert decided("a", member("a", "0:20")).why == (
        "Nothing to do. Layers 20:30 of smollm2-135m are missing, and no node has room for them."
    )
    assert decided("a", member("a", "0:30", 10)).why == "Nothing to do. The pipe is complete."
    assert decided("b", member("a", "0:30"), member("b", room=10)).why == (
        "Nothing to do. The pipe is complete, and this node has room for 10 layers, too few for any of its ranges."
    )


# ---- another pipe ----


def test_a_large_node_opens_another_pipe_where_that_is_allowed() -> None:
    found = decided("c", member("a", "0:9"), member("b", "9:30"), member("c", room=30, max_pipes=2))
    assert found == Decision(
        DecisionKind.PIPE,
        ranges("0:30"),
        "The pipe is complete, and max_pipes = 2 allows another: this node opens it with layers 0:30.",
    )


def test_no_more_pipes_are_opened_than_are_allowed() -> None:
    members = [member("a", "0:30"), *(member(node, room=30, max_pipes=3) for node in "bcd")]
    kinds = {node: found.kind for node, found in plan(members, LAYERS, MODEL).items()}
    assert kinds == {"a": DecisionKind.NOTHING, "b": DecisionKind.PIPE, "c": DecisionKind.PIPE, "d": DecisionKind.REPLICA}


def test_pipes_are_counted_by_their_ids() -> None:
    """By their ranges alone, a and c would be one pipe, and b and d would lack 10:15 for another."""
    held = {"a": ("0:15", "aaaa"), "b": ("0:10", "bbbb"), "c": ("10:30", "bbbb"), "d": ("15:30", "aaaa")}
    nameless = [member(node, layers) for node, (layers, _) in held.items()]
    named = [replace(one, pipes={one.held[0]: held[one.node][1]}) for one in nameless]
    newcomer = member("e", room=30, max_pipes=2)
    assert decided("e", *nameless, newcomer).kind is DecisionKind.PIPE
    assert decided("e", *named, newcomer).kind is DecisionKind.REPLICA
    assert planned(*named, replace(newcomer, max_pipes=3)) == {"e": "0:30"}


def test_smaller_nodes_open_a_pipe_together_and_cut_it_where_the_other_is_cut() -> None:
    first = [member("a", "0:15"), member("b", "15:30")]
    together = [member("c", room=20, max_pipes=2), member("d", room=20, max_pipes=2)]
    assert planned(*first, *together) == {"c": "0:15", "d": "15:30"}
    assert decided("c", *first, *together).why == (
        "The pipe is complete, and max_pipes = 2 allows another: this node loads layers 0:15 of it."
    )
    tight = [member("c", room=20, max_pipes=2), member("d", room=10, max_pipes=2)]
    assert planned(*first, *tight) == {"c": "0:20", "d": "20:30"}


def test_a_pipe_that_nobody_can_complete_is_not_begun() -> None:
    two_of_three = [member("b", room=10, max_pipes=2), member("c", room=10, max_pipes=2)]
    assert planned(member("a", "0:30"), *two_of_three) == {}
    assert planned(member("a", "0:30"), *two_of_three, member("d", room=10, max_pipes=2)) == {
        "b": "0:10",
        "c": "10:20",
        "d": "20:30",
    }


def test_a_replica_is_a_beginning_of_the_next_pipe() -> None:
    found = decided("d", member("a", "0:15"), member("b", "15:30"), member("c", "0:15"), member("d", room=20, max_pipes=2))
    assert (found.kind, found.layers) == (DecisionKind.PIPE, ranges("15:30"))


# ---- replicas ----


def test_a_replica_is_one_of_the_range_that_the_fewest_nodes_have() -> None:
    found = decided("d", member("a", "0:9"), member("b", "9:30"), member("c", "9:30"), member("d", room=21))
    assert found == Decision(
        DecisionKind.REPLICA, ranges("0:9"), "The pipe is complete. This node loads a copy of layers 0:9, which only a has."
    )


def test_copies_are_as_many_as_fit_the_larger_first_and_stay_apart() -> None:
    trio = [member("a", "0:9"), member("b", "9:20"), member("c", "20:30")]
    assert planned(*trio, member("d", room=25)) == {"d": "9:20,20:30"}
    assert planned(*trio, member("d", room=30)) == {"d": "0:9,9:20,20:30"}
    assert planned(*trio, member("d", room=8)) == {}


def test_several_newcomers_copy_different_ranges() -> None:
    assert planned(member("a", "0:15"), member("b", "15:30"), member("c", room=15), member("d", room=15)) == {
        "c": "0:15",
        "d": "15:30",
    }


def test_a_range_within_another_is_worth_a_copy_if_the_other_does_not_fit() -> None:
    assert planned(member("a", "0:30"), member("b", "0:14"), member("c", room=14)) == {"c": "0:14"}
    assert planned(member("a", "0:30"), member("b", "0:14"), member("c", room=30)) == {"c": "0:30"}


def test_a_node_that_has_something_stands_by_with_the_rest_of_its_room() -> None:
    assert planned(member("a", "0:9", 21), member("b", "9:30")) == {}


def test_a_node_whose_ranges_are_all_pinned_may_still_take_a_copy() -> None:
    ends = "0:2,28:30"
    assert planned(member("a", "0:30"), member("b", "2:28"), member("c", ends, 26, pinned=ends)) == {"c": "2:28"}


# ---- claims ----


def test_of_two_equal_claims_the_one_of_the_first_name_stands() -> None:
    both = [member("a", "", claims="0:15"), member("b", "", claims="0:15")]
    assert uncontested("a", both, LAYERS) == ranges("0:15")
    assert uncontested("b", both, LAYERS) == ()


def test_of_a_claim_that_overlaps_another_the_rest_stands() -> None:
    both = [member("a", claims="0:20"), member("b", claims="15:30")]
    assert uncontested("b", both, LAYERS) == ranges("20:30")


@pytest.mark.parametrize("name", ["a", "z"])
def test_what_others_hold_already_is_not_loaded_while_something_is_missing(name: str) -> None:
    assert uncontested(name, [member("m", "0:15"), member(name, claims="0:15")], LAYERS) == ()


def test_pinned_ranges_stand_whoever_claims_them() -> None:
    both = [member("a", claims="0:30"), member("b", claims="0:2", pinned="0:2")]
    assert uncontested("a", both, LAYERS) == ranges("2:30")


def test_claims_for_copies_and_other_pipes_stand_once_nothing_is_missing() -> None:
    first = [member("a", "0:15"), member("b", claims="15:30")]
    assert uncontested("c", [*first, member("c", claims="0:15,15:30")], LAYERS) == ranges("0:15,15:30")
    assert uncontested("0", [*first, member("0", claims="0:15")], LAYERS) == ranges("0:15")
    assert uncontested("c", [*first, member("c", claims="0:30")], LAYERS) == ()
    assert uncontested("c", [*first, member("c", claims="0:30", max_pipes=2)], LAYERS) == ranges("0:30")


def test_a_node_that_has_something_withdraws_a_filling_that_is_not_needed_any_more() -> None:
    assert uncontested("c", [member("a", "0:15"), member("b", "15:30"), member("c", "0:15", claims="15:30")], LAYERS) == ()


# ---- moving ----


def test_of_two_that_began_alike_the_last_one_moves() -> None:
    alike = [member("a", "0:15"), member("b", "0:15")]
    assert superfluous("a", alike, LAYERS) == ()
    assert superfluous("b", alike, LAYERS) == ranges("0:15")


def test_nobody_moves_while_another_has_room() -> None:
    assert superfluous("b", [member("a", "0:15"), member("b", "0:15"), member("c", room=15)], LAYERS) == ()


def test_nobody_moves_when_nothing_is_missing() -> None:
    assert superfluous("b", [member("a", "0:30"), member("b", "0:30")], LAYERS) == ()


def test_nobody_moves_when_it_would_not_be_enough() -> None:
    assert superfluous("b", [member("a", "0:15"), member("b", "0:10")], LAYERS) == ()


def test_a_replica_moves_into_the_place_of_a_node_that_is_gone() -> None:
    assert superfluous("c", [member("a", "0:15"), member("c", "0:15")], LAYERS) == ranges("0:15")


def test_pinned_ranges_do_not_move() -> None:
    alike = [member("a", "0:15"), member("b", "0:15", pinned="0:15")]
    assert superfluous("b", alike, LAYERS) == ()
    assert superfluous("a", alike, LAYERS) == ranges("0:15")


def test_a_node_that_loads_something_does_not_move() -> None:
    assert superfluous("b", [member("a", "0:15"), member("b", "0:15", claims="20:22")], LAYERS) == ()


# ---- over random networks ----

NODES = "abcdef"
some_ranges = st.lists(
    st.sets(st.integers(0, LAYERS), min_size=2, max_size=2).map(lambda ends: LayerRange(min(ends), max(ends))),
    max_size=2,
    unique=True,
).map(tuple)


def apart(*given: tuple[LayerRange, ...]) -> list[tuple[LayerRange, ...]]:
    """Without ranges that overlap an earlier one: a node holds each layer once."""
    seen: set[int] = set()
    found = []
    for group in given:
        kept = []
        for one in group:
            if seen.isdisjoint(one.layers()):
                seen |= set(one.layers())
                kept.append(one)
        found.append(tuple(kept))
    return found


def some_member(held: tuple[LayerRange, ...], claims: tuple[LayerRange, ...], pins: bool, room: int, max_pipes: int) -> Member:
    held, claims = apart(held, claims)
    return Member(node="", held=held, claims=claims, pinned=held if pins else (), room=room, max_pipes=max_pipes)


some_members = st.builds(
    some_member,
    some_ranges,
    st.one_of(st.just(()), some_ranges),
    st.booleans(),
    st.integers(0, 40),
    st.integers(1, 3),
)
newcomers = st.builds(
    lambda room, max_pipes: Member(node="", room=room, max_pipes=max_pipes), st.integers(0, 40), st.integers(1, 3)
)


def named(found: list[Member]) -> list[Member]:
    return [replace(one, node=node) for one, node in zip(found, NODES, strict=False)]


networks = st.lists(st.one_of(newcomers, newcomers, some_members), min_size=1, max_size=len(NODES)).map(named)


def after(members: list[Member]) -> list[Member]:
    """Everybody claims what it was told to."""
    found = plan(members, LAYERS, MODEL)
    return [replace(one, claims=(*one.claims, *found[one.node].layers)) for one in members]


def has_path(members: list[Member]) -> bool:
    return _chained({layers for one in members for layers in (*one.held, *one.claims)}, LayerRange(0, LAYERS))


def _chained(found: set[LayerRange], part: LayerRange) -> bool:
    """Whether ranges lead from the beginning of the part to its end: any part of a range will do."""
    reached = part.start
    for start, end in sorted(found):
        if start <= reached:
            reached = max(reached, end)
    return reached >= part.end


@given(networks)
def test_layers_are_lacking_just_when_no_path_leads_through(members: list[Member]) -> None:
    gaps = lacking(members, LAYERS)
    assert has_path(members) == (gaps == ())
    filled = [*members, Member(node="x", held=gaps)]
    assert has_path(filled)
    segments = {(one.node, layers) for one in filled for layers in (*one.held, *one.claims)}
    assert pipe(*(segment(node, str(layers)) for node, layers in sorted(segments))).is_complete()


@given(networks)
@example(named([Member(node="", claims=(LayerRange(1, 17),), room=1), Member(node="", held=(LayerRange(0, 16),))]))
def test_the_plan_completes_the_model_if_there_is_room_and_nobody_takes_more_than_fits(members: list[Member]) -> None:
    found = plan(members, LAYERS, MODEL)
    assert all(size(found[one.node].layers) <= one.room for one in members)
    gaps = lacking(members, LAYERS)
    room = sum(min(one.room, LAYERS) for one in members)
    assert has_path(after(members)) == (size(gaps) <= room)
    taken = [layers for decision in found.values() for layers in decision.layers]
    if gaps:
        assert size(tuple(taken)) == len(layers_of(tuple(taken))) == min(size(gaps), room)  # nothing twice, nothing left over
        assert layers_of(tuple(taken)) <= layers_of(gaps)


@given(networks)
def test_whatever_is_taken_when_nothing_is_lacking_is_of_use_at_once(members: list[Member]) -> None:
    """Each copy lies on a path, and so does each part of another pipe when all of them are there."""
    found = plan(members, LAYERS, MODEL)
    if not lacking(members, LAYERS):
        everything = {layers for one in after(members) for layers in (*one.held, *one.claims)}
        for node, decision in found.items():
            for layers in decision.layers:
                before, behind = LayerRange(0, layers.start), LayerRange(layers.end, LAYERS)
                assert all(_chained(everything, part) for part in (before, behind)), (node, layers)


@given(networks)
def test_only_newcomers_take_what_is_not_lacking(members: list[Member]) -> None:
    found = plan(members, LAYERS, MODEL)
    for one in members:
        if found[one.node].kind in (DecisionKind.PIPE, DecisionKind.REPLICA):
            assert one.is_fresh


@given(networks)
def test_nobody_takes_what_it_has(members: list[Member]) -> None:
    found = plan(members, LAYERS, MODEL)
    for one in members:
        assert layers_of(found[one.node].layers).isdisjoint(layers_of([*one.held, *one.claims]))


def test_a_second_pipe_uses_what_its_node_keeps_anyway() -> None:
    members = [member("b", "0:1", pinned="0:1", room=30, max_pipes=2), member("c", "1:30")]
    assert plan(members, LAYERS, MODEL)["b"].layers == (LayerRange(1, 30),)
    members = [member("a", "0:30"), member("b", "0:1", pinned="0:1", room=1, max_pipes=2), member("c", "1:30")]
    assert plan(members, LAYERS, MODEL)["b"].layers == ()


@given(st.data(), networks)
def test_the_order_of_the_records_changes_nothing(data: st.DataObject, members: list[Member]) -> None:
    shuffled = data.draw(st.permutations(members))
    assert plan(shuffled, LAYERS, MODEL) == plan(members, LAYERS, MODEL)
    for one in members:
        assert superfluous(one.node, shuffled, LAYERS) == superfluous(one.node, members, LAYERS)


@given(networks)
def test_with_equal_views_no_claim_of_the_plan_is_contested(members: list[Member]) -> None:
    """From here on nobody claims anything but by the plan."""
    members = [replace(one, claims=()) for one in members]
    claimed = [replace(one, room=one.room - size(one.claims)) for one in after(members)]
    for one in claimed:
        assert uncontested(one.node, claimed, LAYERS) == one.claims


@given(networks)
def test_what_moves_makes_room_enough_and_leaves_nothing_worse(members: list[Member]) -> None:
    moving = {one.node: superfluous(one.node, members, LAYERS) for one in members}
    if not any(moving.values()):
        return
    moved = [
        replace(
            one, held=tuple(found for found in one.held if found not in moving[one.node]), room=one.room + size(moving[one.node])
        )
        for one in members
    ]
    assert all(set(found).isdisjoint(one.pinned) for one, found in zip(members, moving.values(), strict=True))
    assert has_path(after(moved))
