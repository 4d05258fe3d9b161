"""A member that publishes nonsense or lies changes nothing for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.domain.meta_model import MetaModel, NodeRecord, Offer
from penstock.domain.topology import LayerRange
from penstock.network.codec import PROTOCOL, encode_record
from penstock.network.in_process import Hub, InProcessRouter
from penstock.placement import controller as placer
from tests.network.nets import wait_for
from tests.placement.fleet import LAYERS, FleetNode, Loads, running
from tests.tiny_weights import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"SETTLE_S": 0.15, "CLAIM_DELAY_S": 0.15, "GAP_DELAY_S": 0.5}.items():
        monkeypatch.setattr(placer, name, seconds)
    monkeypatch.setattr("penstock.placement.agent.SETTLE_S", 0.15)
    monkeypatch.setattr("penstock.peers.membership.FIRST_RECORD_TIMEOUT_S", 0.1)
    monkeypatch.setattr("penstock.peers.membership.FIRST_OFFER_TIMEOUT_S", 0.1)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def node(hub: Hub, model: Path) -> Callable[[str, int], FleetNode]:
    loads = Loads()
    return lambda name, room: FleetNode(hub, name, model, room, loads)


@pytest.fixture
def liar(hub: Hub) -> Iterator[InProcessRouter]:
    router = InProcessRouter(hub, "m")
    router.start(lambda sender, data: None, lambda: None)
    yield router
    router.close()


def segment(model: Path, layers: LayerRange, shape: str, **lies: Any) -> MetaModel:
    return MetaModel(
        node="m",
        process="1.0",
        model=str(model),
        pipe="p",
        shape=shape,
        num_layers=LAYERS,
        layers=layers,
        weight_hash="0" * 64,
        dtype="float32",
        device="cpu",
        kv_blocks=100,
        kv_free=100,
        block_size=8,
        **lies,
    )


def record(*segments: MetaModel, offers: tuple[Offer, ...] = ()) -> NodeRecord:
    return NodeRecord(
        node="m", epoch=time.time_ns(), version=__version__, protocol=PROTOCOL, pid=1, segments=segments, offers=offers
    )


def shape_of(node: FleetNode) -> str:
    assert node.hosted is not None
    return node.hosted.engine.pipe.shape


def test_layers_with_other_weights_are_neither_used_nor_counted_on(
    node: Callable[[str, int], FleetNode], liar: InProcessRouter, model: Path
) -> None:
    a, b = node("a", 5), node("b", 12)
    with running(a):
        liar.publish(encode_record(record(segment(model, LayerRange(5, 12), shape_of(a)))))
        wait_for(lambda: len(a.membership.records) == 2, "the liar's record")
        assert not a.hosted.engine.pipe.is_complete()  # type: ignore[union-attr]
        with running(b):
            assert b.held == ["5:12"]
            assert b.hosted.engine.pipe.is_complete()  # type: ignore[union-attr]
            path = b.hosted.engine.pipe.path()  # type: ignore[union-attr]
            assert path is not None
            assert {hop.node for hop in path.hops} == {"a", "b"}


@pytest.mark.parametrize(
    "lie",
    [
        {"num_layers": 5},
        {"shape": "another"},
        {"model": "another"},
        {"block_size": 16},
    ],
)
def test_segments_of_what_the_model_is_not_fill_no_gap(
    lie: dict[str, Any], node: Callable[[str, int], FleetNode], liar: InProcessRouter, model: Path
) -> None:
    a, b = node("a", 5), node("b", 12)
    with running(a):
        layers = LayerRange(0, lie["num_layers"]) if "num_layers" in lie else LayerRange(5, 12)
        lying = replace(segment(model, layers, shape_of(a)), **lie)
        liar.publish(encode_record(record(lying)))
        with running(b):
            assert b.held == ["5:12"]
            wait_for(lambda: a.hosted.engine.pipe.is_complete(), "a complete pipe")  # type: ignore[union-attr]


def test_what_cannot_be_a_record_is_refused_and_its_node_named(
    node: Callable[[str, int], FleetNode], liar: InProcessRouter, model: Path
) -> None:
    a = node("a", 12)
    with running(a):
        shape = shape_of(a)
        good = record(segment(model, LayerRange(0, 12), shape))
        hostile = [
            b"",
            b"\x00" * 100,
            encode_record(good)[:-5],
            encode_record(replace(good, node="a")),  # in another's name
            encode_record(record(replace(good.segments[0], node="a"))),
            encode_record(record(replace(good.segments[0], layers=LayerRange(4, 99)))),
            encode_record(record(replace(good.segments[0], kv_free=10**9))),
            encode_record(
                record(offers=(Offer(model=str(model), shape=shape, num_layers=12, room=1, claims=(LayerRange(9, 40),)),))
            ),
            encode_record(record(*[good.segments[0]] * 2000)),
            encode_record(replace(good, protocol=99)),
        ]
        for data in hostile:
            liar.publish(data)
            wait_for(lambda: "m" in a.membership.unreadable_peers, "the refusal")
            assert [found.node for found in a.membership.records] == ["a"]
            assert a.hosted.engine.pipe.is_complete()  # type: ignore[union-attr]
            liar.publish(encode_record(record()))
            wait_for(lambda: "m" not in a.membership.unreadable_peers, "a record that can be read")
