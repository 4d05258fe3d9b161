"""OAIHttpServer: OpenAI's API over the models of this node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from penstock import __version__
from penstock.config.node import LimitsConfig, ServerConfig
from penstock.domain.job import new_job_id
from penstock.doors.access import LOOPBACK, AccessLog, Gate
from penstock.doors.mailbox import Mailbox
from penstock.doors.metrics import render_metrics
from penstock.doors.openai import chat, completions
from penstock.doors.openai.errors import body_of, headers_of, status_of
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    TokenizeRequest,
    known_field,
    parse,
)
from penstock.doors.openai.responses import send_error
from penstock.doors.openai.served import Served
from penstock.doors.readiness import Readiness
from penstock.doors.status import describe
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import NotReady, PenstockError, RequestError, RequestTimeout, UnknownModel

CODES_OF_ROUTER = {404: "not_found", 405: "method_not_allowed"}

PATIENCE = 60.0  # seconds for a whole request to arrive
LARGE = 50_000  # bytes

Asked = TypeVar("Asked", bound=Fields)
Handler = Callable[[Request], Awaitable[Response]]


class OAIHttpServer:
    """`models` are those that it offers, by name, `aliases` further names for them; `layers` are what the node holds only for
    others, `network` tells about those, and `workspace` about the jobs on disk. `app` is the ASGI application."""

    def __init__(
        self,
        models: Mapping[str, Served],
        *,
        layers: Sequence[HostedLayers] = (),
        network: Callable[[], Mapping[str, Any]] = dict,
        workspace: Callable[[], Mapping[str, int] | None] = lambda: None,
        node_id: str,
        server: ServerConfig,
        limits: LimitsConfig,
        aliases: Mapping[str, str],
        api_key: str | None,
    ) -> None:
        self._models, self._aliases, self._node_id = models, aliases, node_id
        self._layers, self._network, self._workspace = layers, network, workspace
        self._server, self._limits = server, limits
        self._readiness = Readiness([served.hosted for served in models.values()], within=server.ready_within)
        self._mailbox: Mailbox | None = None
        self.draining = False
        self.app = self._build(api_key)

    # ---- OpenAI's routes ----

    async def chat_completions(self, request: Request) -> Response:
        asked = await _read(ChatCompletionRequest, request)
        return await chat.answer(asked, self._find(asked.model, request), self._room(), self._server, self._limits)

    async def completions(self, request: Request) -> Response:
        asked = await _read(CompletionRequest, request)
        return await completions.answer(asked, self._find(asked.model, request), self._room(), self._server, self._limits)

    async def list_models(self, request: Request) -> Response:
        names = [*self._models, *self._aliases]
        return JSONResponse({"object": "list", "data": [self._described(name) for name in names]})

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._find(name, request)
        return JSONResponse(self._described(name))

    # ---- beside OpenAI's ----

    async def tokenize(self, request: Request) -> Response:
        asked = await _read(TokenizeRequest, request)
        served = self._find(asked.model, request)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("Give either a prompt or messages.", field="prompt")
        tokenizer = served.hosted.tokenizer
        if asked.messages is not None:
            plan = served.tools.plan(plain_messages(asked.messages))
            tokens = await asyncio.to_thread(tokenizer.encode_chat, plan.messages)
        else:
            special = asked.add_special_tokens is not False
            tokens = await asyncio.to_thread(tokenizer.encode, asked.prompt or "", special=special)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": served.hosted.context})

    async def detokenize(self, request: Request) -> Response:
        asked = await _read(DetokenizeRequest, request)
        served = self._find(asked.model, request)
        if not all(0 <= token < served.hosted.spec.vocab for token in asked.tokens):
            raise RequestError(
                "tokens holds ids that are no tokens.", field="tokens", hint=f"Ids go from 0 to {served.hosted.spec.vocab - 1}."
            )
        text = await asyncio.to_thread(served.hosted.tokenizer.decode, asked.tokens, skip_special=False)
        return JSONResponse({"prompt": text})

    async def root(self, request: Request) -> Response:
        """For a person who opens the address in a browser."""
        base = f"{request.url.scheme}://{request.url.netloc}/v1"
        if not self._models:
            return PlainTextResponse(f"Penstock {__version__}: {self._holds()}\n")
        return PlainTextResponse(f"Penstock {__version__} serves {', '.join(self._models)}. OpenAI clients find it at {base}\n")

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready(self, request: Request) -> Response:
        if self.draining:
            raise _leaving()
        for hosted in self._layers:
            if not hosted.engine.running:
                raise NotReady(f"The engine of {hosted.name} has stopped.", hint="Start the node again; its log says why.")
        await self._readiness.check()
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        body, kind = render_metrics(self._hosted(), self._workspace())
        return Response(body, media_type=kind)

    async def status(self, request: Request) -> Response:
        return JSONResponse(
            describe(self._node_id, self._hosted(), self._aliases, draining=self.draining, workspace=self._workspace())
        )

    async def network(self, request: Request) -> Response:
        return JSONResponse(self._network() or {"network": None, "nodes": [], "pipes": []})

    # ---- inside ----

    def _hosted(self) -> list[HostedLayers]:
        return [*(served.hosted for served in self._models.values()), *self._layers]

    def _holds(self) -> str:
        names = ", ".join(hosted.name for hosted in self._layers)
        return f"this node only holds layers of {names} for others. `penstock network status` shows which nodes offer it."

    def _find(self, name: str | None, request: Request) -> Served:
        """The model that a request names; where it may leave it out and there is one, that one."""
        if not self._models:
            raise UnknownModel("No model is offered here.", hint=f"T{self._holds()[1:]}")
        if name is None and len(self._models) == 1:
            name = next(iter(self._models))
        elif name is None:
            raise RequestError("model is missing.", field="model", hint=f"This node has: {', '.join(self._models)}.")
        served = self._models.get(self._aliases.get(name, name))
        if served is None:
            raise UnknownModel(
                f"The model '{name[:100]}' is not here.", hint=f"This node has: {', '.join([*self._models, *self._aliases])}."
            )
        request.state.log["model"] = served.hosted.name
        return served

    def _room(self) -> Mailbox:
        if self.draining or self._mailbox is None:
            raise _leaving()
        return self._mailbox

    def _described(self, name: str) -> dict[str, Any]:
        served = self._models[self._aliases.get(name, name)]
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "penstock",
            "root": served.hosted.name,
            "max_model_len": served.hosted.context,
        }

    def _build(self, api_key: str | None) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self._mailbox = Mailbox()
            yield

        app = FastAPI(title="Penstock", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self.chat_completions),
            ("POST", "/v1/completions", self.completions),
            ("GET", "/v1/models", self.list_models),
            ("GET", "/v1/models/{model:path}", self.get_model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/", self.root),
            ("GET", "/health", self.health),
            ("GET", "/ready", self.ready),
            ("GET", "/metrics", self.metrics),
            ("GET", "/status", self.status),
            ("GET", "/network", self.network),
        ]
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method])
        app.add_exception_handler(PenstockError, _on_penstock_error)  # type: ignore[arg-type]
        app.add_exception_handler(HTTPException, _on_http_error)  # type: ignore[arg-type]
        hosts = None if api_key is not None or self._server.beyond_loopback else {*LOOPBACK, self._server.host.lower()}
        app.add_middleware(
            Gate,
            key=api_key,
            hosts=hosts,
            origins=self._server.cors_origins,
            max_body=self._server.max_body,
            refuse=send_error,
        )
        if self._server.cors_origins:  # before the gate: a browser asks first, and without the key
            app.add_middleware(CORSMiddleware, allow_origins=self._server.cors_origins, allow_methods=["*"], allow_headers=["*"])
        app.add_middleware(AccessLog, refuse=send_error, paths=[path for _, path, _ in routes])
        return app


async def _read(kind: type[Asked], request: Request) -> Asked:
    """A body may take its time, but not for ever; a large one is looked at aside."""
    try:
        body = await asyncio.wait_for(request.body(), PATIENCE)
    except TimeoutError:
        raise RequestTimeout(f"The request was not complete after {PATIENCE:g} seconds.") from None
    return await asyncio.to_thread(parse, kind, body) if len(body) > LARGE else parse(kind, body)


async def _on_penstock_error(request: Request, error: PenstockError) -> Response:
    request.state.log["error"] = error.code
    if isinstance(error, RequestError) and error.field:
        request.state.log["field"] = known_field(error.field)
    return JSONResponse(body_of(error), status_of(error), headers={**headers_of(error), "x-request-id": new_job_id()})


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    """What the router refuses: an unknown path or method."""
    hint = "See GET /v1/models, POST /v1/chat/completions, POST /v1/completions."
    message = f"There is no {request.method} {request.url.path[:200]} here. {hint}"
    body = {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": None,
            "code": CODES_OF_ROUTER.get(error.status_code),
        }
    }
    return JSONResponse(body, error.status_code, headers=dict(error.headers or {}))


def _leaving() -> NotReady:
    return NotReady("The server is shutting down.", hint="Try again in a moment, or elsewhere.")
