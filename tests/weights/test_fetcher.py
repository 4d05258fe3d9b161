"""Weights from other nodes: what arrives is right or it is not taken, and who is of no use is not asked again."""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.domain.messages import AskWeights, Message, WeightsPart
from penstock.domain.topology import LayerRange
from penstock.errors import ModelError, WeightsUnavailable
from penstock.model.architecture.spec import read_spec
from penstock.model.batch import BatchPiece
from penstock.model.files.weight_files import WeightFiles
from penstock.model.segment import LlmModel
from penstock.network.codec import decode
from penstock.network.in_process import Hub, InProcessRouter
from penstock.network.wire import Wire
from penstock.weights import fetcher as weights_taker
from penstock.weights import request_tracker as weights_stream
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.hashing import manifest_of
from penstock.weights.manifest import Manifest, ModelPart
from penstock.weights.peer_store import PeerStore
from penstock.weights.server import WeightsServer
from tests.tiny_weights import LAYERS, write_model
from tests.weights.neighbours import MODEL, Neighbours, is_whole, silent, wrong

pytestmark = pytest.mark.usefixtures("empty_cache")

ALL = [LayerRange(0, LAYERS)]


@pytest.fixture
def net() -> Iterator[Neighbours]:
    net = Neighbours()
    yield net
    net.close()


@pytest.fixture
def hasty() -> Iterator[Neighbours]:
    """Does not wait long for those who do not answer."""
    net = Neighbours(timeout=0.3)
    yield net
    net.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a part of a tiny model takes many."""
    monkeypatch.setattr(weights_stream, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weights_taker, "PIECE_BYTES", 1000)


# ---- what arrives ----


def test_a_model_arrives_as_it_is(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest)
    assert net.taker.fetch_manifest(MODEL) == manifest
    store = PeerStore(manifest, MODEL)
    net.taker.fetch(manifest, manifest.parts(ALL, ends=True), store, MODEL)
    assert is_whole(store)


def test_small_pieces_and_several_nodes_make_the_same_model(
    small_pieces: None, net: Neighbours, folder: Path, manifest: Manifest
) -> None:
    net.add("a", folder, manifest)
    net.add("b", folder, manifest)
    store = PeerStore(net.taker.fetch_manifest(MODEL, manifest.hash), MODEL)
    net.taker.fetch(manifest, manifest.parts(ALL, ends=True), store, MODEL)
    assert is_whole(store)
    for part in manifest.parts(ALL, ends=True):
        assert len({node for node, _ in net.asked(part)}) <= 1  # each part from one node


def test_only_what_is_wanted_is_fetched(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest)
    store = PeerStore(manifest, MODEL)
    net.taker.fetch(manifest, manifest.parts([LayerRange(1, 3)], ends=False), store, MODEL)
    assert {ask.part for _, ask in net.asks} == {"layer:1", "layer:2"}
    assert [store.has(ModelPart(index)) for index in range(LAYERS)] == [False, True, True, False]
    net.asks.clear()
    net.taker.fetch(manifest, manifest.parts([LayerRange(1, 4)], ends=False), store, MODEL)
    assert {ask.part for _, ask in net.asks} == {"layer:3"}


def test_progress_says_what_comes_from_whom(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest)
    calls: list[tuple[str, int, int]] = []
    parts = manifest.parts([LayerRange(1, 3)], ends=True)
    net.taker.fetch(manifest, parts, PeerStore(manifest, MODEL), MODEL, lambda *call: calls.append(call))
    total = sum(manifest.size(part) for part in parts)
    assert calls[0][0] == "fetching layers 1:3, the ends from a"
    assert calls[-1][1:] == (total, total)


def test_two_that_want_the_same_fetch_it_once(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest)
    parts = manifest.parts(ALL, ends=True)
    threads = [
        threading.Thread(target=net.taker.fetch, args=(manifest, parts, PeerStore(manifest, MODEL), MODEL)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_whole(PeerStore(manifest, MODEL))
    assert len(net.asks) == sum(manifest.size(part) > 0 for part in parts)


# ---- nodes that are of no use ----


def test_who_sends_wrong_bytes_is_named_and_another_is_asked(
    net: Neighbours, folder: Path, manifest: Manifest, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong_until_another_comes(ask: AskWeights, answer: WeightsPart) -> WeightsPart:
        net.add("good", folder, manifest)
        return wrong(ask, answer)

    net.add("bad", folder, manifest, wrong_until_another_comes)
    store = PeerStore(manifest, MODEL)
    with caplog.at_level(logging.WARNING):
        net.taker.fetch(manifest, manifest.parts(ALL, ends=False), store, MODEL)
    assert all(store.has(ModelPart(index)) for index in range(LAYERS))
    assert len([node for node, _ in net.asks if node == "bad"]) == 1
    [record] = caplog.records
    assert "from bad: it sent wrong bytes: the hash of model.layers." in record.getMessage()


def test_only_who_sent_all_of_a_part_is_blamed_for_it(
    small_pieces: None, hasty: Neighbours, folder: Path, manifest: Manifest
) -> None:
    """One sends half of a layer, wrong, and falls silent; the other goes on with it, and must not pay."""
    size = manifest.size(ModelPart(0))

    def half(ask: AskWeights, answer: WeightsPart) -> WeightsPart | None:
        return wrong(ask, answer) if ask.offset < size // 2 else None

    hasty.add("bad", folder, manifest, half)
    store = PeerStore(manifest, MODEL)
    with pytest.raises(WeightsUnavailable, match="bad did not answer"):
        hasty.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert store.fetched(ModelPart(0)) > 0
    hasty.givers.pop("bad").close()
    hasty.add("good", folder, manifest)
    hasty.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert store.has(ModelPart(0))


def test_who_does_not_answer_is_asked_twice_and_then_another(hasty: Neighbours, folder: Path, manifest: Manifest) -> None:
    def silent_until_another_comes(ask: AskWeights, answer: WeightsPart) -> None:
        if "b" not in hasty.givers:
            hasty.add("b", folder, manifest)

    hasty.add("a", folder, manifest, silent_until_another_comes)
    store = PeerStore(manifest, MODEL)
    hasty.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert [node for node, _ in hasty.asks] == ["a", "a", "b"]
    assert store.has(ModelPart(0))


def test_an_answer_that_was_lost_is_asked_for_again(
    small_pieces: None, hasty: Neighbours, folder: Path, manifest: Manifest
) -> None:
    lost: list[int] = []

    def lossy(ask: AskWeights, answer: WeightsPart) -> WeightsPart | None:
        if ask.offset in (3000, 5000) and lost.count(ask.offset) == 0:
            lost.append(ask.offset)
            return None
        return answer

    hasty.add("a", folder, manifest, lossy)
    store = PeerStore(manifest, MODEL)
    hasty.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert store.has(ModelPart(0))
    assert sorted(lost) == [3000, 5000]


def test_an_answer_that_comes_after_it_was_asked_for_again_is_ignored(
    small_pieces: None, hasty: Neighbours, folder: Path, manifest: Manifest
) -> None:
    late: list[WeightsPart] = []

    def slow_once(ask: AskWeights, answer: WeightsPart) -> WeightsPart | None:
        if ask.offset == 3000 and not late:
            late.append(answer)
            return None
        if ask.offset == 3000:
            hasty.taker.on_part("a", late[0])
        return answer

    hasty.add("a", folder, manifest, slow_once)
    store = PeerStore(manifest, MODEL)
    hasty.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert store.has(ModelPart(0))
    assert len([ask for _, ask in hasty.asks if ask.offset == 3000]) == 2


def test_a_node_that_holds_some_layers_only_helps_with_these(
    small_pieces: None, net: Neighbours, folder: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """It refuses several asks for a part at once, and is asked for the next part while these refusals come."""
    half = write_model(tmp_path / "half", shards=True)
    for index in (0, 1):
        (half / f"model-{index}.safetensors").unlink()
    net.add("half", half, manifest)
    net.add("whole", folder, manifest)
    store, parts = PeerStore(manifest, MODEL), manifest.parts(ALL, ends=True)
    for _ in range(20):
        net.taker.fetch(manifest, parts, store, MODEL)
        assert is_whole(store)
        for part in parts:
            store.discard(part)


def test_who_lacks_a_part_is_asked_for_the_others(net: Neighbours, folder: Path, manifest: Manifest, tmp_path: Path) -> None:
    without = write_model(tmp_path / "without", shards=True)
    (without / "model-1.safetensors").unlink()
    net.add("a", without, manifest)
    store = PeerStore(manifest, MODEL)
    with pytest.raises(WeightsUnavailable) as caught:
        net.taker.fetch(manifest, manifest.parts(ALL, ends=True), store, MODEL)
    assert caught.value.message == f"Layers 1:2 of {MODEL} could not be fetched: a says that it does not hold layer:1."
    assert all(store.has(part) for part in manifest.parts(ALL, ends=True) if part != ModelPart(1))
    net.add("b", folder, manifest)
    net.taker.fetch(manifest, manifest.parts(ALL, ends=True), store, MODEL)
    assert is_whole(store)


def test_a_busy_node_is_asked_again(small_pieces: None, net: Neighbours, folder: Path, manifest: Manifest) -> None:
    refused: set[int] = set()

    def busy(ask: AskWeights, answer: WeightsPart) -> WeightsPart:
        if ask.offset in refused or ask.offset % 2000:
            return answer
        refused.add(ask.offset)
        return WeightsPart(answer.request, reason="it is busy", retry_after=0.001)

    net.add("a", folder, manifest, busy)
    store = PeerStore(manifest, MODEL)
    net.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert store.has(ModelPart(0))
    assert len(refused) > 3


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: replace(answer, data=bytes(answer.data)[:-1]),
        lambda answer: replace(answer, total=answer.total + 1),
        lambda answer: replace(answer, offset=answer.offset + 1, total=answer.total + 1),
    ],
    ids=["too short", "another total", "another place"],
)
def test_an_answer_to_another_ask_is_not_taken(
    net: Neighbours, folder: Path, manifest: Manifest, change: Callable[[WeightsPart], WeightsPart]
) -> None:
    net.add("a", folder, manifest, lambda ask, answer: change(answer))
    with pytest.raises(WeightsUnavailable, match="a sent bytes that were not asked for"):
        net.taker.fetch(manifest, [ModelPart(0)], PeerStore(manifest, MODEL), MODEL)


def test_a_stranger_cannot_answer_for_another(hasty: Neighbours, folder: Path, manifest: Manifest) -> None:
    def spoken_for(ask: AskWeights, answer: WeightsPart) -> None:
        hasty.taker.on_part("stranger", answer)

    hasty.add("a", folder, manifest, spoken_for)
    with pytest.raises(WeightsUnavailable, match="a did not answer"):
        hasty.taker.fetch(manifest, [ModelPart(0)], PeerStore(manifest, MODEL), MODEL)


def test_the_error_names_what_is_missing_and_why_each_node_failed(hasty: Neighbours, folder: Path, manifest: Manifest) -> None:
    store = PeerStore(manifest, MODEL)
    with pytest.raises(WeightsUnavailable, match=r"Layers 0:2, 3:4, the ends of tiny could not be fetched: no node serves them"):
        hasty.taker.fetch(manifest, manifest.parts([LayerRange(0, 2), LayerRange(3, 4)], ends=True), store, MODEL)
    hasty.add("a", folder, manifest, silent)
    hasty.add("b", folder, manifest, lambda ask, answer: WeightsPart(ask.request, reason="no\x1b[2J"))
    with pytest.raises(WeightsUnavailable) as caught:
        hasty.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    assert "a did not answer for 0.6 seconds" in caught.value.message
    assert "b says that no?[2J" in caught.value.message  # it cannot write to a terminal
    assert caught.value.code == "weights_unavailable"


def test_a_full_disk_ends_the_fetch_and_blames_nobody(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest)
    store = PeerStore(manifest, MODEL)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))  # as real an error as a full disk
    try:
        with pytest.raises(ModelError, match="cannot be stored"):
            net.taker.fetch(manifest, manifest.parts(ALL, ends=True), store, MODEL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    net.taker.fetch(manifest, manifest.parts(ALL, ends=True), store, MODEL)
    assert is_whole(store)


# ---- manifests of others ----


def test_a_manifest_that_is_none_is_not_taken_and_the_next_node_is_asked(
    net: Neighbours, folder: Path, manifest: Manifest, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    net.add("a", folder, manifest, lambda ask, answer: replace(answer, data=b"x" * len(answer.data)))
    net.add("b", other, manifest_of(other, read_spec(other)))
    with pytest.raises(WeightsUnavailable) as caught:
        net.taker.fetch_manifest(MODEL, manifest.hash)
    assert "a sent an invalid manifest (Invalid manifest" in caught.value.message
    assert "b says that it has different weights for that model" in caught.value.message
    net.add("c", folder, manifest)
    assert net.taker.fetch_manifest(MODEL, manifest.hash) == manifest


def test_another_manifest_than_the_one_asked_for_is_not_taken(
    net: Neighbours, folder: Path, manifest: Manifest, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", seed=1)
    data = manifest_of(other, read_spec(other)).encode()
    net.add("a", folder, manifest, lambda ask, answer: replace(answer, total=len(data), data=data))
    with pytest.raises(WeightsUnavailable, match="a sent a different manifest"):
        net.taker.fetch_manifest(MODEL, manifest.hash)


def test_a_manifest_without_end_is_not_taken(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest, lambda ask, answer: replace(answer, total=1 << 40))
    with pytest.raises(WeightsUnavailable, match=f"a has a manifest of {1 << 40} bytes"):
        net.taker.fetch_manifest(MODEL)


# ---- breaking off and going on ----


def test_a_fetch_that_was_broken_off_goes_on_where_it_was(
    small_pieces: None, net: Neighbours, folder: Path, manifest: Manifest
) -> None:
    def leave_in_the_middle(ask: AskWeights, answer: WeightsPart) -> WeightsPart:
        if ask.offset == 10_000:
            net.taker.close()
        return answer

    net.add("a", folder, manifest, leave_in_the_middle)
    store = PeerStore(manifest, MODEL)
    with pytest.raises(WeightsUnavailable, match="was stopped"):
        net.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    have = store.fetched(ModelPart(0))
    assert 0 < have <= 11_000
    assert not store.has(ModelPart(0))

    again = Neighbours()
    again.add("a", folder, manifest)
    again.taker.fetch(manifest, [ModelPart(0)], store, MODEL)
    again.close()
    assert store.has(ModelPart(0))
    assert sorted(ask.offset for _, ask in again.asks) == list(range(have, manifest.size(ModelPart(0)), 1000))


def test_a_taker_that_was_closed_asks_nobody(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest)
    net.taker.close()
    with pytest.raises(WeightsUnavailable, match="was stopped"):
        net.taker.fetch(manifest, [ModelPart(0)], PeerStore(manifest, MODEL), MODEL)
    with pytest.raises(WeightsUnavailable, match="was stopped"):
        net.taker.fetch_manifest(MODEL)
    assert net.asks == []


def test_whoever_watches_can_break_it_off(net: Neighbours, folder: Path, manifest: Manifest) -> None:
    net.add("a", folder, manifest, silent)

    def impatient(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        net.taker.fetch(manifest, [ModelPart(0)], PeerStore(manifest, MODEL), MODEL, impatient)


# ---- a real model, over routers ----


@pytest.fixture
def routers() -> Iterator[dict[str, tuple[InProcessRouter, Wire]]]:
    hub = Hub()
    made = {name: InProcessRouter(hub, name) for name in ("a", "b")}
    found = {name: (router, Wire(router)) for name, router in made.items()}
    yield found
    for router, wire in found.values():
        wire.close()
        router.close()


@pytest.mark.slow
def test_layers_of_the_real_model_compute_the_same_on_the_other_node(
    default_model_folder: Path, routers: dict[str, tuple[InProcessRouter, Wire]]
) -> None:
    layers = LayerRange(9, 30)
    spec = read_spec(default_model_folder)
    manifest = manifest_of(default_model_folder, spec)
    (router_a, wire_a), (router_b, wire_b) = routers["a"], routers["b"]
    giver = WeightsServer(lambda model: (default_model_folder, manifest), wire_a.send, rate=1e12, unsent=wire_a.waiting)
    taker = WeightsFetcher(wire_b.send, lambda: ["a"])

    def receive(sender: str, data: bytes) -> None:
        message: Message = decode(data)
        if isinstance(message, AskWeights):
            giver.on_ask(sender, message)
        elif isinstance(message, WeightsPart):
            taker.on_part(sender, message)

    for router in (router_a, router_b):
        router.start(receive, lambda: None)
    found = taker.fetch_manifest("smollm2-135m")
    store = PeerStore(found, "smollm2-135m")
    taker.fetch(found, found.parts([layers], ends=False), store, "smollm2-135m")
    taker.close()
    giver.close()

    fetched = manifest_of(store.folder, found.spec)
    assert [fetched.layers[index] for index in layers.layers()] == [manifest.layers[index] for index in layers.layers()]
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "kv_blocks": 2, "block_size": 16}
    here = LlmModel(found.spec, layers, WeightFiles(store.folder), **how)
    there = LlmModel(spec, layers, WeightFiles(default_model_folder), **how)
    assert here.weight_hash == there.weight_hash == manifest.layer_hash(layers)
    hidden = torch.randn(8, spec.hidden, generator=torch.Generator().manual_seed(1))
    assert torch.equal(here.process(hidden, [BatchPiece(0, 8, [1])]), there.process(hidden, [BatchPiece(0, 8, [1])]))
