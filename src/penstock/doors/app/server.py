"""OAIHttpServer: the HTTP API of a node, with all dialects behind the gate and the access log."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from penstock.domain.request import new_public_id
from penstock.doors.access.gate import LOOPBACK, AccessLog, Gate
from penstock.doors.anthropic.routes import anthropic_routes
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.audit_endpoint import audit_routes
from penstock.doors.app.job_endpoints import JobEndpoints
from penstock.doors.app.key_endpoints import KeyEndpoints
from penstock.doors.app.models import model_routes
from penstock.doors.app.node_endpoints import NodeEndpoints
from penstock.doors.app.openapi import with_document
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.dispatch.mailbox import Mailbox
from penstock.doors.http.errors import DialectOfPath, error_body, headers_of, id_headers, send_error, status_of
from penstock.doors.http.fields import known_field
from penstock.doors.http.route import Handler, Route
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.ollama.routes import ollama_routes
from penstock.doors.openai.batches.routes import FILES, batch_routes
from penstock.doors.openai.responses.routes import responses_routes
from penstock.doors.openai.routes import openai_routes
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import NoSuchPath, PenstockError, RequestError


class OAIHttpServer:
    """The HTTP server; `app` is its ASGI application.

    layers: models of which this node only holds layers, for other nodes.
    network: describes the network for GET /network.
    backlog: None if nothing is stored: then there are no files, batches or stored responses.
    certificates: when each certificate of this node expires, for GET /metrics.
    """

    def __init__(
        self,
        api: ApiConfig,
        *,
        node_id: str,
        layers: Sequence[HostedLayers] = (),
        network: Callable[[], Mapping[str, Any]] = dict,
        backlog: Backlog | None = None,
        certificates: Callable[[], Mapping[str, datetime]] = dict,
    ) -> None:
        self._api = api
        self._arriving: set[asyncio.Task[Any]] = set()
        self._responses: Counter[tuple[str, str, int]] = Counter()
        self._dispatcher = dispatcher = RequestDispatcher(api, layers)
        routes = [
            *openai_routes(dispatcher),
            *model_routes(dispatcher),
            *responses_routes(dispatcher, backlog),
            *batch_routes(backlog, api.server.max_upload),
            *anthropic_routes(dispatcher, backlog),
            *ollama_routes(dispatcher),
            *NodeEndpoints(dispatcher, node_id, network, backlog, self._responses, certificates).routes(),
            *JobEndpoints([served.hosted for served in api.catalog.models.values()], backlog, api.keys).routes(),
            *KeyEndpoints(api.keys).routes(),
            *audit_routes(),
        ]
        self.app = self._build(with_document(routes))

    @property
    def draining(self) -> bool:
        return self._dispatcher.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._dispatcher.draining = value

    def count_unread(self, status: int) -> None:
        """Count an answer to a request that was never read, such as the refusal of one connection too many."""
        self._responses["-", "(unread)", status] += 1

    def abort_unread(self) -> None:
        """Abort requests whose body is still arriving. Runs on the event loop."""
        for task in self._arriving:
            task.cancel()

    def _build(self, routes: Sequence[Route]) -> Starlette:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self._dispatcher.mailbox = Mailbox()
            watching = asyncio.create_task(self._api.keys.watch())
            yield
            watching.cancel()

        server = self._api.server
        hosts = None if server.beyond_loopback else {*LOOPBACK, server.host.lower()}
        middleware = [
            Middleware(DialectOfPath, dialects=[(route.path, route.known_dialect) for route in routes]),
            Middleware(AccessLog, refuse=send_error, paths=[route.path for route in routes], responses=self._responses),
        ]
        if server.cors_origins:  # before the gate: browsers send preflight requests without the key
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=server.cors_origins, allow_methods=["*"], allow_headers=["*"])
            )
        middleware.append(
            Middleware(
                Gate,
                keys=self._api.keys,
                hosts=hosts,
                origins=server.cors_origins,
                max_body=server.max_body,
                max_upload={FILES: server.max_upload},
                refuse=send_error,
                arriving=self._arriving,
            )
        )
        app = Starlette(
            routes=_table(routes),
            middleware=middleware,
            exception_handlers={PenstockError: _on_penstock_error, HTTPException: _on_http_error},  # type: ignore[dict-item]
            lifespan=lifespan,
        )
        app.router.redirect_slashes = False  # it would redirect to whatever the Host header says
        return app


def _table(routes: Sequence[Route]) -> list[StarletteRoute]:
    """Make one route per path, so that a 405 lists all methods of the path."""
    by_path: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    return [StarletteRoute(path, _dispatch_method(methods), methods=[*methods]) for path, methods in by_path.items()]


def _dispatch_method(methods: Mapping[str, Route]) -> Handler:
    """Make the handler of a path. It sets the route for the log, since the path itself may contain text of a client."""

    async def handle(request: Request) -> Response:
        route = methods["GET" if request.method == "HEAD" else request.method]
        request.scope["route"] = route
        return await route.handler(request)

    return handle


async def _on_penstock_error(request: Request, error: PenstockError) -> Response:
    request.state.log["error"] = error.code
    if isinstance(error, RequestError) and error.field:
        request.state.log["field"] = known_field(error.field)
    headers = {**headers_of(error), **id_headers(new_public_id())}
    return JSONResponse(error_body(request.scope, error), status_of(error), headers=headers)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """Answer unknown paths and methods."""
    path, hint = request.scope["path"], "GET /openapi.json lists all operations."
    if path.endswith("/"):
        hint = "Leave out the slash at the end."
    elif path.startswith("/v1/v1/"):
        hint = "The client adds /v1 itself: configure the base URL without it."
    message = f"{request.method} {path[:200]} does not exist."
    allowed = Headers(error.headers).get("allow")
    if allowed:
        message, hint = f"{path[:200]} does not take {request.method}.", f"Use {allowed}."
    refusal = NoSuchPath(message, hint=hint, wrong_method=error.status_code == 405)
    return JSONResponse(error_body(request.scope, refusal), error.status_code, headers=dict(error.headers or {}))
