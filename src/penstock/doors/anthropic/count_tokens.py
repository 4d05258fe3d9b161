"""POST /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.anthropic import wire
from penstock.doors.anthropic.messages import turn_of
from penstock.doors.anthropic.requests import CountTokensRequest
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.generation.turn import turn_tokens
from penstock.doors.http.fields import ignored_headers, renamed_fields
from penstock.doors.http.replies import json_reply


class CountTokensEndpoint:
    def __init__(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher

    async def count(self, request: Request) -> Response:
        async with self._dispatcher.metered(request) as work:
            params = await work.read(CountTokensRequest, request)
            served = self._dispatcher.find(params.model, request)
            with renamed_fields(params.names):
                tokens = await work.run(lambda: turn_tokens(turn_of(params), served))
            work.count(len(tokens))
        return json_reply(wire.TokenCount(input_tokens=len(tokens)), headers=ignored_headers(params))
