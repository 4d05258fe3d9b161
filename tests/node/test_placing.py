"""Nodes find out by themselves which layers to hold: when they start together, when one leaves, and when weights differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptWeights, NotEnoughMemory
from penstock.network.in_process import Hub
from penstock.pipes import placer
from tests.network.nets import wait_for
from tests.node.fleet import LAYERS, FleetNode, Loads, running
from tests.tiny_weights import flip_a_bit, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside one process records arrive at once."""
    for name, seconds in {"SETTLE": 0.15, "CLAIM_WAIT": 0.15, "PATIENCE": 0.5, "OVERDUE": 1.0}.items():
        monkeypatch.setattr(placer, name, seconds)
    monkeypatch.setattr("penstock.node.placing.SETTLE", 0.15)
    monkeypatch.setattr("penstock.node.membership.MEETING", 0.1)
    monkeypatch.setattr("penstock.node.membership.OFFERING", 0.1)


@pytest.fixture
def node(model: Path) -> Callable[..., FleetNode]:
    hub, loads = Hub(), Loads()

    def make(name: str, room: int, **settings: Any) -> FleetNode:
        return FleetNode(hub, name, settings.pop("model", model), room, loads, **settings)

    return make


def held(*nodes: FleetNode) -> set[int]:
    ranges = [segment.layers for node in nodes if node.hosted for segment in node.hosted.engine.pipe.segments]
    return {layer for found in ranges for layer in found.layers()}


def complete(node: FleetNode) -> bool:
    pipes = node.membership.pipes.pipes()
    return bool(pipes) and pipes[0].is_complete()


@pytest.mark.parametrize("attempt", range(20))
def test_four_nodes_started_at_the_same_instant_make_a_whole_pipe_and_load_nothing_twice(
    attempt: int, node: Callable[..., FleetNode]
) -> None:
    rooms = [(3, 3, 3, 3), (12, 1, 5, 2), (4, 4, 4, 4), (1, 2, 3, 6), (6, 6, 1, 1)][attempt % 5]
    nodes = [node(name, room) for name, room in zip("abcd", rooms, strict=True)]
    with running(*nodes):
        assert held(*nodes) == set(range(LAYERS))
        assert complete(nodes[attempt % 4])
        assert nodes[0]._loads.wasted == []


def test_the_second_node_takes_what_the_first_has_no_room_for(node: Callable[..., FleetNode]) -> None:
    a, b = node("a", 5), node("b", 30)
    with running(a):
        assert a.held == ["0:5"]
        assert not complete(a)
        with running(b):
            assert b.held == ["5:12"]
            wait_for(lambda: complete(a), "a complete pipe")
            assert b.membership.placements[b.config.models[0].id].startswith("Layers 5:12 of ")


def test_when_the_pipe_is_complete_the_next_node_copies_what_the_fewest_hold(node: Callable[..., FleetNode]) -> None:
    a, b, c = node("a", 5), node("b", 7), node("c", 5)
    with running(a), running(b), running(c):
        assert c.held == ["0:5"]
        assert "copy" in c.membership.placements[c.config.models[0].id]


def test_a_node_that_leaves_is_replaced_where_another_has_room(node: Callable[..., FleetNode]) -> None:
    a, b = node("a", 5), node("b", 24)  # half of what is left becomes KV
    with running(a), running(b):
        assert b.held == ["5:12"]
        a.stop()
        wait_for(lambda: held(b) == set(range(LAYERS)), "the layers of the node that left")
        assert sorted(b.held) == ["0:5", "5:12"]


def test_private_layers_are_held_beside_what_the_network_needs(node: Callable[..., FleetNode]) -> None:
    a = node("a", 6, layers="0:2,10:12")
    b = node("b", 8)
    with running(a, b):
        assert a.held == ["0:2", "10:12"]
        assert b.held == ["2:10"]


def test_a_tampered_file_is_refused_by_name(node: Callable[..., FleetNode], tmp_path: Path, model: Path) -> None:
    a = node("a", 5)
    with running(a):
        # the same name for both nodes, and another content
        file = model / "model.safetensors"
        kept = file.read_bytes()
        flip_a_bit(file, len(kept) - 100)
        try:
            with (
                pytest.raises(CorruptWeights, match=r"model\.safetensors is not what the other nodes have"),
                running(node("b", 12)),
            ):
                pass
        finally:
            file.write_bytes(kept)


def test_a_budget_without_room_for_a_layer_is_refused_with_what_would_do(node: Callable[..., FleetNode]) -> None:
    with pytest.raises(NotEnoughMemory, match=r"too small for a single layer .* Give max_memory of"), running(node("a", 0)):
        pass
