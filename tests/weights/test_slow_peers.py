"""Weights from nodes that are slow: whoever has time takes over, and with nobody else they go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.weights import fetcher as weights_taker
from penstock.weights import request_tracker as weights_stream
from penstock.weights.manifest import Manifest, ModelPart
from penstock.weights.peer_store import PeerStore
from tests.tiny_weights import write_model
from tests.weights.neighbours import MODEL, Neighbours

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a part of a tiny model takes many."""
    monkeypatch.setattr(weights_stream, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weights_taker, "PIECE_BYTES", 1000)


class Ticking:
    """A node that gives a piece in five seconds, and their clock: it goes on once the piece is given and progress reported."""

    def __init__(self) -> None:
        self.now, self._given_at = 100.0, 0.0

    def __call__(self) -> float:
        return self.now

    def progress(self, what: str, done: int, total: int) -> None:
        if self._given_at == self.now:
            self.now += 5

    def drip(self, ask: AskWeights, answer: WeightsPart) -> WeightsPart:
        if self._given_at == self.now:
            return WeightsPart(answer.request, reason="it is busy", retry_after=0.001)
        self._given_at = self.now
        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    monkeypatch.setattr(weights_taker, "POLL_INTERVAL_S", 0.01)
    return Ticking()


@pytest.fixture
def slowly(clock: Ticking) -> Iterator[Neighbours]:
    net = Neighbours(clock=clock)
    yield net
    net.close()


def test_an_idle_node_takes_over_from_a_slow_one(slowly: Neighbours, clock: Ticking, folder: Path, manifest: Manifest) -> None:
    slowly.add("slow", folder, manifest, clock.drip)
    slowly.add("idle", folder, manifest)
    store = PeerStore(manifest, MODEL)
    slowly.taker.fetch(manifest, [ModelPart(0)], store, MODEL, clock.progress)
    assert store.has(ModelPart(0))
    offsets = {node: [ask.offset for other, ask in slowly.asks if other == node] for node in ("slow", "idle")}
    assert min(offsets["slow"]) == 0 < min(offsets["idle"])  # what came from the slow one was kept
    assert max(offsets["slow"]) < max(offsets["idle"])


def test_a_slow_node_goes_on_where_no_other_has_the_part(
    slowly: Neighbours, clock: Ticking, folder: Path, manifest: Manifest, tmp_path: Path
) -> None:
    without = write_model(tmp_path / "without", shards=True)
    (without / "model-0.safetensors").unlink()
    slowly.add("slow", folder, manifest, clock.drip)
    slowly.add("idle", without, manifest)
    store = PeerStore(manifest, MODEL)
    slowly.taker.fetch(manifest, [ModelPart(0)], store, MODEL, clock.progress)
    assert store.has(ModelPart(0))
    assert clock.now - 100 > 2 * weights_stream.RATE_PERIOD_S


def test_a_manifest_is_taken_from_who_is_not_slow(slowly: Neighbours, clock: Ticking, folder: Path, manifest: Manifest) -> None:
    def sluggish(ask: AskWeights, answer: WeightsPart) -> WeightsPart:
        clock.now += weights_stream.RATE_PERIOD_S
        return answer

    slowly.add("a", folder, manifest, sluggish)
    slowly.add("b", folder, manifest)
    assert slowly.taker.fetch_manifest(MODEL) == manifest
    assert slowly.asks[-1][0] == "b"
    slowly.givers.pop("b").close()
    assert slowly.taker.fetch_manifest(MODEL) == manifest  # there is nobody else
