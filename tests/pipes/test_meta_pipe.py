"""The logical pipe: what is missing, and which path is taken; against brute force over all paths of small pipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.meta_model import MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import LayerRange
from penstock.pipes.meta_pipe import AWAY, FAILED, FULL, MOST_LOAD, Break, MetaPipe, Path, weights_differ
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
    assert (whole.missing(), whole.broken_at(), whole.bridge(), whole.explain()) == ([], None, None, "")


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


def test_ranges_that_do_not_meet_are_told_with_what_would_join_them() -> None:
    broken = pipe(segment("a", "0:10"), segment("b", "5:30"))
    assert broken.missing() == []
    assert broken.broken_at() == Break(10, (LayerRange(5, 30),), LayerRange(0, 5))
    assert broken.explain() == (
        "All layers of smollm2-135m are held, but the ranges do not meet: nobody starts at layer 10, which is inside 5:30. "
        "Layers 0:5 would join them."
    )


def test_a_bridge_joins_the_ends_that_are_nearest() -> None:
    assert pipe(segment("a", "0:10"), segment("b", "5:14"), segment("c", "12:30")).bridge() == LayerRange(10, 12)
    assert pipe(segment("a", "0:10"), segment("c", "20:30")).bridge() == LayerRange(10, 20)


def test_segments_of_different_block_sizes_do_not_make_a_path() -> None:
    mixed = pipe(segment("a", "0:10"), segment("b", "10:30", block_size=32))
    assert not mixed.is_complete()
    assert mixed.path("a") is None
    assert mixed.explain() == (
        "The segments of smollm2-135m cannot work together, since their KV blocks differ in size: 16 at a and 32 at b."
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
    assert found == Path((Hop(LayerRange(0, 10), "a"), Hop(LayerRange(10, 30), "b")), 0.034, "It is the only one.")


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
    assert why(found) == "It is the quickest with 31.0 ms per token; a 0:10 → c 10:30 → a would take 41.0 ms."


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
    assert why(found) == "It is taken rather than a 0:10 → b 10:30 → a, because b failed lately."
    alone = pipe(segment("a", "0:10"), segment("b", "10:30")).path("a", avoid=["b"])
    assert taken(alone) == "a0:10 b10:30"
    assert why(alone) == "It is the only one, although b failed lately."
    assert alone is not None
    assert alone.seconds < 1  # what is added for trouble is no time that it takes


def test_a_segment_without_free_memory_is_a_bad_choice_except_at_home() -> None:
    full = segment("b", "10:30", kv_free=0, seconds=0.001)
    found = pipe(segment("a", "0:10"), full, segment("c", "10:30")).path("a")
    assert taken(found) == "a0:10 c10:30"
    assert why(found) == "It is taken rather than a 0:10 → b 10:30 → a, because b has no free KV memory."
    at_home = pipe(segment("a", "0:10"), full, segment("c", "10:30")).path("b")
    assert taken(at_home) == "a0:10 b10:30"


def test_of_two_equal_paths_the_one_with_more_at_home_is_taken() -> None:
    near = {"b": 0.0, "c": 0.0}
    found = pipe(segment("c", "0:30"), segment("a", "0:30")).path("c", round_trips={"a": 0.0})
    assert taken(found) == "c0:30"
    assert why(found) == "It is taken rather than a 0:30 → c, because a is not to have the layers at the ends."
    found = pipe(segment("b", "0:10"), segment("b", "10:30"), segment("c", "0:30")).path("a", round_trips=near)
    assert taken(found) == "c0:30"
    assert why(found) == "It is as quick as b 0:10 → b 10:30 → a, and has fewer hops."
    found = pipe(segment("c", "0:30"), segment("b", "0:30")).path("a", round_trips=near)
    assert taken(found) == "b0:30"
    assert why(found) == "It is as quick as c 0:30 → a, and comes first by name."


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
pipes = st.lists(segments, max_size=12).map(lambda found: pipe(*found, num_layers=LAYERS))
round_trips = st.dictionaries(st.sampled_from(NODES), st.sampled_from([0.0, 0.0005, 0.003]))
avoided = st.sets(st.sampled_from(NODES))


def all_paths(whole: MetaPipe, size: int, start: int = 0) -> Iterator[list[MetaModel]]:
    if start == whole.num_layers:
        yield []
        return
    for found in whole.segments:
        if found.layers.start == start and found.block_size == size and not found.draining:
            for rest in all_paths(whole, size, found.layers.end):
                yield [found, *rest]


def cost(path: list[MetaModel], whole: MetaPipe, origin: str, avoid: set[str], trips: Mapping[str, float]) -> tuple[float, float]:
    """(with what is added for trouble, without), the plain way."""
    used = [found for found in whole.segments if found.seconds and not found.draining]
    layers = sum(found.layers.size for found in used)
    per_layer = sum(found.seconds for found in used) / layers if layers else 0.001
    seconds, trouble = 0.0, 0.0
    stops = [origin, *(found.node for found in path), origin]
    for here, there in pairwise(stops):
        if here != there:
            seconds += max(trips.get(node, 0.001) for node in (here, there) if node != origin) / 2
    for found in path:
        seconds += (found.seconds or per_layer * found.layers.size) / (1 - min(found.load, MOST_LOAD))
        trouble += FAILED * (found.node in avoid) + FULL * (found.kv_free == 0 and found.node != origin)
        own = {end for other in whole.segments if other.node == origin and not other.draining for end in other.layers}
        trouble += AWAY * (found.node != origin and bool({0, LAYERS} & {*found.layers} & own))
    return seconds + trouble, seconds


@given(whole=pipes, origin=st.sampled_from("abx"), avoid=avoided, trips=round_trips, size=st.sampled_from([None, 16, 32]))
def test_no_path_is_better_than_the_one_taken(
    whole: MetaPipe, origin: str, avoid: set[str], trips: dict[str, float], size: int | None
) -> None:
    found = whole.path(origin, avoid=avoid, round_trips=trips, block_size=size)
    sizes = {16, 32} if size is None else {size}
    paths = [path for one in sizes for path in all_paths(whole, one)]
    if found is None:
        assert paths == []
        return
    costs = [cost(path, whole, origin, avoid, trips) for path in paths]
    hops = [tuple(hop) for hop in found.hops]
    same = [told for path, told in zip(paths, costs, strict=True) if [(s.layers, s.node) for s in path] == hops]
    assert min(same)[0] == pytest.approx(min(costs)[0], abs=1e-6)
    assert any(found.seconds == pytest.approx(seconds, abs=1e-6) for _, seconds in same)
    assert (found.why.startswith("It is the only one")) == (len({tuple((s.layers, s.node) for s in path) for path in paths}) == 1)


@given(whole=pipes, origin=st.sampled_from("abx"), avoid=avoided, trips=round_trips)
def test_a_path_covers_all_layers_exactly(whole: MetaPipe, origin: str, avoid: set[str], trips: dict[str, float]) -> None:
    found = whole.path(origin, avoid=avoid, round_trips=trips)
    if found is not None:
        assert [layer for hop in found.hops for layer in hop.layers.layers()] == list(range(LAYERS))


@given(whole=pipes)
def test_a_pipe_is_complete_just_when_a_path_exists_and_explains_itself_otherwise(whole: MetaPipe) -> None:
    assert whole.is_complete() == (whole.path("x") is not None) == (whole.explain() == "")
    if whole.is_complete():
        assert whole.missing() == []
        assert whole.broken_at() is None
    held = {layer for found in whole.segments if not found.draining for layer in found.layers.layers()}
    assert [layer for hole in whole.missing() for layer in hole.layers()] == sorted(set(range(LAYERS)) - held)


@given(whole=pipes)
def test_a_bridge_completes_the_pipe(whole: MetaPipe) -> None:
    one_size = whole.sharing(16)
    bridge = one_size.bridge()
    assert (bridge is None) == one_size.is_complete()
    if bridge is not None:
        assert pipe(*one_size.segments, segment("new", str(bridge), num_layers=LAYERS), num_layers=LAYERS).is_complete()


@given(data=st.data(), whole=pipes, origin=st.sampled_from("abx"), trips=round_trips)
def test_the_order_of_the_records_changes_nothing(
    data: st.DataObject, whole: MetaPipe, origin: str, trips: dict[str, float]
) -> None:
    shuffled = pipe(*data.draw(st.permutations(whole.segments)), num_layers=LAYERS)
    assert shuffled.path(origin, round_trips=trips) == whole.path(origin, round_trips=trips)
    assert shuffled.explain() == whole.explain()


# ---- weights ----


def test_replicas_with_other_weights_are_told() -> None:
    same = [segment("b", "10:30"), segment("c", "10:30"), segment("d", "10:30", dtype="bfloat16", weight_hash="x")]
    assert weights_differ([*same, segment("e", "10:20", weight_hash="y"), segment("f", "10:30", weight_hash="")]) == []
    (found,) = weights_differ([*same, segment("e", "10:30", weight_hash="x")])
    assert (found.layers, found.dtype, found.holders) == (LayerRange(10, 30), "float32", (("b", "c"), ("e",)))
    assert str(found) == "The weights of layers 10:30 (float32) of b and c and those of e are not the same."
