"""GET /v1/models for Anthropic's clients, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta
from starlette.datastructures import QueryParams
from starlette.requests import Request

from penstock.doors.anthropic import wire
from penstock.doors.anthropic.errors import VERSION_HEADER
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.fields import short
from penstock.doors.http.paging import limit_param
from penstock.doors.http.route import Parameter
from penstock.errors import RequestError

PAGE, MAX_PAGE = 20, 1000  # models
VERSION = Parameter(VERSION_HEADER, str, "Selects Anthropic's format of the answer.", "header")
PAGING = (
    Parameter("limit", Annotated[int, Meta(ge=1, le=MAX_PAGE)], "The maximum number of items."),
    Parameter("after_id", str, "The last id of the previous page."),
    Parameter("before_id", str, "The first id of the next page."),
    Parameter("lifecycle", str, "All models here are active."),
)


def model_page(dispatcher: RequestDispatcher, request: Request) -> wire.ModelPage:
    query, offered = request.query_params, dict(dispatcher.offered(request))
    names = list(offered)
    after, before = _place("after_id", names, query), _place("before_id", names, query)
    limit = limit_param(request, default=PAGE, maximum=MAX_PAGE)
    found = names[0 if after is None else after + 1 : before]
    wanted = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    if wanted and "active" not in wanted:
        found = []  # all models here are active
    page = found[:limit] if before is None or after is not None else found[-limit:]
    return wire.ModelPage(
        data=[describe(name, offered[name], dispatcher) for name in page],
        has_more=len(page) < len(found),
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
    )


def describe(name: str, served: ServedModel, dispatcher: RequestDispatcher) -> wire.AnthropicModelOut:
    context = served.hosted.context
    return wire.AnthropicModelOut(
        id=name,
        display_name=served.hosted.name,
        created_at=datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=context,
        max_tokens=min(context, dispatcher.api.limits.max_tokens or context),
    )


def _place(field: str, names: Sequence[str], query: QueryParams) -> int | None:
    name = query.get(field)
    if name is None:
        return None
    if name not in names:
        raise RequestError(f"{field} = {short(name)} is not a model of this node.", field=field)
    return names.index(name)
