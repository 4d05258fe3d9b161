"""Pages of Anthropic's lists."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request

from penstock.doors.http.fields import short
from penstock.doors.http.paging import limit_param
from penstock.doors.http.route import Parameter
from penstock.errors import RequestError

PAGE, MAX_PAGE = 20, 1000  # items
PAGING = (
    Parameter("limit", Annotated[int, Meta(ge=1, le=MAX_PAGE)], "The maximum number of items."),
    Parameter("after_id", str, "The last id of the previous page."),
    Parameter("before_id", str, "The first id of the next page."),
)


def page_of(names: Sequence[str], request: Request) -> tuple[list[str], bool]:
    """The ids on the page that a request asks for, and whether there are more."""
    after, before = _place("after_id", names, request), _place("before_id", names, request)
    limit = limit_param(request, default=PAGE, maximum=MAX_PAGE)
    found = names[0 if after is None else after + 1 : before]
    page = found[:limit] if before is None or after is not None else found[-limit:]
    return list(page), len(page) < len(found)


def _place(field: str, names: Sequence[str], request: Request) -> int | None:
    name = request.query_params.get(field)
    if name is None:
        return None
    if name not in names:
        raise RequestError(f"{field} = {short(name)} is not in the list.", field=field, hint="Give an id of a page.")
    return names.index(name)


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
