"""POST /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.anthropic import wire
from penstock.doors.anthropic.messages import turn_of
from penstock.doors.anthropic.requests import CountTokensRequest
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.generation.turn import turn_tokens
from penstock.doors.http.fields import read, renamed_fields, run_in_thread
from penstock.doors.http.replies import json_reply


class CountTokensEndpoint:
    def __init__(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher

    async def count(self, request: Request) -> Response:
        params = await read(CountTokensRequest, request)
        served = self._dispatcher.find(params.model, request)
        with renamed_fields(params.names):
            tokens = await run_in_thread(lambda: turn_tokens(turn_of(params), served))
        return json_reply(wire.TokenCount(input_tokens=len(tokens)))
