"""The routes of Anthropic's API."""

from __future__ import annotations

from typing import get_args

from penstock.doors.anthropic import messages, wire
from penstock.doors.anthropic.count_tokens import CountTokensEndpoint
from penstock.doors.anthropic.errors import ANTHROPIC
from penstock.doors.anthropic.requests import CountTokensRequest, MessagesRequest
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.route import Route, in_dialect


def anthropic_routes(dispatcher: RequestDispatcher) -> list[Route]:
    return in_dialect(
        ANTHROPIC,
        [
            dispatcher.route(
                "/v1/messages",
                MessagesRequest,
                messages.exchange,
                "Answer a conversation (Anthropic)",
                response=wire.MessageOut,
                stream="text/event-stream",
                events=(*get_args(wire.Event), wire.PingEvent),
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                CountTokensEndpoint(dispatcher).count,
                "Count the tokens of a conversation (Anthropic)",
                request=CountTokensRequest,
                response=wire.TokenCount,
            ),
        ],
    )
