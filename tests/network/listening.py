"""Nodes with real layers in one process, and every byte that leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from penstock.config.engine import EngineConfig
from penstock.config.network import NetworkConfig
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import JobDone, JobFailed, TokensOut
from penstock.engine.hosted_model import HostedLayers, HostedModel, host
from penstock.engine.routing.config import RoutingConfig
from penstock.model.sources import DEFAULT_MODEL
from penstock.network.in_process import Hub, InProcessRouter
from penstock.network.router import OnChange, OnMessage
from penstock.network.stream import Stream
from penstock.peers.membership import Membership
from penstock.pipes.loading.model_manager import ModelManager

CONFIG = EngineConfig(block_size=16, chunk=32)


class ListeningRouter:
    """Keeps all that leaves its node."""

    def __init__(self, router: InProcessRouter) -> None:
        self._router = router
        self.records_sent: list[bytes] = []
        self.sent: list[bytes] = []

    @property
    def node_id(self) -> str:
        return self._router.node_id

    @property
    def seals(self) -> bool:
        return self._router.seals

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        self._router.start(on_message, on_change)

    def publish(self, record: bytes) -> None:
        self.records_sent.append(record)
        self._router.publish(record)

    def records(self) -> Mapping[str, bytes]:
        return self._router.records()

    def send(self, node: str, data: bytes, stream: Stream = Stream.DATA) -> None:
        self.sent.append(data)
        self._router.send(node, data, stream)

    def refused(self) -> Mapping[str, int]:
        return self._router.refused()

    @property
    def left(self) -> list[bytes]:
        return [*self.records_sent, *self.sent]

    def close(self) -> None:
        self._router.close()


class Node:
    def __init__(
        self,
        hub: Hub,
        name: str,
        segments: list[tuple[int, int]],
        *,
        ends: bool = False,
        wire: Literal["auto", "fp32", "bf16", "int8"] = "auto",
        model: str = DEFAULT_MODEL,
        dtype: str = "auto",
    ) -> None:
        self.router = ListeningRouter(InProcessRouter(hub, name))
        self.membership = Membership(self.router, NetworkConfig(wire=wire), node=name, epoch=1)
        loaded = ModelManager(CONFIG).load(
            model, dtype=dtype, device="cpu", segments=segments, kv_memory=64 << 20, load_ends=ends, whole=False
        )
        self.ends = loaded.ends
        self.hosted: HostedLayers | HostedModel = host(
            loaded, self.membership.pipes.make(loaded, CONFIG.block_size), CONFIG, routing=RoutingConfig(epoch=1)
        )
        self.hosted.start()
        self.membership.start()
        self.membership.host(self.hosted)

    def close(self) -> None:
        self.hosted.stop()
        self.membership.leave()


class Exchange(NamedTuple):
    """Text and token ids of a prompt and its answer."""

    text: str
    ids: list[int]


def answer(node: Node, text: str) -> Exchange:
    """Ask, and return the text and ids of both sides."""
    assert isinstance(node.hosted, HostedModel)
    handle = node.hosted.jobs.start_job(
        JobRequest(prompt=text, sampling=SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    )
    ids, said = list(handle.prompt_ids), ""
    for update in handle:
        if isinstance(update, TokensOut):
            ids += update.token_ids
            said += update.text
        assert not isinstance(update, JobFailed), update
    assert isinstance(update, JobDone)
    return Exchange(f"{text} {said}", ids)
