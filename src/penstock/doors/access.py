"""Who may speak to this server, and how much: the key, the origin of web pages, the size of a body; and the log of it all."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import EngineError, ForbiddenOrigin, InvalidKey, PenstockError, RequestTooLarge

logger = logging.getLogger("penstock.http")

Refuse = Callable[[Send, PenstockError], Awaitable[None]]

OPEN_PATHS = frozenset(("/health", "/ready"))  # for whoever watches over the process; they tell nothing
CLIENT_LEFT = 499
LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


class AccessLog:
    """One line for each request: what, how it ended, how long it took, how many tokens. Never a word of it."""

    def __init__(self, app: ASGIApp, *, refuse: Refuse, paths: Collection[str] = ()) -> None:
        """`paths` are those that may be logged as they are; any other might hold anything."""
        self._app, self._refuse, self._paths = app, refuse, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, began = time.perf_counter(), 500, False
        facts: dict[str, object] = {}
        scope.setdefault("state", {})["log"] = facts

        async def watched(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            facts["status"] = CLIENT_LEFT  # before its request was whole
        except Exception as error:
            # without the error's words: they may be a client's
            frames = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a request met a %s that nobody expected:\n%s", type(error).__name__, frames.rstrip())
            facts["error"] = type(error).__name__
            if not began:
                await self._refuse(watched, EngineError("The server met something that it did not expect."))
        finally:
            seconds = round(time.perf_counter() - started, 3)
            quiet = scope["path"] in OPEN_PATHS or scope["path"] == "/metrics"
            fields = {"method": scope["method"], "path": self._path(scope), "status": status, "seconds": seconds, **facts}
            logger.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})

    def _path(self, scope: Scope) -> str:
        route = getattr(scope.get("route"), "path", None)
        return route or (scope["path"] if scope["path"] in self._paths else "(unknown)")


class Gate:
    """Refuses what must not come in, before anything of it is read."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        hosts: Collection[str] | None,
        origins: Collection[str],
        max_body: int,
        refuse: Refuse,
    ) -> None:
        """`hosts` are the names that this server goes by; None if anybody may call it anything."""
        self._app, self._hosts, self._origins = app, hosts, frozenset(origins)
        self._key = None if key is None else _digest(key)
        self._max_body, self._refuse = max_body, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_site(headers)
            self._check_key(scope["path"], headers)
            self._check_length(headers)
        except PenstockError as error:
            scope["state"]["log"]["error"] = error.code
            await self._refuse(send, error)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_body:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _check_site(self, headers: Headers) -> None:
        """A web page that somebody visits must not talk to a server on their machine: neither by its own name (Origin) nor
        by a name that it makes point here (Host)."""
        host = headers.get("host", "")
        if self._hosts is not None and host and _hostname(f"//{host}") not in self._hosts:
            raise ForbiddenOrigin(
                f"This server is not called '{host[:80]}'.", hint="Use 127.0.0.1 or localhost, or give the server an API key."
            )
        origin = headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins or _netloc(origin) == host:
            return
        raise ForbiddenOrigin(f"Pages of '{origin[:80]}' may not use this server.", hint="List it in server.cors_origins.")

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise InvalidKey("This server wants an API key.", hint="Send it as 'Authorization: Bearer KEY'.")
        if not hmac.compare_digest(_digest(given.strip()), self._key):
            raise InvalidKey("The API key is not the one of this server.")

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"The body is larger than {self._max_body} bytes.", hint="Raise server.max_body, or send less.")


def _digest(key: str) -> bytes:
    """Of equal length for every key, so that comparing tells nothing about it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""
