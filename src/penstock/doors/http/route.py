"""Route: one operation of the API, as data. The server's table and the published description of it are made of the same rows."""

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
    """What may be said beside the body. `kind` is a msgspec type."""

    name: str
    kind: Any
    about: str
    place: Literal["query", "header"] = "query"


@dataclass(frozen=True, slots=True)
class Route:
    """`asks` is the body of a request, of the type `media`, `gives` that of a whole answer (a msgspec type, or a tuple of those
    that it may be; None for plain text), `streams` the media type of one that comes in pieces, which are `events`. `fails` are
    the statuses of its errors that others do not have. One that `refuses` is known, so that clients are told why it is not
    here."""

    method: str
    path: str
    handler: Handler
    about: str
    asks: type[Fields] | None = None
    gives: Any = None
    streams: str | None = None
    events: tuple[Any, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    fails: tuple[int, ...] = ()
    refuses: bool = False
    media: str = "application/json"
    dialect: Dialect | None = None  # set by `in_dialect`

    @property
    def spoken(self) -> Dialect:
        assert self.dialect is not None, f"{self.path} has no dialect: pass it through `in_dialect`"
        return self.dialect


def in_dialect(dialect: Dialect, routes: Iterable[Route]) -> list[Route]:
    """The routes, with the dialect that they speak."""
    return [replace(route, dialect=dialect) for route in routes]
