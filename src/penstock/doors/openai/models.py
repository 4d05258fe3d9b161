"""GET /v1/models: what this node offers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.anthropic.models import PAGING, SPOKEN, described, model_page
from penstock.doors.dispatch.dispatcher import Desk
from penstock.doors.generation.served_model import Served
from penstock.doors.http.errors import is_anthropic
from penstock.doors.http.replies import json_reply
from penstock.doors.openai import wire
from penstock.errors import RequestError


class Models:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def all(self, request: Request) -> Response:
        if is_anthropic(request.scope):
            return json_reply(model_page(self._desk, request))
        for parameter in PAGING:
            if parameter.name in request.query_params:
                hint = f"Send the header {SPOKEN.name}, or leave it out: the list is whole."
                raise RequestError(f"{parameter.name} is for Anthropic's pages.", field=parameter.name, hint=hint)
        return json_reply(wire.ModelList(data=[_described(name, served) for name, served in self._desk.offered(request)]))

    async def one(self, request: Request) -> Response:
        name = request.path_params["model"]
        served = self._desk.find(name, request)
        return json_reply(described(name, served, self._desk) if is_anthropic(request.scope) else _described(name, served))


def _described(name: str, served: Served) -> wire.ModelOut:
    return wire.ModelOut(id=name, created=served.created, root=served.hosted.name, max_model_len=served.hosted.context)
