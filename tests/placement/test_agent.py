"""Nodes find out by themselves which layers to hold: when they start together, when one leaves, and when weights differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, NotEnoughMemory
from penstock.network.in_process import Hub
from penstock.pipes.pipe_ids import split
from penstock.placement import controller as placer
from tests.network.nets import wait_for
from tests.placement.fleet import LAYERS, FleetNode, Loads, running
from tests.tiny_weights import flip_a_bit, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside one process records arrive at once, or nearly so on a busy machine."""
    for name, seconds in {"SETTLE_S": 0.3, "CLAIM_DELAY_S": 0.4, "GAP_DELAY_S": 0.5, "FILL_TIMEOUT_S": 1.0}.items():
        monkeypatch.setattr(placer, name, seconds)
    monkeypatch.setattr("penstock.placement.agent.SETTLE_S", 0.3)
    monkeypatch.setattr("penstock.peers.membership.FIRST_RECORD_TIMEOUT_S", 0.1)
    monkeypatch.setattr("penstock.peers.membership.FIRST_OFFER_TIMEOUT_S", 0.1)


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


@pytest.mark.parametrize("attempt", [*range(5), *(pytest.param(later, marks=pytest.mark.slow) for later in range(5, 20))])
def test_four_nodes_started_at_the_same_instant_make_a_whole_pipe_and_load_nothing_twice(
    attempt: int, node: Callable[..., FleetNode]
) -> None:
    rooms = [(3, 3, 3, 3), (12, 1, 5, 2), (4, 4, 4, 4), (1, 2, 3, 6), (6, 6, 1, 1)][attempt % 5]
    nodes = [node(name, room) for name, room in zip("abcd", rooms, strict=True)]
    with running(*nodes):
        wait_for(lambda: held(*nodes) == set(range(LAYERS)), "all layers")  # on a busy machine the last one comes a bit later
        wait_for(lambda: all(map(complete, nodes)), "all to hear of it")
        assert nodes[0]._loads.wasted == []
        wait_for(lambda: len(pipes_seen(nodes[0])) == 1, "one pipe, whoever opened it first")


def pipes_seen(node: FleetNode) -> dict[str, set[str]]:
    """The nodes of each pipe, by its id."""
    (found,) = node.membership.pipes.pipes()
    return {name: {segment.node for segment in part.segments} for name, part in split(found).items()}


def test_nodes_join_a_pipe_by_its_id_open_another_where_max_pipes_allows_it_and_then_copy(
    node: Callable[..., FleetNode], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.network")
    a, b, c = node("a", 5), node("b", 7), node("c", 5)
    other, more = node("d", 12, max_pipes=2), node("e", 12, max_pipes=2)
    with running(a), running(b), running(c):
        wait_for(lambda: [*pipes_seen(a).values()] == [{"a", "b", "c"}], "the copy in the only pipe")
        (first,) = pipes_seen(a)
        assert f"this node opens pipe {first} with layers 0:5" in caplog.text
        assert f"this node joins pipe {first} with layers 5:12" in caplog.text
        with running(other):
            assert other.held == ["5:12"], "the copy is a start for the second pipe"
            wait_for(lambda: sorted(map(len, pipes_seen(a).values())) == [2, 2], "the second pipe")
            assert {"c", "d"} == next(nodes for name, nodes in pipes_seen(a).items() if name != first)
            with running(more):
                wait_for(lambda: "e" in set().union(*pipes_seen(a).values()), "the last one, which copies")
                assert len(pipes_seen(a)) == 2, "max_pipes counts them"


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
    a, b = node("a", 5), node("b", 12)
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
                pytest.raises(CorruptWeights, match=r"model\.safetensors differs from the trusted weights"),
                running(node("b", 12, accept_weights=("any",))),
            ):
                pass
            c = node("c", 12)
            with running(c):  # nobody vouches for the weights of a, so c goes on with its own; a does not use them
                assert c.held == ["5:12"]
                wait_for(lambda: "layers 5:12" in a.membership.incompatible_peers.get("c", ""), "a to see that they differ")
        finally:
            file.write_bytes(kept)


@pytest.mark.parametrize("adopts", [False, True])
def test_a_node_vouches_for_its_own_files_of_a_model_that_its_user_named(
    node: Callable[..., FleetNode], model: Path, adopts: bool
) -> None:
    a, vouched = node("a", 12), []
    a.config = replace(a.config, adopts=adopts)
    a.membership.trust.vouch = lambda *about: vouched.append(about)  # type: ignore[method-assign]
    with running(a):
        assert set(vouched) == (set() if adopts else {(str(model), a.membership._offers[str(model)].weights)})


def test_a_budget_without_room_for_a_layer_is_refused_with_what_would_do(node: Callable[..., FleetNode]) -> None:
    with pytest.raises(NotEnoughMemory, match=r"too small for a single layer .* Set max_memory to"), running(node("a", 0)):
        pass


def test_a_load_that_fails_is_told_to_the_others_and_tried_again(
    node: Callable[..., FleetNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placer, "MIN_BACKOFF_S", 0.5)
    a, b = node("a", 5), node("b", 12)
    with running(a), running(b):
        manager = b.placing._manager  # type: ignore[union-attr]
        load, failures = manager.load_layers, []

        def failing(*args: Any) -> Any:
            if not failures:
                failures.append(args[1])
                raise RuntimeError("no memory")
            return load(*args)

        manager.load_layers = failing  # type: ignore[method-assign]
        a.stop()
        wait_for(lambda: failures, "the first try")
        wait_for(lambda: held(b) == set(range(LAYERS)), "the second one")
        wait_for(lambda: b.membership._offers[b.config.models[0].id].claims == (), "the record that follows")


def test_weights_that_changed_after_they_were_checked_are_not_used(
    node: Callable[..., FleetNode], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "changing", layers=LAYERS)
    a = node("a", 12, model=model)
    offer = a.membership.offer

    def damage_and_offer(output: Any) -> None:
        if not output.claims and a.hosted is None:  # the hashes are known, and nothing is loaded yet
            flip_a_bit(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 100)
        offer(output)

    monkeypatch.setattr(a.membership, "offer", damage_and_offer)
    with pytest.raises(CorruptWeights, match="have changed since they were checked"), running(a):
        pass


def test_all_ranges_of_a_node_have_the_kv_memory_that_was_asked_for(node: Callable[..., FleetNode]) -> None:
    a = node("a", 12, layers="0:6,6:12", kv_memory=100_000)
    with running(a):
        assert a.held == ["0:6", "6:12"]
        segments = a.hosted.engine.pipe.segments  # type: ignore[union-attr]
        assert {segment.kv_blocks for segment in segments} == {a.placing._budget.blocks}  # type: ignore[union-attr]
        assert segments[0].kv_blocks >= 2


def test_a_claim_that_is_never_loaded_counts_for_nothing_in_the_end(
    node: Callable[..., FleetNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.placement.agent.STALE_CLAIM_S", 1.0)
    a, b = node("a", 5), node("b", 12)
    with running(a):
        offer = a.membership._offers[a.config.models[0].id]
        a.placing.close()  # type: ignore[union-attr]
        a.membership.offer(replace(offer, claims=(LayerRange(5, 12),)))
        with running(b):
            wait_for(lambda: b.held and held(a, b) == set(range(LAYERS)), "the layers that were claimed in vain")
