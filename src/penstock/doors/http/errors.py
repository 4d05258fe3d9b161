"""Errors over HTTP: the status and headers of each, and how a dialect writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import errors
from penstock.doors.http.framing import encode
from penstock.errors import PenstockError

# the most specific first
STATUSES: tuple[tuple[type[PenstockError], int], ...] = (
    (errors.QueueFull, 429),
    (errors.KeyLimit, 429),
    (errors.RequestTooLarge, 413),
    (errors.RequestTimeout, 408),
    (errors.RequestError, 400),
    (errors.UnknownModel, 404),
    (errors.InvalidKey, 401),
    (errors.KeyForbids, 403),
    (errors.ForbiddenOrigin, 403),
    (errors.NoSuchPath, 404),
    (errors.UnknownResponse, 404),
    (errors.UnknownFile, 404),
    (errors.UnknownBatch, 404),
    (errors.UnknownJob, 404),
    (errors.UnknownKey, 404),
    (errors.NotFinished, 400),
    (errors.NotReady, 503),
    (errors.EngineStopped, 503),
)
RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API that clients speak: its name, and the body of its errors.

    error_types: every type that `error_body` may return.
    """

    name: str
    error_body: Callable[[PenstockError, Scope], Any]
    error_types: tuple[type, ...]


class DialectOfPath:
    """Put the dialect of a request into its scope, so that refusals before routing are written in it.

    dialects: by path; an unknown path gets that of the known path with the longest common prefix.
    """

    def __init__(self, app: ASGIApp, *, dialects: Iterable[tuple[str, Dialect]]) -> None:
        self._app = app
        self._by_prefix: dict[str, Dialect] = {}
        for path, dialect in dialects:
            parts = path.split("/")
            for count in range(1, len(parts) + 1):
                self._by_prefix.setdefault("/".join(parts[:count]), dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["dialect"] = self._find(scope["path"])
        await self._app(scope, receive, send)

    def _find(self, path: str) -> Dialect:
        while path not in self._by_prefix and path:
            path = path.rpartition("/")[0]
        return self._by_prefix[path]


def status_of(error: PenstockError) -> int:
    return next((status for cls, status in STATUSES if isinstance(error, cls)), 500)


def error_body(scope: Scope, error: PenstockError) -> Any:
    """Write an error as the dialect of the request does."""
    dialect: Dialect = scope["dialect"]
    return dialect.error_body(error, scope)


def id_headers(request_id: str) -> dict[str, str]:
    """The id of a request, under the names that OpenAI's and Anthropic's clients read."""
    return {"x-request-id": request_id, "request-id": request_id}


def headers_of(error: PenstockError) -> dict[str, str]:
    if isinstance(error, errors.QueueFull | errors.KeyLimit):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, errors.InvalidKey):
        return {"www-authenticate": "Bearer"}
    return {"retry-after": str(RETRY_AFTER_S)} if status_of(error) == 503 else {}


async def send_error(scope: Scope, send: Send, error: PenstockError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    more = [(name.encode(), value.encode()) for name, value in headers_of(error).items()]
    with contextlib.suppress(OSError):
        await send_json(send, status_of(error), encode(error_body(scope, error)), [*headers, *more])


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
