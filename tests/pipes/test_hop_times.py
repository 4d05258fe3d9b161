"""What hops cost: figures that nodes have measured between them, and what they change about the path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.meta_model import Link, MetaModel
from penstock.pipes.hop_times import DEFAULT_ROUND_TRIP_S, MAX_TRUSTED_S, HopTimes, MeasuredLinks
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.path import Path
from penstock.pipes.pipe import Pipe
from penstock.pipes.router_pipes import RouterPipes
from tests.pipes.network_of import MODEL, SHAPE, pipe, record, segment

MEGABIT = 1e6 / 8
WIDTH = 8192
TOKEN_BYTES = 4 * WIDTH


def taken(found: Path | None) -> str:
    assert found is not None
    return " ".join(f"{hop.node}{hop.layers}" for hop in found.hops)


def hop_times(links: Mapping[str, tuple[Link, ...]], round_trips: dict[str, float] | None = None) -> HopTimes:
    return HopTimes("abc", "o", round_trips or {}, MeasuredLinks(links).times(TOKEN_BYTES))


def seconds(here: str, there: str, round_trips: dict[str, float] | None = None, **links: tuple[Link, ...]) -> float:
    """From one node to another in a network whose origin is `o`."""
    return hop_times(links, round_trips).into(there)[here] / 1e9


# ---- one hop ----


def test_a_hop_takes_half_the_round_trip_that_either_end_has_measured() -> None:
    for links in ({"a": (Link("b", 0.03),)}, {"b": (Link("a", 0.03),)}):
        assert seconds("a", "b", **links) == seconds("b", "a", **links) == 0.015


def test_a_node_cannot_make_its_link_look_shorter_than_the_other_end_finds_it() -> None:
    assert seconds("a", "b", a=(Link("b", 0.03),), b=(Link("a", 1e-9),)) == 0.015


def test_the_transfer_of_a_token_counts_as_its_receiver_has_measured_it() -> None:
    links = {"b": (Link("a", 0.03, 20 * MEGABIT),)}
    assert seconds("a", "b", **links) == pytest.approx(0.015 + TOKEN_BYTES / (20 * MEGABIT))
    assert seconds("b", "a", **links) == 0.015, "nothing is known of that direction"


def test_a_hop_that_nobody_has_measured_is_as_long_as_the_longer_of_those_from_the_origin() -> None:
    assert seconds("a", "b", {"a": 0.01, "b": 0.04}) == 0.02
    assert seconds("a", "b", {"a": 0.01}, b=(Link("o", 0.05),)) == 0.025, "one of them is known from a record"
    assert seconds("a", "b") == DEFAULT_ROUND_TRIP_S / 2


def test_the_speed_is_known_without_the_round_trip_and_the_other_way_around() -> None:
    assert seconds("a", "b", b=(Link("a", 0.0, TOKEN_BYTES),)) == DEFAULT_ROUND_TRIP_S / 2 + 1.0
    assert seconds("a", "b", b=(Link("a", 0.2, 0.0),)) == 0.1


def test_the_pings_of_the_origin_are_newer_than_what_records_say() -> None:
    links = {"o": (Link("a", 0.5, TOKEN_BYTES),), "a": (Link("o", 0.5, TOKEN_BYTES / 2),)}
    assert seconds("o", "a", {"a": 0.01}, **links) == 0.005 + 2.0
    assert seconds("a", "o", {"a": 0.01}, **links) == 0.005 + 1.0
    assert seconds("o", "a", **links) == 0.25 + 2.0


figures = st.sampled_from([nan, inf, -inf, -1.0, 0.0, -0.0, 1e-300, 1e300, 5e-324]) | st.floats()
any_links = st.dictionaries(
    st.sampled_from("abco"), st.lists(st.builds(Link, st.sampled_from("abcox"), figures, figures), max_size=5).map(tuple)
)


@given(links=any_links)
def test_no_figure_makes_a_hop_take_less_than_nothing_or_more_than_is_believed(links: dict[str, tuple[Link, ...]]) -> None:
    times = hop_times(links)
    for node in "abco":
        found = times.into(node)
        others = [found[other] for other in "abco" if other != node]
        assert found[node] == 0
        assert min(others) >= 0
        assert all(
            found[other] == found.unmeasured(times.ways[other]) for other in "abco" if other not in {node, *found.measured}
        )
        assert max(others) <= 2 * MAX_TRUSTED_S * 1e9


@given(first=any_links, second=any_links)
def test_links_that_are_taken_over_from_before_read_like_all_of_them_anew(
    first: dict[str, tuple[Link, ...]], second: dict[str, tuple[Link, ...]]
) -> None:
    before = MeasuredLinks(first)
    known = before.times(TOKEN_BYTES)
    after, anew = MeasuredLinks(second, before), MeasuredLinks(second)
    assert _all_times(after) == _all_times(anew)
    assert before.times(TOKEN_BYTES) == known == MeasuredLinks(first).times(TOKEN_BYTES), "others still use them"


def _all_times(links: MeasuredLinks) -> dict[tuple[str, str], int]:
    times = HopTimes("abcx", "o", {}, links.times(TOKEN_BYTES))
    return {(here, there): times.into(there)[here] for here in "abcox" for there in "abcox"}


@given(lies=st.lists(st.builds(Link, st.sampled_from("abo"), figures, figures), max_size=4).map(tuple))
def test_whatever_a_liar_says_a_path_is_found_and_links_of_others_stay_as_they_are(lies: tuple[Link, ...]) -> None:
    honest = {"a": (Link("b", 0.02), Link("o", 0.03)), "b": (Link("a", 0.02),)}
    before, after = (hop_times(links) for links in (honest, honest | {"c": lies}))
    for node in "abo":
        for other in "abo":
            assert before.into(node)[other] == after.into(node)[other]
    whole = pipe(segment("a", "0:10"), segment("c", "10:20"), segment("b", "20:30"))
    assert taken(replace(whole, links=honest | {"c": lies}).path("o", token_bytes=TOKEN_BYTES)) == "a0:10 c10:20 b20:30"


# ---- which path ----


def lan(*nodes: str, far: dict[str, float] | None = None) -> dict[str, tuple[Link, ...]]:
    """Nodes with half a millisecond between them, and so far from others."""
    return {
        node: tuple(Link(other, 0.0005) for other in nodes if other != node)
        + tuple(Link(other, round_trip) for other, round_trip in (far or {}).items())
        for node in nodes
    }


def test_two_far_nodes_in_one_lan_are_chosen_together_over_one_far_and_one_near_node() -> None:
    """`far1` is needed. From the origin, `far2` looks as far again, but between the two there is next to nothing."""
    segments = [segment("far1", "0:15"), segment("far2", "15:30"), segment("near", "15:30", seconds=0.017)]
    trips = {"far1": 0.080, "far2": 0.080, "near": 0.002}
    links = lan("far1", "far2", far={"near": 0.081, "o": 0.08}) | {"near": (Link("o", 0.002),)}
    assert taken(pipe(*segments).path("o", round_trips=trips)) == "far10:15 near15:30"
    found = replace(pipe(*segments), links=links).path("o", round_trips=trips)
    assert taken(found) == "far10:15 far215:30"
    assert found is not None
    assert found.seconds == pytest.approx(0.040 + 0.00025 + 0.040 + 0.030)


def test_a_slow_link_is_avoided_where_there_is_a_faster_way_around() -> None:
    """From `a` to `b` at 20 Mbit/s the hidden state of a token of a model 8192 wide takes 13 ms: as long as 13 layers."""
    segments = [segment("a", "0:15"), segment("b", "15:30"), segment("c", "10:20", seconds=0.012)]
    fast, slow = 1000 * MEGABIT, 20 * MEGABIT
    links = {
        "a": (Link("c", 0.001),),
        "b": (Link("a", 0.001, slow), Link("c", 0.001, fast)),
        "c": (Link("a", 0.001, fast), Link("b", 0.001)),
    }
    whole = pipe(*segments)
    assert taken(whole.path("o", token_bytes=TOKEN_BYTES)) == "a0:15 b15:30"
    assert taken(replace(whole, links=links).path("o", token_bytes=TOKEN_BYTES)) == "a0:10 c10:15 b15:30"
    narrow = replace(whole, links=links).path("o", token_bytes=4 * 64)
    assert taken(narrow) == "a0:15 b15:30", "where a token is small, the link is fast enough"


def test_the_only_path_is_taken_however_slow_its_links_are() -> None:
    links = {"b": (Link("a", inf, 1e-300),), "a": (Link("b", 1e9, 0.0),)}
    found = replace(pipe(segment("a", "0:10"), segment("b", "10:30")), links=links).path("o", token_bytes=TOKEN_BYTES)
    assert taken(found) == "a0:10 b10:30"


def test_the_time_along_given_hops_is_that_of_this_path_now() -> None:
    replicas = pipe(segment("a", "0:10"), segment("b", "10:30"), segment("c", "10:30", seconds=0.030))
    along = replicas.path("o", avoid={"b"})
    assert along is not None
    assert taken(along) == "a0:10 c10:30"
    assert taken(replicas.path("o")) == "a0:10 b10:30"
    now = replicas.path("o", along=along.hops)
    assert now is not None
    assert (now.hops, now.seconds) == (along.hops, along.seconds)
    assert pipe(segment("a", "0:10"), segment("b", "10:30")).path("o", along=along.hops) is None


def test_a_hundred_nodes_with_links_between_all_of_them_are_little_work() -> None:
    names = [f"n{number}" for number in range(100)]
    many = [segment(name, f"{start}:{start + 5}") for name in names for start in range(0, 30, 5)]
    slow = {name: tuple(Link(other, 0.01, 1e6) for other in names if other != name) for name in names}
    found = replace(pipe(*many), links=slow).path("x", token_bytes=TOKEN_BYTES)
    assert taken(found) == " ".join(f"n0{start}:{start + 5}" for start in range(0, 30, 5)), "it stays where it is"


# ---- from records to paths ----


class View:
    """The network as records say."""

    def __init__(self, *segments: MetaModel, links: dict[str, tuple[Link, ...]]) -> None:
        nodes = {found.node for found in segments} | links.keys()
        records = [
            record(node, *(found for found in segments if found.node == node), links=links.get(node, ()))
            for node in sorted(nodes)
        ]
        self._pipes = RouterPipes(lambda: records)

    def pipe(self) -> MetaPipe:
        return self._pipes.find(MODEL, SHAPE, 30)

    def epochs(self) -> dict[str, int]:
        return {}

    def draining(self) -> frozenset[str]:
        return frozenset()


def test_links_of_records_reach_the_path_with_the_size_of_a_token() -> None:
    segments = [segment("a", "0:15"), segment("b", "15:30"), segment("c", "15:30", seconds=0.017)]
    view = View(*segments, links={"b": (Link("a", 0.001, 20 * MEGABIT),)})

    def path(width: int) -> Path | None:
        return Pipe(MODEL, 30, [], node="o", shape=SHAPE, width=width, view=view).path()

    assert taken(path(WIDTH)) == "a0:15 c15:30"
    assert taken(path(64)) == "a0:15 b15:30"
    assert Pipe(MODEL, 30, [], node="o", view=view).links() == {"b": (Link("a", 0.001, 20 * MEGABIT),)}
