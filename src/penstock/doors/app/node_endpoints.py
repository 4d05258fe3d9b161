"""The endpoints about the node itself: health, readiness, status, events and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from penstock import __version__
from penstock.config.keys import NO_LIMITS
from penstock.doors.access.gate import shutting_down, wants_page
from penstock.doors.app.console.files import ConsoleFiles
from penstock.doors.app.live.events import LiveEvents
from penstock.doors.app.live.state import Gathered, gather
from penstock.doors.app.metrics import render_metrics
from penstock.doors.app.readiness import Readiness
from penstock.doors.app.status import NodeStatus, describe
from penstock.doors.dispatch.dispatcher import RequestDispatcher, caller_of
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.errors import PENSTOCK
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import KeyForbids, NotReady


class NodeEndpoints:
    """responses: answers so far, by method, path and status. certificates: when each expires."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        node_id: str,
        network: Callable[[], Mapping[str, Any]],
        backlog: Backlog | None,
        responses: Mapping[tuple[str, str, int], int],
        certificates: Callable[[], Mapping[str, datetime]],
    ) -> None:
        self._dispatcher = dispatcher
        self._node_id = node_id
        self._network = network
        self._backlog = backlog
        self._responses = responses
        self._certificates = certificates
        self._served = [served.hosted for served in dispatcher.api.catalog.models.values()]
        self._readiness = Readiness(self._served, within=dispatcher.api.server.ready_within)
        self._console = ConsoleFiles()
        self._wall_offset = time.time() - time.monotonic()
        self._events = LiveEvents(
            self._gather,
            self._hosted,
            dispatcher.api.catalog.canonical,
            is_current=dispatcher.api.keys.is_current,
            draining=lambda: dispatcher.draining,
        )

    def routes(self) -> list[Route]:
        return in_dialect(
            PENSTOCK,
            [
                Route(
                    "GET",
                    "/",
                    self.root,
                    "The web console for browsers, a line of text for others",
                    texts=("text/plain", "text/html"),
                ),
                self._console.route(),
                Route("GET", "/health", self.health, "Whether the process is alive", response=dict[str, str]),
                Route(
                    "GET", "/ready", self.ready, "Whether every model generates tokens", response=dict[str, str], errors=(503,)
                ),
                Route("GET", "/metrics", self.metrics, "Counters for Prometheus"),
                Route("GET", "/status", self.status, "What is running", response=NodeStatus),
                Route("GET", "/network", self.network, "The nodes, pipes and routes of the network", response=dict[str, Any]),
                self._events.route(),
            ],
        )

    async def root(self, request: Request) -> Response:
        if wants_page("/", request.headers):
            return self._console.send(request)
        dispatcher = self._dispatcher
        if not self._served:
            return PlainTextResponse(f"Penstock {__version__}: {dispatcher.describe_layers()}\n")
        return PlainTextResponse(
            f"Penstock {__version__} serves {dispatcher.names(request)}. "
            "The base URL for OpenAI clients is this address with /v1 at the end.\n"
        )

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready(self, request: Request) -> Response:
        if self._dispatcher.draining:
            raise shutting_down()
        for hosted in self._dispatcher.layers:
            if not hosted.engine.running:
                raise NotReady(f"The engine of {hosted.name} has stopped.", hint="Start the node again; its log says why.")
        await self._readiness.check()
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        _check_unlimited(request)
        body, kind = render_metrics(
            self._hosted(),
            workspace=self._jobs_on_disk(),
            network=self._network(),
            responses=self._responses,
            certificates=self._certificates(),
        )
        return Response(body, media_type=kind)

    async def status(self, request: Request) -> Response:
        _check_unlimited(request)
        aliases, draining = self._dispatcher.api.catalog.aliases, self._dispatcher.draining
        return JSONResponse(describe(self._node_id, self._hosted(), aliases, draining=draining, workspace=self._jobs_on_disk()))

    async def network(self, request: Request) -> Response:
        _check_unlimited(request)
        return JSONResponse(self._network() or {"network": None, "nodes": [], "pipes": []})

    def _gather(self) -> Gathered:
        return gather(
            self._node_id,
            self._hosted(),
            self._network(),
            draining=self._dispatcher.draining,
            workspace=self._jobs_on_disk(),
            key_names=self._dispatcher.api.keys.names(),
            wall_offset=self._wall_offset,
        )

    def _jobs_on_disk(self) -> dict[str, int] | None:
        return None if self._backlog is None else self._backlog.describe()

    def _hosted(self) -> list[HostedLayers]:
        return [*self._served, *self._dispatcher.layers]


def _check_unlimited(request: Request) -> None:
    """Refuse keys with limits: these endpoints are about the requests of all keys."""
    caller = caller_of(request)
    if caller.limits != NO_LIMITS:
        raise KeyForbids(
            f"The key '{caller.name}' has limits, so it is not for {request.scope['path']}, which is about all keys.",
            hint="Use the owner's key, or one without limits.",
        )
