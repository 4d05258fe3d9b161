"""Nodes that place themselves, in one process: real memberships, placements and weights of a tiny model; no tokens are made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.config.engine import EngineConfig
from penstock.config.network import NetworkConfig
from penstock.config.node import HostedModelConfig, NodeConfig
from penstock.domain.topology import LayerRange
from penstock.engine.hosted_model import HostedLayers, host
from penstock.engine.routing.config import RoutingConfig
from penstock.model.segment import LlmModel
from penstock.network.in_process import Hub, InProcessRouter
from penstock.peers.membership import Membership
from penstock.pipes.loading.model_manager import FoundModel, LoadedModel, ModelManager
from penstock.pipes.pipe import Pipe
from penstock.placement.agent import PlacementAgent

LAYERS = 12
NETWORK = NetworkConfig(listen=("tcp/127.0.0.1:1",), connect=("tcp/127.0.0.1:2",), open=True)


@dataclass
class Loads:
    """What was loaded where, and what was missing everywhere when it was."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    taken: list[tuple[str, LayerRange]] = field(default_factory=list)
    wasted: list[str] = field(default_factory=list)

    def begin(self, node: str, layers: LayerRange) -> None:
        with self.lock:
            held = {layer for _, taken in self.taken for layer in taken.layers()}
            if held & set(layers.layers()) and len(held) < LAYERS:
                self.wasted.append(f"{node} loads {layers} although {sorted(set(range(LAYERS)) - held)} are missing")
            self.taken.append((node, layers))


class FleetNode:
    def __init__(
        self,
        hub: Hub,
        name: str,
        model: Path,
        room: int,
        loads: Loads,
        *,
        max_pipes: int = 1,
        accept_weights: tuple[str, ...] = (),
        **settings: object,
    ) -> None:
        self.name, self._loads = name, loads
        hosted = HostedModelConfig(
            id=str(model),
            device="cpu",
            dtype="float32",
            load_ends=False,
            max_memory=memory_for(model, room),
            **settings,  # type: ignore[arg-type]
        )
        engine = EngineConfig(block_size=8)
        network = replace(NETWORK, accept_weights=accept_weights)
        self.config = NodeConfig(node_id=name, models=(hosted,), network=network, engine=engine, max_pipes=max_pipes)
        self.membership = Membership(InProcessRouter(hub, name), network, node=name, epoch=time.time_ns())
        self.placing: PlacementAgent | None = None
        self.hosted: HostedLayers | None = None

    def start(self) -> None:
        self.membership.start()
        self.placing = PlacementAgent(self.config.models[0], self.config, self.membership)
        load = self.placing._manager.load_layers

        def noted(found: FoundModel, layers: LayerRange, blocks: int) -> LlmModel:
            self._loads.begin(self.name, layers)
            return load(found, layers, blocks)

        self.placing._manager.load_layers = noted  # type: ignore[method-assign]
        self.hosted = self.placing.open(self._host)
        self.placing.watch()

    def _host(self, loaded: LoadedModel, pipe: Pipe) -> HostedLayers:
        return host(loaded, pipe, self.config.engine, routing=RoutingConfig(epoch=self.membership.epoch))

    @property
    def held(self) -> list[str]:
        return [] if self.hosted is None else [str(segment.layers) for segment in self.hosted.engine.pipe.segments]

    def stop(self) -> None:
        if self.placing is not None:
            self.placing.close()
        if self.hosted is not None:
            self.hosted.stop()
        self.membership.leave()


def memory_for(model: Path, layers: int) -> int:
    """A budget that so many layers fit into."""
    manager = ModelManager(EngineConfig(block_size=8))
    found = manager.find(str(model), model, dtype="float32", device="cpu")
    footprint = manager.budget(found, ends=False, kv_memory=None, max_memory=None).footprint
    return (footprint.minimum(layers, ends=False) + footprint.minimum(layers + 1, ends=False)) // 2


@contextmanager
def running(*nodes: FleetNode) -> Iterator[None]:
    """All started at the same instant."""
    together = threading.Barrier(len(nodes))
    failures: list[BaseException] = []

    def start(node: FleetNode) -> None:
        together.wait()
        try:
            node.start()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(node,)) for node in nodes]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        yield
    finally:
        for node in nodes:
            node.stop()
