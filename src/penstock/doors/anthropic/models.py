"""GET /v1/models for Anthropic's clients, in pages."""

from __future__ import annotations

from starlette.requests import Request

from penstock.doors.anthropic import wire
from penstock.doors.anthropic.errors import VERSION_HEADER
from penstock.doors.anthropic.paging import PAGING as LIST_PAGING
from penstock.doors.anthropic.paging import page_of, timestamp
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.route import Parameter

VERSION = Parameter(VERSION_HEADER, str, "Selects Anthropic's format of the answer.", "header")
PAGING = (*LIST_PAGING, Parameter("lifecycle", str, "All models here are active."))


def model_page(dispatcher: RequestDispatcher, request: Request) -> wire.ModelPage:
    query, offered = request.query_params, dict(dispatcher.offered(request))
    page, more = page_of([*offered], request)
    wanted = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    if wanted and "active" not in wanted:
        page, more = [], False  # all models here are active
    return wire.ModelPage(
        data=[describe(name, offered[name], dispatcher) for name in page],
        has_more=more,
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
    )


def describe(name: str, served: ServedModel, dispatcher: RequestDispatcher) -> wire.AnthropicModelOut:
    context = served.hosted.context
    return wire.AnthropicModelOut(
        id=name,
        display_name=served.hosted.name,
        created_at=timestamp(served.created),
        max_input_tokens=context,
        max_tokens=min(context, dispatcher.api.limits.max_tokens or context),
    )
