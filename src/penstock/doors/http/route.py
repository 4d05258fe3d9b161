"""Route: an operation of the API, as data. The server's routes and the OpenAPI document are made from the same list."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.http.errors import Dialect
from penstock.doors.http.fields import Fields

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or a header. kind: its type, for msgspec."""

    name: str
    kind: Any
    description: str
    location: Literal["query", "header"] = "query"


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the API.

    request: its body, sent as `media_type`.
    response: body of a whole answer: a msgspec type, a tuple of alternatives, or None for a text.
    stream: media type of a streamed answer, which consists of `events`.
    errors: statuses that not every operation has.
    texts: media types of an answer that is not JSON.
    refused: always answers with an error that tells clients why the operation is not supported.
    """

    method: str
    path: str
    handler: Handler
    description: str
    request: type[Fields] | None = None
    response: Any = None
    stream: str | None = None
    events: tuple[Any, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    refused: bool = False
    texts: tuple[str, ...] = ("text/plain",)
    media_type: str = "application/json"
    dialect: Dialect | None = None  # set by `in_dialect`

    @property
    def known_dialect(self) -> Dialect:
        assert self.dialect is not None, f"{self.path} has no dialect: pass it through `in_dialect`"
        return self.dialect


def in_dialect(dialect: Dialect, routes: Iterable[Route]) -> list[Route]:
    """Set the dialect of routes."""
    return [replace(route, dialect=dialect) for route in routes]
