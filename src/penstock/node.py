"""Node: wires one node. Its models, the engines that run them, and the doors in front."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.config.node import HostedModelConfig, NodeConfig, ServerConfig, WorkspaceConfig
from penstock.doors.access.keys import Keys
from penstock.doors.access.usage_log import UsageLog
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.job_operations import ALL_JOBS
from penstock.doors.app.listener import Listener, bind_port, ignoring_signals, start_listening, wait_for_signal
from penstock.doors.app.server import OAIHttpServer
from penstock.doors.connections.tls import ServerCertificate
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.jobs.backlog import Backlog
from penstock.engine.hosted_model import HostedLayers, HostedModel, host, host_standalone
from penstock.engine.routing.config import RoutingConfig
from penstock.errors import NotReady, PenstockError, UntrustedWeights, WorkspaceError
from penstock.pipes.loading.model_manager import LoadedModel, ModelManager
from penstock.pipes.pipe import Pipe
from penstock.progress import Progress, silent
from penstock.workspace.batch.batches import open_batches
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.pool import JobEnd

if TYPE_CHECKING:
    from penstock.peers.authority_duties import AuthorityDuties
    from penstock.peers.membership import Membership
    from penstock.placement.agent import PlacementAgent
    from penstock.placement.preview import Preview


@dataclass(frozen=True, slots=True)
class Drained:
    """Counts of jobs that ended here (`done`, `failed`), and of those `left`: they need `models` that this node does not host, or
    come after one that does. `blocked` jobs cannot be taken; the log says why. `open_batches` have not ended."""

    done: int
    failed: int
    left: int
    models: Sequence[str] = ()
    blocked: int = 0
    open_batches: int = 0


logger = logging.getLogger(__name__)

LAYERS_TIMEOUT_S = 10.0  # to wait until the network holds all layers of the models
LAYERS_POLL_S = 0.1
MIN_LEASE_S = 120.0  # how long a route outlives the last message of its origin: longer than any pass takes


class Node:
    """A node. Binds its port, if it has one, and loads its models when entered; then serves until it is stopped.

        with Node(config) as node:
            node.serve()

    keys: who may use the API; without them, everyone who can reach it.
    door: False for a node that only drains a workspace and opens no port, whatever its settings say.
    """

    def __init__(self, config: NodeConfig, *, keys: Keys | None = None, progress: Progress = silent, door: bool = True) -> None:
        self.config = config
        self.keys = keys or Keys(None, None)
        self.workspace: Workspace | None = None
        self.hosted: list[HostedLayers] = []
        self.membership: Membership | None = None
        self._progress = progress
        self.certificate: ServerCertificate | None = None
        self._door = door and config.opens_port
        self._socket: socket.socket | None = None
        self._epoch = time.time_ns() // 1_000_000  # each start of a node has a later one
        self._route_numbers = itertools.count()
        self._agents: list[PlacementAgent] = []
        self._duties: AuthorityDuties | None = None

    @property
    def url(self) -> str:
        """Where clients find it; empty for a node without a port."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # one of every address
        scheme = "http"
        if self.certificate is not None:
            scheme, host = "https", self.certificate.name_for(host)
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def models(self) -> list[HostedModel]:
        """The models that this node's API offers: those whose ends it has."""
        return [hosted for hosted in self.hosted if isinstance(hosted, HostedModel)]

    @property
    def open_jobs(self) -> int:
        """Number of answers that clients are waiting for; jobs of a workspace are not counted."""
        return sum(hosted.jobs.counted_jobs for hosted in self.models)

    def __enter__(self) -> Node:
        config = self.config
        try:
            if self._door:
                self.certificate = _certificate(config.server)
                self._socket = bind_port(config.server.host, config.server.port)  # fail before loading a model
            self.workspace = _workspace(config.workspace)
            if config.network.enabled:
                self.membership = self._join()
            if self.membership is None:
                for model in config.models:
                    self.hosted.append(self._load(model))
                for hosted in self.hosted:
                    hosted.start()
            else:
                self._place(self.membership)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def wait_for_layers(self) -> None:
        """Wait until the network holds all layers of this node's models; raise NotReady if it does not soon."""
        end = time.monotonic() + LAYERS_TIMEOUT_S
        for hosted in self.models:
            while missing := hosted.engine.pipe.explain():
                if time.monotonic() > end:
                    hint = "Start the nodes that hold them (penstock serve), or load the model here (--alone)."
                    raise NotReady(missing, hint=hint)
                time.sleep(LAYERS_POLL_S)

    def close(self) -> None:
        """Leave the network, if there is one, and stop."""
        self._leave()

    def serve(self, *, on_ready: Callable[[], None] = lambda: None, on_leaving: Callable[[], None] = lambda: None) -> None:
        api = self._api()
        backlog = None if self.workspace is None else self._backlog(self.workspace, api)
        api.usage.start()

        def leaving() -> None:
            on_leaving()
            if backlog is not None:
                threading.Thread(target=backlog.stop, daemon=True).start()
            if self.membership is not None:
                threading.Thread(target=self.membership.announce_leaving, daemon=True).start()

        run = partial(wait_for_signal, on_ready=on_ready, on_leaving=leaving)
        if self._socket is not None:
            run = partial(self._listener(api, backlog, on_ready, leaving).run, sockets=[self._socket])
            start_listening(self._socket)
        try:
            if backlog is not None:
                backlog.start()
            run()
        finally:
            if backlog is not None:
                with ignoring_signals():  # it takes a second, and jobs that are not given back count as those of a dead server
                    backlog.stop()
            api.usage.stop()
        if self.membership is not None:
            self.membership.wait_until_unused(self.config.limits.drain_timeout)

    def _listener(
        self, api: ApiConfig, backlog: Backlog | None, on_ready: Callable[[], None], on_leaving: Callable[[], None]
    ) -> Listener:
        door = OAIHttpServer(
            api,
            node_id=self.config.node_id,
            layers=[hosted for hosted in self.hosted if not isinstance(hosted, HostedModel)],
            network=dict if self.membership is None else self._report,
            backlog=backlog,
            certificates=self._certificate_ends,
        )
        tls = None if self.certificate is None else self.certificate.context
        return Listener(door, self.config.limits, tls=tls, on_ready=on_ready, on_leaving=on_leaving, abort=self._stop)

    def drain(self, on_end: Callable[[JobEnd], None] = lambda end: None) -> Drained:
        """Work on the workspace until it is empty."""
        assert self.workspace is not None
        api = self._api()
        backlog = self._backlog(self.workspace, api, on_end)
        api.usage.start()
        backlog.batches.start()
        try:
            left = backlog.pool.drain()
        finally:
            backlog.batches.stop()
            api.usage.stop()
        pool = backlog.pool
        return Drained(
            done=pool.done,
            failed=pool.failed,
            left=len(left),
            models=sorted({job.model or "" for job in left}),
            blocked=len(pool.blocked),
            open_batches=len(open_batches(self.workspace)),
        )

    def _certificate_ends(self) -> dict[str, datetime]:
        """When the certificates of the API and of the network expire."""
        ends = {} if self.certificate is None else {"api": self.certificate.expires}
        if self.membership is not None and self.config.network.certificate_file is not None:
            from penstock.network.trust.expiry import expires

            with suppress(PenstockError):  # it is being replaced; status and log warn of one that cannot be read
                ends["network"] = expires(self.config.network.certificate_file)
        return ends

    def _report(self) -> dict[str, Any]:
        from penstock.peers.report import report

        assert self.membership is not None
        return report(self.membership)

    def _api(self) -> ApiConfig:
        catalog = ModelCatalog({hosted.name: ServedModel(hosted) for hosted in self.models}, self.config.aliases)
        return ApiConfig(catalog, self.config.server, self.config.limits, self.keys, UsageLog(self.keys.path))

    def _backlog(self, workspace: Workspace, api: ApiConfig, on_end: Callable[[JobEnd], None] = lambda end: None) -> Backlog:
        return Backlog(workspace, self.config.workspace, api, ALL_JOBS, on_end=on_end)

    def _load(self, model: HostedModelConfig) -> HostedLayers:
        """Load a whole model, without a network."""
        config = self.config
        loaded = ModelManager(config.engine, self._progress).load(
            model.id,
            dtype=model.dtype,
            device=model.device,
            quant=model.quant,
            segments=model.segments,
            kv_memory=model.kv_memory,
            max_memory=model.max_memory,
        )
        return host_standalone(loaded, config.engine, node=config.node_id, max_jobs=config.limits.max_jobs)

    def _place(self, membership: Membership) -> None:
        """Load the layers that the network needs of each model, one model at a time: each sees the memory that is left."""
        from penstock.peers.authority_duties import AuthorityDuties
        from penstock.placement.agent import PlacementAgent

        membership.start()
        self._duties = AuthorityDuties.of(self.config.network)
        if self._duties is not None:
            self._duties.start()
        wanted = self._wanted(membership)
        for model in wanted:
            agent = PlacementAgent(model, self.config, membership, self._progress, share=1 / len(wanted))
            self._agents.append(agent)
            agent.open(self._host)
        for agent in self._agents:
            agent.watch()

    def preview(self) -> list[Preview]:
        """Return what would be loaded now, and why, or raise what a start would raise. Loads nothing, binds no port for long, and
        works without entering the node."""
        from penstock.placement.agent import PlacementAgent
        from penstock.placement.preview import preview_alone

        config = self.config
        if self._door:
            _certificate(config.server)
            bind_port(config.server.host, config.server.port).close()
        if not config.network.enabled:
            return [preview_alone(model, config, self._progress) for model in config.models]
        membership = self._join()
        try:
            membership.start()
            wanted = self._wanted(membership)
            share = 1 / len(wanted)
            return [
                PlacementAgent(model, config, membership, self._progress, share=share, download=False).preview()
                for model in wanted
            ]
        finally:
            membership.weights_fetcher.close()
            membership.leave()

    def _wanted(self, membership: Membership) -> Sequence[HostedModelConfig]:
        """The models of the settings; if they name none, one that the network runs and vouches for."""
        from penstock.model.sources import local
        from penstock.placement.peer_records import choose_network_model, offered_weights

        if not self.config.adopts:
            return self.config.models
        membership.wait_for_peers()

        def may_run(name: str) -> bool:
            try:
                offered = offered_weights(membership.records, name, exclude=self.config.node_id)
                if local(name) is not None or membership.trust.choose(name, offered):
                    return True
            except UntrustedWeights as error:
                logger.warning("this node does not run %s. %s", name, error)
            return False

        chosen = choose_network_model(membership.records, exclude=self.config.node_id, may_run=may_run)
        return [replace(self.config.models[0], id=chosen or self.config.models[0].id)]

    def _host(self, loaded: LoadedModel, pipe: Pipe) -> HostedLayers:
        config = self.config
        hosted = host(
            loaded,
            pipe,
            config.engine,
            max_jobs=config.limits.max_jobs,
            routing=RoutingConfig(
                epoch=self._epoch,
                lease=max(MIN_LEASE_S, 3 * config.network.lease_ms / 1000),
                recovery_timeout=config.network.recovery_timeout,
                route_numbers=self._route_numbers,
            ),
        )
        self.hosted.append(hosted)
        return hosted

    def _join(self) -> Membership:
        from penstock.network.routers import make_router
        from penstock.network.trust.known_endpoints import load_endpoints
        from penstock.peers.membership import Membership

        network = self.config.network
        if network.peers_file is not None:
            network = replace(network, connect=tuple(dict.fromkeys([*network.connect, *load_endpoints(network.peers_file)])))
        router = make_router(network, self.config.node_id, self._epoch)
        return Membership(router, network, node=self.config.node_id, epoch=self._epoch)

    def _stop(self) -> None:
        for hosted in self.hosted:
            hosted.stop()

    def _leave(self) -> None:
        if self._duties is not None:
            self._duties.close()
        if self.membership is not None:
            self.membership.weights_fetcher.close()  # or leaving would wait for a fetch
        for agent in self._agents:
            agent.close()
        self._stop()
        if self.membership is not None:
            self.membership.leave()
        if self._socket is not None:
            self._socket.close()


def _certificate(config: ServerConfig) -> ServerCertificate | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServerCertificate(config.tls_cert, config.tls_key)


def _workspace(config: WorkspaceConfig) -> Workspace | None:
    if config.path is None:
        return None
    try:
        return Workspace(config.path, create=True)
    except WorkspaceError as error:
        if not config.by_default:
            raise
        logger.warning("there is no workspace, so files, batches and stored responses are refused: %s", error)
        return None
