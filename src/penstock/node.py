"""Node: wires one node. Its models, the engines that run them, and the door in front."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from penstock.config.node import HostedModelConfig, NodeConfig
from penstock.doors.listener import Listener, begin_to_listen, take_port
from penstock.doors.openai.served import Served
from penstock.doors.openai.server import OAIHttpServer
from penstock.engine.hosted_model import HostedModel
from penstock.pipes.model_manager import ModelManager
from penstock.progress import Progress, silent


class Node:
    """Takes its port when made, loads its models when entered, and serves until it is told to leave.

    with Node(config, api_key=None) as node:
        node.serve()
    """

    def __init__(self, config: NodeConfig, *, api_key: str | None, progress: Progress = silent) -> None:
        self.config, self._api_key, self._progress = config, api_key, progress
        self._socket = take_port(config.server.host, config.server.port)
        host, port = self._socket.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # one of every address
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"  # where clients find it
        self.models: list[HostedModel] = []

    @property
    def open_jobs(self) -> int:
        return sum(len(hosted.jobs.open_jobs) for hosted in self.models)

    def __enter__(self) -> Node:
        try:
            self.models = [self._load(model) for model in self.config.models]
        except BaseException:
            self._socket.close()
            raise
        for hosted in self.models:
            hosted.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._socket.close()

    def serve(self, *, on_ready: Callable[[], None] = lambda: None, on_leaving: Callable[[], None] = lambda: None) -> None:
        config = self.config
        door = OAIHttpServer(
            {hosted.name: Served(hosted) for hosted in self.models},
            node_id=config.node_id,
            server=config.server,
            limits=config.limits,
            aliases=config.aliases,
            api_key=self._api_key,
        )
        listener = Listener(door, patience=config.limits.drain_timeout, on_ready=on_ready, on_leaving=on_leaving, end=self._stop)
        begin_to_listen(self._socket)
        listener.run(sockets=[self._socket])

    def _load(self, model: HostedModelConfig) -> HostedModel:
        config = self.config
        loaded = ModelManager(config.engine, self._progress).load(
            model.id,
            dtype=model.dtype,
            device=model.device,
            segments=model.segments,
            kv_memory=model.kv_memory,
            max_memory=model.max_memory,
        )
        return HostedModel(loaded, config.engine, max_jobs=config.limits.max_jobs, node_id=config.node_id)

    def _stop(self) -> None:
        for hosted in self.models:
            hosted.stop()
