"""The logical pipe: what is missing, and which path is taken; against brute force over all paths of small pipes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.meta_model import Link, MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import LayerRange, PrivateLayers
from penstock.pipes.meta_pipe import MetaPipe, precisions_differ, weights_differ
from penstock.pipes.path import FAILED_PENALTY_S, FULL_PENALTY_S, MAX_LOAD, Path
from tests.pipes.network_of import pipe, segment

# ---- what is there ----


def ranges(*texts: str) -> list[LayerRange]:
    return [LayerRange.parse(text) for text in texts]


def taken(found: Path | None) -> str:
    assert found is not None
    return " ".join(f"{hop.node}{hop.layers}" for hop in found.hops)


def why(found: Path | None) -> str:
    assert found is not None
    return found.why


def test_a_pipe_whose_segments_follow_each_other_is_complete() -> None:
    whole = pipe(segment("a", "0:10"), segment("b", "10:30"))
    assert whole.is_complete()
    assert (whole.missing(), whole.bridge(), whole.explain()) == ([], None, "")


def test_a_pipe_without_segments_misses_everything() -> None:
    assert pipe().missing() == ranges("0:30")
    assert pipe().path("a") is None
    assert pipe().explain() == "Layers 0:30 of smollm2-135m are missing."


def test_missing_layers_are_named() -> None:
    holed = pipe(segment("a", "2:5"), segment("b", "4:12"), segment("c", "14:28"))
    assert holed.missing() == ranges("0:2", "12:14", "28:30")
    assert holed.explain() == "Layers 0:2, 12:14 and 28:30 of smollm2-135m are missing."
    assert not holed.is_complete()


def test_layers_that_only_a_draining_segment_holds_are_missing() -> None:
    leaving = pipe(segment("a", "0:10"), segment("b", "10:30", draining=True))
    assert leaving.missing() == ranges("10:30")
    assert leaving.path("a") is None
    assert leaving.bridge() == LayerRange(10, 30)


def test_ranges_that_overlap_make_a_pipe() -> None:
    whole = pipe(segment("a", "0:10"), segment("b", "5:30"))
    assert whole.is_complete()
    assert (whole.missing(), whole.bridge(), whole.explain()) == ([], None, "")


def test_a_path_never_mixes_weights_that_were_rounded_with_others() -> None:
    mixed = pipe(segment("a", "0:10", dtype="int8"), segment("b", "10:30", dtype="q4_1"))
    assert (mixed.is_complete(), mixed.path("a"), mixed.missing()) == (False, None, [])
    assert mixed.explain() == (
        "No route has all layers of smollm2-135m in one precision. Precisions differ: as published at b and int8 at a. "
        "A route takes one of them; set the same quant on all nodes to use all."
    )
    others = [segment(node, "10:30", dtype=dtype) for node, dtype in (("c", "int4"), ("e", "fp8"))]
    both = pipe(*mixed.segments, *others, segment("d", "10:30", dtype="int8", seconds=9.0))
    assert taken(both.path("a")) == "a0:10 d10:30"
    assert both.is_complete()
    assert "fp8 at e, int4 at c" in precisions_differ(both.segments)


def test_weights_as_published_go_together_in_any_number_format() -> None:
    whole = pipe(
        segment("a", "0:10", dtype="q4_1"), segment("b", "10:20", dtype="bfloat16"), segment("c", "20:30", dtype="float32")
    )
    assert taken(whole.path("a")) == "a0:10 b10:20 c20:30"
    assert precisions_differ(whole.segments) == ""


def test_a_bridge_reaches_from_the_first_hole_to_the_last() -> None:
    assert pipe(segment("a", "0:10"), segment("c", "20:30")).bridge() == LayerRange(10, 20)
    assert pipe(segment("a", "5:10"), segment("c", "20:28")).bridge() == LayerRange(0, 30)


def test_private_layers_are_missing_unless_the_owner_has_them() -> None:
    def seen(*segments: MetaModel) -> MetaPipe:
        return pipe(*segments).without("a", private=PrivateLayers(2, 3), weights=None)

    others = [segment("b", "0:30"), segment("c", "10:29")]
    lacking = seen(*others)
    assert lacking.missing() == ranges("0:2", "27:30")
    assert lacking.explain() == "Layers 0:2 and 27:30 of smollm2-135m are missing."
    assert lacking.path("a") is None
    whole = seen(*others, segment("a", "0:2"), segment("a", "27:30"))
    assert whole.is_complete()
    assert whole.explain() == ""
    assert taken(whole.path("a")) == "a0:2 b2:27 a27:30"
    assert taken(whole.sharing(16).path("a")) == "a0:2 b2:27 a27:30"


def test_where_all_layers_are_private_nobody_else_is_of_use() -> None:
    seen = pipe(segment("a", "0:20"), segment("b", "0:30")).without("a", private=PrivateLayers(20, 20), weights=None)
    assert seen.missing() == ranges("20:30")


def test_segments_of_different_block_sizes_do_not_make_a_path() -> None:
    mixed = pipe(segment("a", "0:10"), segment("b", "10:30", block_size=32))
    assert not mixed.is_complete()
    assert mixed.path("a") is None
    assert mixed.explain() == (
        "The segments of smollm2-135m cannot work together because their KV block sizes differ: 16 at a and 32 at b."
    )


def test_the_path_has_the_block_size_of_the_origin() -> None:
    quick = segment("b", "0:30", block_size=32, seconds=0.001)
    both = pipe(quick, segment("c", "0:30"))
    assert taken(both.path("a")) == "b0:30"
    assert taken(both.path("a", block_size=16)) == "c0:30"
    assert both.path("a", block_size=64) is None
    assert both.sharing(16).segments == (segment("c", "0:30"),)


def test_the_same_layers_twice_on_a_node_are_one_path() -> None:
    for second in (segment("b", "0:30", process="2"), segment("b", "0:30", block_size=32)):
        assert why(pipe(segment("b", "0:30"), second).path("a")) == "It is the only one."


@pytest.mark.parametrize("layers", ["-1:30", "0:31", "10:10", "20:10"])
def test_a_range_that_the_model_cannot_have_counts_for_nothing(layers: str) -> None:
    assert pipe(segment("evil", layers)).missing() == ranges("0:30")


def test_a_model_with_absurdly_many_layers_costs_no_time() -> None:
    assert pipe(segment("evil", "0:10"), num_layers=10**15).missing() == [LayerRange(10, 10**15)]


# ---- which path ----


def test_the_only_path_is_taken_and_says_so() -> None:
    found = pipe(segment("a", "0:10"), segment("b", "10:30")).path("a", round_trips={"b": 0.004})
    assert found == Path((Hop(LayerRange(0, 10), "a"), Hop(LayerRange(10, 30), "b")), 0.034, "It is the only one.", kv_blocks=100)


def test_a_path_has_the_kv_memory_of_its_smallest_segment() -> None:
    whole = pipe(segment("a", "0:10", kv_blocks=90), segment("b", "5:30", kv_blocks=70), segment("c", "0:10", kv_blocks=5))
    found = whole.path("a")
    assert taken(found) == "a0:10 b10:30"
    assert found is not None
    assert found.kv_blocks == 70


def test_going_home_counts() -> None:
    found = pipe(segment("b", "0:30")).path("a", round_trips={"b": 0.010})
    assert found is not None
    assert found.seconds == pytest.approx(0.040)
    own = pipe(segment("a", "0:30")).path("a")
    assert own is not None
    assert own.seconds == pytest.approx(0.030)


def test_the_quickest_path_is_taken_and_compared_with_the_next() -> None:
    found = pipe(segment("a", "0:10"), segment("b", "10:30"), segment("c", "10:30", seconds=0.030)).path("a")
    assert taken(found) == "a0:10 b10:30"
    assert why(found) == "It is the fastest with 31.0 ms per token; a 0:10 → c 10:30 → a would take 41.0 ms."


def test_a_busy_node_counts_as_slower() -> None:
    busy = pipe(segment("a", "0:10"), segment("b", "10:30", load=0.5), segment("c", "10:30", seconds=0.030))
    assert taken(busy.path("a")) == "a0:10 c10:30"


def test_a_far_node_counts_as_slower() -> None:
    replicas = pipe(segment("a", "0:10"), segment("b", "10:30"), segment("c", "10:30", seconds=0.021))
    assert taken(replicas.path("a", round_trips={"b": 0.1, "c": 0.001})) == "a0:10 c10:30"


def test_a_segment_that_was_never_used_is_expected_to_be_like_the_others() -> None:
    new = pipe(segment("a", "0:10", seconds=0.020), segment("b", "10:30", seconds=0.0)).path("a", round_trips={"b": 0.0})
    assert new is not None
    assert new.seconds == pytest.approx(0.060)


def test_a_node_that_failed_lately_is_the_last_choice_but_is_one() -> None:
    replicas = pipe(segment("a", "0:10"), segment("b", "10:30"), segment("c", "10:30", seconds=3.0))
    found = replicas.path("a", avoid={"b"})
    assert taken(found) == "a0:10 c10:30"
    assert why(found) == "It was chosen over a 0:10 → b 10:30 → a because b failed recently."
    alone = pipe(segment("a", "0:10"), segment("b", "10:30")).path("a", avoid=["b"])
    assert taken(alone) == "a0:10 b10:30"
    assert why(alone) == "It is the only one, although b failed recently."
    assert alone is not None
    assert alone.seconds < 1  # what is added for trouble is no time that it takes


def test_a_segment_without_free_memory_is_a_bad_choice_except_at_home() -> None:
    full = segment("b", "10:30", kv_free=0, seconds=0.001)
    found = pipe(segment("a", "0:10"), full, segment("c", "10:30")).path("a")
    assert taken(found) == "a0:10 c10:30"
    assert why(found) == "It was chosen over a 0:10 → b 10:30 → a because all KV memory of b is leased."
    at_home = pipe(segment("a", "0:10"), full, segment("c", "10:30")).path("b")
    assert taken(at_home) == "a0:10 b10:30"


def test_of_two_equal_paths_the_one_with_more_at_home_is_taken() -> None:
    near = {"b": 0.0, "c": 0.0}
    found = pipe(segment("c", "0:30"), segment("a", "0:30")).path("c", round_trips={"a": 0.0})
    assert taken(found) == "c0:30"
    assert why(found) == "It is the only one that keeps the first and the last layers that c has there."
    found = pipe(segment("b", "0:10"), segment("b", "10:30"), segment("c", "0:30")).path("a", round_trips=near)
    assert taken(found) == "c0:30"
    assert why(found) == "It is as fast as b 0:10 → b 10:30 → a and has fewer hops."
    found = pipe(segment("c", "0:30"), segment("b", "0:30")).path("a", round_trips=near)
    assert taken(found) == "b0:30"
    assert why(found) == "It is as fast as c 0:30 → a and comes first by name."


def test_a_node_may_be_visited_twice() -> None:
    found = pipe(segment("a", "0:2"), segment("b", "2:28"), segment("a", "28:30")).path("a")
    assert taken(found) == "a0:2 b2:28 a28:30"


@pytest.mark.parametrize("facts", [{"seconds": inf}, {"seconds": nan}, {"load": nan}, {"load": inf}, {"seconds": -1, "load": -9}])
def test_what_a_peer_says_of_itself_cannot_break_the_choice(facts: dict[str, float]) -> None:
    assert taken(pipe(segment("evil", "10:30", **facts), segment("a", "0:10")).path("a")) == "a0:10 evil10:30"


def test_a_hundred_nodes_are_no_work() -> None:
    many = [segment(f"n{node}", f"{start}:{start + 5}") for node in range(100) for start in range(0, 30, 5)]
    found = pipe(*many).path("n7")
    assert taken(found) == " ".join(f"n7{start}:{start + 5}" for start in range(0, 30, 5))


def test_an_origin_keeps_the_first_and_last_layers_that_it_has_however_slow_it_is() -> None:
    found = pipe(
        segment("a", "0:2", seconds=0.5),
        segment("a", "28:30", seconds=0.5),
        segment("b", "2:28", seconds=0.01),
        segment("b", "0:2", seconds=0.001),
        segment("b", "28:30", seconds=0.001),
    ).path("a")
    assert taken(found) == "a0:2 b2:28 a28:30"


# ---- parts of segments ----

NEAR = {"b": 0.0, "c": 0.0, "d": 0.0}


def test_a_segment_is_left_where_a_quicker_one_begins() -> None:
    slow, quick = segment("b", "0:20", seconds=0.2), segment("c", "10:30")
    found = pipe(slow, quick).path("a")
    assert taken(found) == "b0:10 c10:30"
    assert why(found) == "It is the fastest with 121.5 ms per token; b 0:20 → c 20:30 → a would take 211.5 ms."


def test_a_segment_is_entered_where_a_quicker_one_ends() -> None:
    assert taken(pipe(segment("b", "0:20"), segment("c", "10:30", seconds=0.2)).path("a")) == "b0:20 c20:30"


def test_a_part_takes_its_share_of_the_time_of_its_segment() -> None:
    found = pipe(segment("b", "0:20", seconds=0.2), segment("c", "10:30", seconds=0.02)).path("a", round_trips=NEAR)
    assert found is not None
    assert found.seconds == pytest.approx(0.1 + 0.02)


def test_nodes_are_not_changed_for_less_than_the_way_there_takes() -> None:
    whole, little = segment("b", "0:30"), segment("c", "10:30", seconds=0.0199)
    assert taken(pipe(whole, little).path("a", round_trips={"b": 0.001, "c": 0.001})) == "b0:30"
    assert taken(pipe(whole, little).path("a", round_trips=NEAR)) == "b0:10 c10:30"


def test_of_equally_quick_segments_as_few_as_possible_are_used() -> None:
    found = pipe(segment("b", "0:12"), segment("c", "5:25"), segment("d", "12:30"), segment("c", "25:30")).path(
        "a", round_trips=NEAR
    )
    assert taken(found) == "b0:12 d12:30"


def test_an_origin_runs_all_of_its_own_layers_where_nobody_is_quicker() -> None:
    whole = pipe(segment("a", "5:20"), segment("b", "0:30"), segment("c", "8:30"))
    assert taken(whole.path("a", round_trips=NEAR)) == "b0:5 a5:20 c20:30"
    assert taken(whole.path("a")) == "b0:30", "the way there and back counts"


def test_no_other_node_runs_the_first_and_last_layers_that_the_origin_has() -> None:
    found = pipe(segment("a", "0:10", seconds=0.5), segment("b", "1:30", seconds=0.001), segment("a", "28:30")).path("a")
    assert taken(found) == "a0:10 b10:28 a28:30"
    assert why(found) == "It is the only one that keeps the first and the last layers that a has there."


def test_a_segment_that_was_left_is_not_entered_again() -> None:
    """There and back would be the quickest, but the KV of a route is one log in each segment."""
    slow, quick = segment("b", "0:30", seconds=0.3), segment("c", "10:20", seconds=0.001)
    assert taken(pipe(slow, quick).path("a")) == "b0:30"
    assert taken(pipe(slow, quick, segment("d", "0:30", seconds=0.33)).path("a")) == "b0:10 c10:20 d20:30"


# ---- against brute force ----

LAYERS = 5
NODES = "abc"

segments = st.builds(
    lambda node, ends, seconds, load, free, size, draining: segment(
        node,
        f"{min(ends)}:{max(ends)}",
        num_layers=LAYERS,
        seconds=seconds,
        load=load,
        kv_free=free,
        block_size=size,
        draining=draining,
    ),
    st.sampled_from(NODES),
    st.sets(st.integers(0, LAYERS), min_size=2, max_size=2),
    st.sampled_from([0.0, 0.001, 0.002, 0.0021]),
    st.sampled_from([0.0, 0.5, 0.95]),
    st.sampled_from([0, 9]),
    st.sampled_from([16, 16, 16, 32]),
    st.sampled_from([False, False, False, True]),
)
pipes = st.lists(segments, max_size=8).map(lambda found: pipe(*_apart(found), num_layers=LAYERS))
round_trips = st.dictionaries(st.sampled_from(NODES), st.sampled_from([0.0, 0.0005, 0.003]))
avoided = st.sets(st.sampled_from(NODES))
measured = st.builds(Link, st.sampled_from("abcx"), st.sampled_from([0.0, 1e-4, 0.002, 0.05]), st.sampled_from([0, 1e5, 1e7]))
links = st.dictionaries(st.sampled_from("abcx"), st.lists(measured, max_size=4, unique_by=lambda link: link.node).map(tuple))
TOKEN_BYTES = 4000

Links = Mapping[str, tuple[Link, ...]]

Parts = list[tuple[MetaModel, int, int]]


def reach(found: MetaModel, whole: MetaPipe, origin: str, size: int) -> tuple[int, int]:
    """Which of its layers a path may use, since the origin keeps its own first and last layers."""
    start, end = found.layers
    if found.draining or found.block_size != size:
        return 0, 0
    for own in whole.segments:
        if own.node == origin != found.node and own.block_size == size and not own.draining:
            start = max(start, own.layers.end) if own.layers.start == 0 else start
            end = min(end, own.layers.start) if own.layers.end == LAYERS else end
    return start, end


def all_paths(whole: MetaPipe, origin: str, size: int, start: int = 0) -> Iterator[Parts]:
    """All that leave each segment at its end, wherever they enter it. Many that leave it earlier are tried too, but not all."""
    if start == whole.num_layers:
        yield []
        return
    for found in whole.segments:
        first, last = reach(found, whole, origin, size)
        if first <= start < last:
            for rest in all_paths(whole, origin, size, last):
                yield [(found, start, last), *rest]


def parts_of(path: Path, whole: MetaPipe, size: int) -> Parts:
    """Nothing if the path is not over segments of this block size."""
    fitting = [found for found in whole.segments if found.block_size == size and not found.draining]
    parts = [
        (found, *hop.layers)
        for hop in path.hops
        for found in fitting
        if found.node == hop.node and found.layers.start <= hop.layers.start and hop.layers.end <= found.layers.end
    ]
    return parts if len(parts) == len(path.hops) else []


def hop_seconds(here: str, there: str, origin: str, trips: Mapping[str, float], links: Links) -> float:
    """The plain way: what the two have measured, else what is known of their ways to the origin."""

    def round_trip(one: str, other: str) -> float | None:
        if origin in (one, other) and (pinged := trips.get(other if one == origin else one)) is not None:
            return pinged
        figures = [link.round_trip for a, b in ((one, other), (other, one)) for link in links.get(a, ()) if link.node == b]
        return max(figures, default=0.0) or None

    def far(node: str) -> float:
        found = round_trip(origin, node)
        return 0.0 if node == origin else 0.001 if found is None else found

    found = round_trip(here, there)
    speed = next((link.bytes_per_second for link in links.get(there, ()) if link.node == here), 0.0)
    return (max(far(here), far(there)) if found is None else found) / 2 + (TOKEN_BYTES / speed if speed else 0.0)


def cost(
    path: Parts, whole: MetaPipe, origin: str, avoid: set[str], trips: Mapping[str, float], sizes: set[int]
) -> tuple[float, float]:
    """(with what is added for trouble, without), the plain way. What was never measured is guessed from the others."""
    used = [found for found in whole.segments if found.seconds and not found.draining and found.block_size in sizes]
    layers = sum(found.layers.size for found in used)
    per_layer = sum(found.seconds for found in used) / layers if layers else 0.001
    seconds, trouble = 0.0, 0.0
    stops = [origin, *(found.node for found, _, _ in path), origin]
    for here, there in pairwise(stops):
        if here != there:
            seconds += hop_seconds(here, there, origin, trips, whole.links)
    for found, start, end in path:
        share = (end - start) / found.layers.size
        seconds += share * (found.seconds or per_layer * found.layers.size) / (1 - min(found.load, MAX_LOAD))
        trouble += FAILED_PENALTY_S * (found.node in avoid) + FULL_PENALTY_S * (found.kv_free == 0 and found.node != origin)
    return seconds + trouble, seconds


@given(
    whole=pipes,
    origin=st.sampled_from("abx"),
    avoid=avoided,
    trips=round_trips,
    links=links,
    size=st.sampled_from([None, 16, 32]),
)
def test_no_path_that_leaves_segments_at_their_ends_is_better_than_the_one_taken(
    whole: MetaPipe, origin: str, avoid: set[str], trips: dict[str, float], links: Links, size: int | None
) -> None:
    whole = replace(whole, links=links)
    found = whole.path(origin, avoid=avoid, round_trips=trips, block_size=size, token_bytes=TOKEN_BYTES)
    sizes = {16, 32} if size is None else {size}
    paths = [path for one in sizes for path in all_paths(whole, origin, one)]
    if found is None:
        assert paths == []
        return
    costs = [cost(path, whole, origin, avoid, trips, sizes) for path in paths]
    output = [cost(parts, whole, origin, avoid, trips, sizes) for one in sizes if (parts := parts_of(found, whole, one))]
    assert min(output)[0] <= min(costs)[0] + 1e-6
    assert any(found.seconds == pytest.approx(seconds, abs=1e-6) for _, seconds in output)
    if found.why.startswith("It is the only one"):
        assert len({tuple((s.node, a, b) for s, a, b in path) for path in paths}) == 1


def random_network(dice: random.Random) -> MetaPipe:
    """Some segments of five nodes, and links of every kind: missing, near, far, slow, and different in both directions."""
    names = "abcde"
    held = [
        segment(node, f"{min(ends)}:{max(ends)}", num_layers=LAYERS, seconds=dice.choice([0.001, 0.002, 0.004]))
        for node in names * 2
        for ends in [dice.sample(range(LAYERS + 1), 2)]
    ]
    links = {
        node: tuple(
            Link(other, dice.choice([0.0, 1e-4, 0.002, 0.05]), dice.choice([0, 0, 1e5, 1e6, 1e7]))
            for other in names + "x"
            if other != node and dice.random() < 0.8
        )
        for node in names + "x"
    }
    return replace(pipe(*_apart(held), num_layers=LAYERS), links=links)


def test_no_such_path_is_better_in_random_networks_whose_links_obey_no_rule() -> None:
    """More than the search above finds by itself: most of these have a path, and many have dozens."""
    compared = 0
    for seed in range(300):
        dice = random.Random(seed)
        whole, origin = random_network(dice), dice.choice("abx")
        trips = {node: dice.choice([0.0, 0.0005, 0.003]) for node in "abcde" if dice.random() < 0.4}
        found = whole.path(origin, round_trips=trips, token_bytes=TOKEN_BYTES)
        costs = [cost(path, whole, origin, set(), trips, {16}) for path in all_paths(whole, origin, 16)]
        if found is not None:
            output, _ = cost(parts_of(found, whole, 16), whole, origin, set(), trips, {16})
            assert output <= min(costs)[0] + 1e-6, f"seed {seed}"
            assert found.seconds == pytest.approx(output, abs=1e-6), f"seed {seed}"
            assert len(costs) == 1 or not found.why.startswith("It is the only one"), f"seed {seed}"
            compared += len(costs)
    assert compared > 1000


@given(
    found=st.lists(segments, max_size=12),
    private=st.builds(PrivateLayers, st.integers(0, 2), st.integers(0, 2)),
    avoid=avoided,
    trips=round_trips,
    links=links,
)
def test_a_path_covers_all_layers_exactly_and_passes_each_segment_once(
    found: list[MetaModel], private: PrivateLayers, avoid: set[str], trips: dict[str, float], links: Links
) -> None:
    """It exists just when some segment holds each layer that may be used for it."""
    whole = pipe(*_apart(found), num_layers=LAYERS).sharing(16).without("a", private=private, weights=None)
    usable = [one for one in whole.segments if not one.draining]
    secret = {layer for layers in private.ranges(LAYERS) for layer in layers.layers()}
    held = {layer for one in usable for layer in one.layers.layers() if one.node == "a" or layer not in secret}
    path = replace(whole, links=links).path("a", avoid=avoid, round_trips=trips, token_bytes=TOKEN_BYTES)
    assert (path is not None) == whole.is_complete() == (held == set(range(LAYERS)))
    if path is not None:
        assert [layer for hop in path.hops for layer in hop.layers.layers()] == list(range(LAYERS))
        assert all(hop.node == "a" or secret.isdisjoint(hop.layers.layers()) for hop in path.hops)
        used = [
            one
            for hop in path.hops
            for one in usable
            if one.node == hop.node and {*hop.layers.layers()} <= {*one.layers.layers()}
        ]
        assert len(used) == len(set(used)) == len(path.hops)


def _apart(found: list[MetaModel]) -> list[MetaModel]:
    """A node holds each layer once."""
    kept: list[MetaModel] = []
    for one in found:
        if all(one.node != other.node or {*one.layers.layers()}.isdisjoint(other.layers.layers()) for other in kept):
            kept.append(one)
    return kept


@given(whole=pipes)
def test_a_pipe_is_complete_just_when_a_path_exists_and_explains_itself_otherwise(whole: MetaPipe) -> None:
    assert whole.is_complete() == (whole.path("x") is not None) == (whole.explain() == "")
    if whole.is_complete():
        assert whole.missing() == []
    held = {layer for found in whole.segments if not found.draining for layer in found.layers.layers()}
    assert [layer for hole in whole.missing() for layer in hole.layers()] == sorted(set(range(LAYERS)) - held)


@given(whole=pipes)
def test_a_bridge_completes_the_pipe(whole: MetaPipe) -> None:
    one_size = whole.sharing(16)
    bridge = one_size.bridge()
    assert (bridge is None) == one_size.is_complete()
    if bridge is not None:
        assert pipe(*one_size.segments, segment("new", str(bridge), num_layers=LAYERS), num_layers=LAYERS).is_complete()


@given(data=st.data(), whole=pipes, origin=st.sampled_from("abx"), trips=round_trips, links=links)
def test_the_order_of_the_records_changes_nothing(
    data: st.DataObject, whole: MetaPipe, origin: str, trips: dict[str, float], links: Links
) -> None:
    whole = replace(whole, links=links)
    shuffled = replace(whole, segments=tuple(data.draw(st.permutations(whole.segments))))
    assert shuffled.path(origin, round_trips=trips) == whole.path(origin, round_trips=trips)
    assert shuffled.explain() == whole.explain()


# ---- weights ----


def test_replicas_with_other_weights_are_told() -> None:
    same = [segment("b", "10:30"), segment("c", "10:30"), segment("d", "10:30", dtype="bfloat16", weight_hash="x")]
    assert weights_differ([*same, segment("e", "10:20", weight_hash="y"), segment("f", "10:30", weight_hash="")]) == []
    (found,) = weights_differ([*same, segment("e", "10:30", weight_hash="x")])
    assert (found.layers, found.dtype, found.holders) == (LayerRange(10, 30), "float32", (("b", "c"), ("e",)))
    assert str(found) == "The weights of layers 10:30 (float32) of b and c and those of e differ."
