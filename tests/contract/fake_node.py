"""A node without a model: its API, its engine over fake layers and its place in a network of two are real."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from starlette.testclient import TestClient
from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.config.network import NetworkConfig
from penstock.config.node import WorkspaceConfig
from penstock.domain.messages import CloseRoute
from penstock.domain.meta_model import Link, MetaModel, NodeRecord, Offer
from penstock.domain.request import JobRequest
from penstock.domain.route import RouteId
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.job_operations import ALL_JOBS
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.jobs.backlog import Backlog
from penstock.engine.engine import Engine
from penstock.engine.hosted_model import HostedModel
from penstock.engine.routing.config import RoutingConfig
from penstock.model.architecture.spec import spec_from_config
from penstock.model.batch import BatchPiece
from penstock.network.codec import PROTOCOL, encode_record
from penstock.network.in_process import Hub, InProcessRouter
from penstock.peers.membership import Membership
from penstock.peers.report import report
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.store.workspace import Workspace
from tests.engine.fakes import EOS, VOCAB, FakeEnds, FakeSegment, FakeStream
from tests.network.nets import wait_for

MODEL, LAYERS, BLOCKS = "fake", 4, 32
CONFIG = EngineConfig(block_size=4, chunk=8)
NETWORK = NetworkConfig(name="home", listen=("tcp/127.0.0.1:1",), connect=("tcp/127.0.0.1:2",), open=True)
MODEL_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


class TokenizedEnds(FakeEnds):
    tokenizer = SimpleNamespace()  # prompts are token ids here


class HoldingSegment(FakeSegment):
    """Layers that can be held, a few passes from now: then the job that runs stays as it is while somebody looks."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self._last_pass = sys.maxsize
        self._changed = threading.Condition()

    def hold(self) -> None:
        self._last_pass = len(self.passes) + 4

    def go_on(self) -> None:
        with self._changed:
            self._last_pass = sys.maxsize
            self._changed.notify_all()

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: len(self.passes) < self._last_pass, timeout=60)
        return super().process(hidden, pieces, layers)


class CountingRouter(InProcessRouter):
    """A router that has refused messages."""

    def refused_from(self) -> dict[str, int]:
        return {"cellar": 3}


@dataclass(frozen=True)
class FakeNode:
    membership: Membership
    client: TestClient

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def fake_node(folder: Path) -> Iterator[FakeNode]:
    """`folder` is for its workspace. One job is done, one was cancelled, and one is open. Another node of the network holds
    layers too, also of a model that is not complete, loads more, and has room; a third one publishes what nobody can read."""
    hub = Hub()
    membership = Membership(CountingRouter(hub, "kitchen"), NETWORK, node="kitchen", epoch=1)
    spec = spec_from_config(MODEL_CONFIG, (EOS,))
    layers = HoldingSegment(0, LAYERS, BLOCKS, CONFIG.block_size)
    loaded = LoadedModel(MODEL, Path(), spec, torch.float32, torch.device("cpu"), (layers,), None)  # type: ignore[arg-type]
    ends = TokenizedEnds()
    pipe = membership.pipes.make(loaded, CONFIG.block_size)
    engine = Engine(CONFIG, pipe, ends, lambda skip_special: FakeStream(), routing=RoutingConfig(epoch=1))
    hosted = HostedModel(loaded, ends, engine)  # type: ignore[arg-type]
    cellar, attic = InProcessRouter(hub, "cellar"), InProcessRouter(hub, "attic")
    hosted.start()
    membership.start()
    try:
        membership.host(hosted)
        cellar.start(lambda sender, data: None, lambda: None)
        cellar.publish(encode_record(_cellar(pipe.shape)))
        attic.start(lambda sender, data: None, lambda: None)
        attic.publish(b"not a record")
        membership.publish()
        membership.wire.send("cellar", CloseRoute(RouteId("kitchen", 1, 1)))
        wait_for(membership.wire.traffic, "the first message")
        engine.stats.refused["malformed"] = 1
        list(hosted.jobs.start_job(_request(max_tokens=3)))
        layers.hold()
        cancelled = hosted.jobs.start_job(_request())
        next(iter(cancelled))
        cancelled.cancel()
        layers.go_on()
        list(cancelled)
        layers.hold()
        open_job = hosted.jobs.start_job(_request())
        next(iter(open_job))
        yield FakeNode(membership, _client(hosted, membership, folder))
    finally:
        layers.go_on()
        hosted.stop()
        membership.leave()
        cellar.close()
        attic.close()


def _request(max_tokens: int = 100) -> JobRequest:
    return JobRequest(prompt=[1, 2, 3], sampling=SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens))


def _client(hosted: HostedModel, membership: Membership, folder: Path) -> TestClient:
    api = ApiConfig(ModelCatalog({}, {"other": MODEL}))
    backlog = Backlog(Workspace(folder, create=True), WorkspaceConfig(), api, ALL_JOBS)
    server = OAIHttpServer(
        api,
        node_id="kitchen",
        layers=[hosted],
        network=lambda: report(membership),
        backlog=backlog,
        certificates=lambda: {"network": datetime.now(UTC)},
    )
    return TestClient(server.app, base_url="http://127.0.0.1")


def _cellar(shape: str) -> NodeRecord:
    held = MetaModel(
        node="cellar",
        process="1.0",
        model=MODEL,
        pipe="3f2a",
        shape=shape,
        num_layers=LAYERS,
        layers=LayerRange(2, LAYERS),
        weight_hash="other",
        dtype="float32",
        device="cpu",
        kv_blocks=BLOCKS,
        kv_free=BLOCKS,
        block_size=CONFIG.block_size,
    )
    half = replace(held, process="1.1", model="half", pipe=f"half/{shape}")
    offer = Offer(model=MODEL, shape=shape, num_layers=LAYERS, room=2, claims=(LayerRange(0, 2),))
    return NodeRecord(
        node="cellar",
        epoch=1,
        version="0",
        protocol=PROTOCOL,
        pid=1,
        segments=(held, half),
        offers=(offer,),
        links=(Link("kitchen", 0.0012, 2.4e6),),
    )
