"""Simulations of a running network, as its server describes it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.simulate.from_network import RunningNetwork, parse_load
from penstock.simulate.placements import compare, placements
from penstock.simulate.report import report
from penstock.simulate.scenario import ModelShape
from penstock.simulate.simulation import Simulation

SHAPE = ModelShape(layers=10, hidden=100, layer_bytes=1_000_000_000, kv_bytes=1000)


def node(name: str, *, serves: bool = False, links: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"node": name, "self": serves, "serves": ["m"] if serves else [], "links": links or []}


def segment(name: str, start: int, end: int, seconds: float) -> dict[str, Any]:
    return {"node": name, "layers": [start, end], "seconds": seconds, "kv_tokens": 16_000}


def status(seconds: float = 0.01) -> dict[str, Any]:
    links = [{"node": "b", "round_trip": 0.02, "bytes_per_second": 1e6}]
    pipe = {
        "model": "m",
        "segments": [segment("a", 0, 4, seconds), segment("b", 4, 10, 2 * seconds), segment("c", 4, 10, 0.0)],
        "room": {"a": 6},
    }
    return {"network": {}, "nodes": [node("a", serves=True, links=links), node("b"), node("c")], "pipes": [pipe]}


@pytest.fixture
def network() -> RunningNetwork:
    return RunningNetwork(status(), SHAPE)


def test_speeds_layers_links_and_memory_are_those_of_the_network(network: RunningNetwork) -> None:
    a, b, c = network.machines
    assert (a.ranges, b.ranges, c.ranges) == (((0, 4),), ((4, 10),), ((4, 10),))
    assert (a.layer_seconds, b.layer_seconds) == pytest.approx((0.0025, 0.02 / 6))
    assert c.layer_seconds == pytest.approx((a.layer_seconds + b.layer_seconds) / 2), "nothing is known of it"
    assert (a.ends, b.ends, a.blocks) == (True, False, 1000)
    named, rest = network.scenario().links
    assert (named.between, named.speed.round_trip, named.speed.bytes_per_second) == (("a", "b"), 0.02, 1e6)
    assert rest.between is None


@pytest.mark.parametrize("wire, kind", [({"format": "int8", "token_bytes": 1}, "int8"), (None, "bfloat16")])
def test_hidden_states_travel_as_they_do_in_the_network(wire: dict[str, Any] | None, kind: str) -> None:
    found = status()
    found["pipes"][0]["wire"] = wire
    assert RunningNetwork(found, SHAPE).scenario().hidden_format == kind


def test_what_if_a_node_were_not_there(network: RunningNetwork) -> None:
    with_it, without = (
        report(_run(network, seconds=5, load="4 streams, 20+20", without=gone)).tokens_per_second for gone in ((), ("c",))
    )
    assert with_it > 0
    assert without > 0
    with pytest.raises(ConfigError, match="There is no node x"):
        network.scenario(without=["x"])
    with pytest.raises(ConfigError, match="No node that takes jobs is left"):
        network.scenario(without=["a"])


def _run(network: RunningNetwork, **more: Any) -> Simulation:
    simulation = Simulation(network.scenario(**more))
    simulation.run()
    return simulation


def test_what_if_there_were_another_node(network: RunningNetwork) -> None:
    *_, added = network.scenario(added=["speed=2,memory=40GB"]).machines
    mean = sum(machine.layer_seconds for machine in network.machines) / 3
    assert (added.name, added.layer_seconds) == ("new-1", pytest.approx(mean / 2))
    assert added.ranges, "placement gives it layers"


@pytest.mark.parametrize(
    "spec, problem",
    [
        ("speed=2", "does not say how much memory"),
        ("speed=0,memory=4GB", "not a number above 0"),
        ("memory=much", "is not a size"),
        ("name=b,memory=4GB", "adds a node b, but there is one already"),
        ("memory=4GB,ends=yes", "ends=yes in .* is not true or false"),
        ("colour=red,memory=4GB", "'colour=red' in --with is not understood"),
    ],
)
def test_a_node_that_is_not_understood_is_refused(network: RunningNetwork, spec: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        network.scenario(added=[spec])


def test_loads_are_understood() -> None:
    rate, streams = parse_load("2/s, 500+200", "a"), parse_load("8 streams, 50+20", "a")
    assert (rate.per_second, rate.prompt, rate.answer) == (2.0, (500, 500), (200, 200))
    assert (streams.streams, streams.prompt) == (8, (50, 50))


@pytest.mark.parametrize(
    "text", ["", "2", "2/s", "2/s, 5", "x/s, 5+5", "0/s, 5+5", "1.5 streams, 5+5", "2/s, 0+5", f"{10**400}/s, 5+5"]
)
def test_a_load_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not understood"):
        parse_load(text, "a")


@pytest.mark.parametrize("text", ["200000 streams, 5+5", "2/s, 9999999+5", "2/s, 5+9999999"])
def test_a_load_that_is_too_large_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="too large to simulate"):
        parse_load(text, "a")


def test_a_network_that_has_not_computed_yet_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="their speeds are unknown"):
        RunningNetwork(status(0.0), SHAPE)


# ---- plans ----


def test_placements_hold_all_layers_within_the_room_of_each_machine(network: RunningNetwork) -> None:
    room = network.room
    assert room == {"a": 10, "b": 6, "c": 6}
    found = placements(network.machines, room, 10, "a")
    assert [*found] == ["as it is", "few machines", "all machines"]
    for machines in found.values():
        held = {layer for machine in machines for start, end in machine.ranges for layer in range(start, end)}
        assert held == {*range(10)}
        assert all(sum(end - start for start, end in machine.ranges) <= room[machine.name] for machine in machines)
    few, everyone = found["few machines"], found["all machines"]
    assert [machine.ranges for machine in few] == [((0, 10),), (), ()], "the quickest has room for all"
    assert all(machine.ranges for machine in everyone)


@pytest.mark.slow
def test_one_stream_is_quickest_where_it_crosses_no_link(network: RunningNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.simulate.placements.SECONDS", 4.0)
    found = {one.name: one for one in compare(network)}
    assert max(found.values(), key=lambda one: one.one).name == "few machines"
    assert all(one.many > one.one > 0 for one in found.values())
