"""Gate and AccessLog: refuse requests by key, origin and size before they are read, and log every request."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.doors.access.keys import OWNER, Caller, Keys
from penstock.doors.access.refusal_pace import RefusalPace
from penstock.doors.http.threads import SharedThreads
from penstock.errors import EngineError, ForbiddenOrigin, InvalidKey, NotReady, PenstockError, RequestTooLarge

logger = logging.getLogger("penstock.http")

Refuse = Callable[[Scope, Send, PenstockError], Awaitable[None]]

OPEN_PATHS = frozenset(("/health", "/ready"))  # for monitoring; they reveal nothing
CONSOLE_PATH = "/console/"  # static files of the web console, the same for every client
CLIENT_CLOSED_REQUEST = 499
PACED = frozenset((401, 403, 429))  # refusals because of the client's identity or request rate
ID_HEADERS = (b"x-request-id", b"request-id")  # OpenAI's and Anthropic's names; clients send the first
CLIENT_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")  # client-sent ids to adopt; they are logged, so no free text
LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


@dataclass(slots=True)
class AccessLog:
    """Logs one line per request: its id, client, key, path, status, duration, tokens. Never its text. An id that the client
    sends is returned in the response headers.

    paths: those that may be logged verbatim; any other could contain a client's text.
    responses: counts answers by method, path and status.
    """

    app: ASGIApp
    refuse: Refuse
    paths: Collection[str] = ()
    responses: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, started_response, request_id = time.perf_counter(), 500, False, ""
        facts: dict[str, object] = {}
        scope.setdefault("state", {})["log"] = facts

        sent_id = dict(scope["headers"]).get(ID_HEADERS[0], b"")
        client_id = sent_id if CLIENT_ID.fullmatch(sent_id) else None

        async def logged_send(message: Message) -> None:
            nonlocal status, started_response, request_id
            if message["type"] == "http.response.start":
                status, started_response = message["status"], True
                headers = list(message.get("headers", ()))
                if client_id is not None:
                    headers = [pair for pair in headers if pair[0] not in ID_HEADERS] + [(name, client_id) for name in ID_HEADERS]
                request_id = dict(headers).get(ID_HEADERS[0], b"").decode()
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, logged_send)
        except ClientDisconnect:
            facts["status"] = CLIENT_CLOSED_REQUEST  # before its request was complete
        except asyncio.CancelledError:
            facts["error"] = NotReady.code  # the drain timeout is over
            if not started_response:
                await self.refuse(scope, logged_send, shutting_down())
        except Exception as error:
            # without the error's message: it may contain text of a client
            frames = "".join(traceback.format_tb(error.__traceback__))
            logger.error("unexpected %s in a request:\n%s", type(error).__name__, frames.rstrip())
            facts["error"] = type(error).__name__
            if not started_response:
                await self.refuse(scope, logged_send, EngineError("Internal server error."))
        finally:
            seconds = round(time.perf_counter() - started, 3)
            quiet = scope["path"] in OPEN_PATHS or scope["path"] == "/metrics"
            fields = _origin(scope, request_id)
            fields |= {"method": scope["method"], "path": self._path(scope), "status": status, "seconds": seconds, **facts}
            self.responses[scope["method"], self._path(scope), int(str(fields["status"]))] += 1
            logger.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})

    def _path(self, scope: Scope) -> str:
        route = getattr(scope.get("route"), "path", None)
        return route or (scope["path"] if scope["path"] in self.paths else "(unknown)")


@dataclass(slots=True)
class Gate:
    """Refuses a request before its body is read: wrong key, foreign origin, body too large.

    Repeated refusals of one key, or of one address without a key, are sent with growing delays.

    hosts: names by which a server without keys may be addressed; None allows any.
    max_upload: by path, where bodies may be larger because they go to disk.
    arriving: tasks of requests whose body is still being read; aborted at shutdown.
    """

    app: ASGIApp
    keys: Keys
    hosts: Collection[str] | None
    origins: Collection[str]
    max_body: int
    max_upload: Mapping[str, int]
    refuse: Refuse
    arriving: set[asyncio.Task[Any]]
    pace: RefusalPace = field(default_factory=RefusalPace)
    threads: SharedThreads = field(default_factory=SharedThreads)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def paced_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in PACED:
                await asyncio.sleep(self.pace.delay(_client(scope)))
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            caller = OWNER if is_open(scope["path"]) or wants_page(scope["path"], headers) else self._caller(headers)
            scope["state"]["caller"] = caller
            self._check_length(scope["path"], headers)
        except PenstockError as error:
            scope["state"]["log"]["error"] = error.code
            await self.refuse(scope, paced_send, error)
            return
        read, max_bytes, task = 0, self._max_bytes(scope["path"]), asyncio.current_task()
        assert task is not None

        async def limited_receive() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > max_bytes:
                raise self._too_large(scope["path"])
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.arriving.discard(task)
                self.keys.check(caller)  # again, before it is acted on
            return message

        self.arriving.add(task)
        self.threads.enter(caller.owner)
        try:
            await self.app(scope, limited_receive, paced_send)
        finally:
            self.arriving.discard(task)

    def _caller(self, headers: Headers) -> Caller:
        """Find the caller by the first valid key: a client may send two, one of them for another server."""
        sent = _keys_in(headers)
        for key in sent[:-1]:
            with contextlib.suppress(InvalidKey):
                return self.keys.find(key)
        return self.keys.find(sent[-1] if sent else None)

    def _check_origin(self, headers: Headers) -> None:
        """Refuse web pages of other sites, so that a page cannot use a server on its visitor's machine: neither from its own
        origin (Origin), nor by DNS rebinding (Host), nor through embedded resources, which send no Origin."""
        host = headers.get("host", "")
        if not self.keys.required and self.hosts is not None and host and _hostname(f"//{host}") not in self.hosts:
            raise ForbiddenOrigin(
                f"The host name '{host[:80]}' is not allowed.", hint="Use 127.0.0.1 or localhost, or give the server an API key."
            )
        origin = headers.get("origin")
        if origin is None and not self.keys.required and "*" not in self.origins and _is_embedded(headers):
            raise ForbiddenOrigin("Pages of other sites may not use this server.", hint="Open it in a tab of its own.")
        if origin is None or origin in self.origins or "*" in self.origins or _netloc(origin) == host:
            return
        raise ForbiddenOrigin(f"Pages of '{origin[:80]}' may not use this server.", hint="List it in server.cors_origins.")

    def _check_length(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_bytes(path):
            raise self._too_large(path)

    def _max_bytes(self, path: str) -> int:
        return self.max_upload.get(path, self.max_body)

    def _too_large(self, path: str) -> RequestTooLarge:
        setting = "max_upload" if path in self.max_upload else "max_body"
        return RequestTooLarge(
            f"The body is larger than {self._max_bytes(path)} bytes.", hint=f"Raise server.{setting}, or send less."
        )


def _origin(scope: Scope, request_id: str) -> dict[str, object]:
    """Where a request comes from, for the log. A proxy can write anything as the address, so only addresses are taken."""
    found: dict[str, object] = {"id": request_id} if request_id else {}
    client = scope.get("client") or ("",)
    with contextlib.suppress(ValueError):
        found["client"] = str(ipaddress.ip_address(client[0]))
    caller: Caller | None = scope["state"].get("caller")
    if caller is not None and caller.name is not None:
        found["key"] = caller.name
    return found


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(CONSOLE_PATH)


def wants_page(path: str, headers: Headers) -> bool:
    """Whether a browser opens the console; the page itself asks for a key."""
    return path == "/" and "text/html" in headers.get("accept", "")


def shutting_down() -> NotReady:
    return NotReady("The server is shutting down.", hint="Try again later.")


def _client(scope: Scope) -> str:
    caller: Caller | None = scope["state"].get("caller")
    address = scope.get("client") or ("",)
    return f"key {caller.owner}" if caller is not None and caller.owner is not None else f"address {address[0]}"


def _keys_in(headers: Headers) -> list[str]:
    """The keys of a request, as OpenAI's and Anthropic's clients send them."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", "").strip()) if key]


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_embedded(headers: Headers) -> bool:
    """Whether another site's page loads this in a browser, as an image, a frame or the like. Following a link does not count."""
    return headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-dest") != "document"


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""
