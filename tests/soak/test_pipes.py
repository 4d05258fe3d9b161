"""Pipes over real processes for minutes: nodes are killed, frozen and restarted under load, and origins share stages."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipes_live.answers import Oracle, Traffic, mixed, start_streams, wait_for_all, wait_for_tokens
from tests.pipes_live.nodes import Cluster, Node, Spec, cluster, until

TOKENS = 40
GENEROUS = 30.0  # seconds for a pause that is aimed to be below two (after a freeze: below the lease and two)
ROUNDS = 30
SEED = 20

pytestmark = pytest.mark.timeout(1200)

SPLITS = {
    1: {"a": Spec(layers="0:30", ends=True)},
    2: {"a": Spec(layers="0:15", ends=True), "b": Spec(layers="15:30")},
    3: {"a": Spec(layers="0:10", ends=True), "b": Spec(layers="10:20"), "c": Spec(layers="20:30")},
    4: {"a": Spec(layers="0:8", ends=True), "b": Spec(layers="8:15"), "c": Spec(layers="15:22"), "d": Spec(layers="22:30")},
}


@pytest.mark.parametrize("count", SPLITS)
def test_any_number_of_nodes_answers_as_one_process_does(count: int, oracle: Oracle) -> None:
    with cluster(SPLITS[count]) as nodes:
        streams = start_streams(nodes["a"].url, mixed(16), TOKENS)
        wait_for_all(streams)
        oracle.check(streams)
        assert [hop["node"] for hop in nodes["a"].route()["hops"]] == list(SPLITS[count])
        for node in nodes.nodes.values():
            wait_until_nothing_is_held(node)


# ---- losing a node in the middle of eight answers, with another that has the same layers ----


@pytest.fixture(scope="module")
def thirds(default_model_folder: Path) -> Iterator[Cluster]:
    layers = {"a": Spec(layers="0:10", ends=True)}
    layers |= {name: Spec(layers="10:20") for name in ("b1", "b2")} | {name: Spec(layers="20:30") for name in ("c1", "c2")}
    with cluster(layers) as made:
        yield made


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows = [
        f"{'':22} {'said':>8} {'shortest':>9} {'longest':>8}  (seconds that answers stood still; the last two as clients saw it)"
    ]
    yield rows
    print("", *rows, sep="\n")


@pytest.mark.parametrize("place", [1, 2], ids=["middle", "last"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_lost_node_costs_a_pause_and_no_token(how: str, place: int, thirds: Cluster, oracle: Oracle, table: list[str]) -> None:
    thirds.only(*thirds.nodes)
    origin = thirds["a"]
    streams = start_streams(origin.url, mixed(8), TOKENS)
    wait_for_tokens(streams, 8)
    before = origin.route()  # while idle, it may have moved to a better one
    victim = thirds[before["hops"][place]["node"]]
    assert not any(stream.done for stream in streams)
    moment = time.monotonic()
    {"kill": victim.kill, "freeze": victim.freeze}[how]()
    wait_for_all(streams)
    oracle.check(streams)
    after = origin.route()
    seen = sorted(stream.pause_at(moment) for stream in streams)
    name = f"{how} of the {('middle', 'last')[place - 1]} node"
    table.append(f"{name:25} {after['last_pause']:8.2f} {seen[0]:9.2f} {seen[-1]:8.2f}  {after['last_reason']}")
    assert after["recoveries"] > before["recoveries"]
    assert victim.name not in [hop["node"] for hop in after["hops"]]
    assert after["last_pause"] < GENEROUS
    if how == "freeze":
        assert after["last_pause"] > 0.5  # the time until it was noticed counts: silence for the lease, one second
        victim.thaw()
        thirds.wait_until_open("a")  # it is seen again
        again = start_streams(origin.url, mixed(4), TOKENS)
        wait_for_all(again)
        oracle.check(again)


@pytest.mark.parametrize("gone", [0.0, 5.0], ids=["at-once", "later"])
def test_a_restarted_origin_leaves_nothing_behind_on_its_stages(gone: float, oracle: Oracle) -> None:
    with cluster(SPLITS[2]) as nodes:
        origin, stage = nodes["a"], nodes["b"]
        streams = start_streams(origin.url, mixed(8), TOKENS)
        wait_for_tokens(streams, 8)
        until(lambda: stage.own_segments()[0]["kv_leased"] > 0, "the lease to show")
        origin.kill()
        wait_for_all(streams)
        assert all(stream.error and not stream.finished for stream in streams)
        if gone:
            until(lambda: stage.own_segments()[0]["kv_leased"] == 0, "the stage to free what it held")
            time.sleep(gone)
        nodes.start("a")
        nodes.wait_until_open("a")
        again = start_streams(origin.url, mixed(8), TOKENS)
        wait_for_all(again)
        oracle.check(again)
        wait_until_nothing_is_held(stage)
        assert stage.own_segments()[0]["kv_leased"] <= stage.own_segments()[0]["kv_tokens"]


# ---- several origins ----


def test_two_origins_share_two_stages_and_none_starves(oracle: Oracle) -> None:
    layers = {name: Spec(layers="0:2", ends=True) for name in ("o1", "o2")}
    layers |= {"s1": Spec(layers="2:16"), "s2": Spec(layers="16:30")}
    with cluster(layers) as nodes:
        first = Traffic(nodes["o1"].url, mixed(16), max_tokens=TOKENS)
        second = Traffic(nodes["o2"].url, mixed(16, first=16), max_tokens=TOKENS)
        with first, second:
            until(lambda: first.tokens and second.tokens, "both to begin")
            before = (first.tokens, second.tokens)
            time.sleep(30)
            made = (first.tokens - before[0], second.tokens - before[1])
        shared = {name: nodes[name].metric("penstock_shared_passes_total") for name in ("s1", "s2")}
        print(f"tokens of each origin in 30 s: {made}; passes with rows of both: {shared}")
        oracle.check([*first.streams, *second.streams])
        assert all(shared.values())
        assert max(made) <= 4 * min(made)
        for node in nodes.nodes.values():
            wait_until_nothing_is_held(node)


@pytest.mark.parametrize("kv_memory", ["200MB", "60MB"], ids=["enough-memory", "little-memory"])
def test_routes_in_opposite_directions_do_not_wait_for_each_other(kv_memory: str, oracle: Oracle) -> None:
    """Layers go a, b, a. From a that is a → b → a, from b it is b → a → b → a → b: each is a stage of the other."""
    layers = {
        "a": Spec(layers="0:10,20:30", ends=True, kv_memory=kv_memory),
        "b": Spec(layers="10:20", ends=True, kv_memory=kv_memory),
    }
    with cluster(layers) as nodes:
        first = Traffic(nodes["a"].url, mixed(16), max_tokens=TOKENS)
        second = Traffic(nodes["b"].url, mixed(16, first=16), max_tokens=TOKENS)
        with first, second:
            time.sleep(30)
        for name, traffic in (("a", first), ("b", second)):
            route = nodes[name].route()
            said = f"KV for {route['kv_tokens']}, {route['lost']} lost"
            print(f"{name}: {len(traffic.streams)} answers, {traffic.tokens} tokens, {said}")
            assert [hop["node"] for hop in route["hops"]] == ["a", "b", "a"]
        oracle.check([*first.streams, *second.streams])
        for node in nodes.nodes.values():
            wait_until_nothing_is_held(node)


# ---- everything at once ----


def test_thirty_rounds_of_deaths_under_load_leave_every_request_with_one_answer(oracle: Oracle) -> None:
    prompts = mixed(16)
    oracle.prepare(prompts, TOKENS)
    draw = random.Random(SEED)
    stages = ["x1", "x2", "y1", "y2"]
    layers = {"o": Spec(layers="0:2", ends=True)} | {name: Spec(layers="2:16" if name[0] == "x" else "16:30") for name in stages}
    with cluster(layers, recovery_timeout=20.0) as nodes:
        origin = nodes["o"]
        grown = [origin.resident()]
        with Traffic(origin.url, prompts, clients=6, max_tokens=TOKENS) as traffic:
            for number in range(ROUNDS):
                _one_death(nodes, draw, stages)
                grown.append(origin.resident())
                answered = sum(stream.done for stream in traffic.streams)
                print(f"round {number}: {answered} answered, {sum(bool(s.error) for s in traffic.streams)} with an error")
            nodes.start(*stages)
        _check_answers(traffic, oracle)
        print(f"resident memory of the origin, MB: {[size >> 20 for size in grown]}; pauses: {origin.route()['recoveries']}")
        nodes.wait_until_open("o")
        for node in nodes.nodes.values():
            wait_until_nothing_is_held(node)
        assert grown[-1] - grown[len(grown) // 2] < 200 << 20


def _one_death(nodes: Cluster, draw: random.Random, stages: list[str]) -> None:
    """Take one down in one of three ways, at times a second one too, and let them come back."""
    victims = draw.sample(stages, draw.choice([1, 1, 1, 2]))
    ways = {name: draw.choice(["kill", "kill", "leave", "freeze"]) for name in victims}
    for name, way in ways.items():
        {"kill": nodes[name].kill, "leave": nodes[name].interrupt, "freeze": nodes[name].freeze}[way]()
    time.sleep(draw.uniform(0.0, 3.0))
    for name, way in ways.items():
        if way == "freeze":
            nodes[name].thaw()
        elif way == "leave":
            assert nodes[name].exit_code() == 0, nodes[name].stderr()
    nodes.start(*victims)
    time.sleep(draw.uniform(0.0, 3.0))


def _check_answers(traffic: Traffic, oracle: Oracle) -> None:
    """Right, or a clear error after the beginning of what would have been right."""
    errors: dict[str, int] = {}
    for stream in traffic.streams:
        oracle.check_tokens(stream)
        if stream.error:
            errors[stream.error] = errors.get(stream.error, 0) + 1
            assert "are missing" in stream.error or "No route could be opened" in stream.error, stream.error
            assert stream.finished == []
        else:
            assert stream.finished == ["length"]
    print(f"{len(traffic.streams)} requests; errors: {errors}")
    assert sum(errors.values()) < len(traffic.streams) / 2


def wait_until_nothing_is_held(node: Node) -> None:
    """Neither at the origin nor in its segments, as the node itself sees it."""

    def free() -> bool:
        return node.metric("penstock_kv_blocks_held") == 0 and all(segment["kv_used"] == 0 for segment in node.own_segments())

    until(free, f"{node.name} to hold no KV memory", lambda: str(node.own_segments()))
