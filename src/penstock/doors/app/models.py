"""GET /v1/models, which OpenAI's and Anthropic's clients share: the latter send a version header."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from penstock.doors.anthropic import models as anthropic
from penstock.doors.anthropic import wire as anthropic_wire
from penstock.doors.anthropic.errors import ANTHROPIC, is_anthropic
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.errors import Dialect
from penstock.doors.http.replies import json_reply
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.openai import models as openai
from penstock.doors.openai import wire as openai_wire
from penstock.doors.openai.errors import OPENAI
from penstock.errors import PenstockError, RequestError


def model_routes(dispatcher: RequestDispatcher) -> list[Route]:
    endpoint = SharedModelEndpoints(dispatcher)
    return in_dialect(
        Dialect("OpenAI", _error_body, (*OPENAI.error_types, *ANTHROPIC.error_types)),
        [
            Route(
                "GET",
                "/v1/models",
                endpoint.list,
                "List the models and their aliases",
                response=(openai_wire.ModelList, anthropic_wire.ModelPage),
                parameters=(anthropic.VERSION, *anthropic.PAGING),
            ),
            Route(
                "GET",
                "/v1/models/{model:path}",
                endpoint.get,
                "Describe a model",
                response=(openai_wire.ModelOut, anthropic_wire.AnthropicModelOut),
                parameters=(anthropic.VERSION,),
            ),
        ],
    )


class SharedModelEndpoints:
    def __init__(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher

    async def list(self, request: Request) -> Response:
        if is_anthropic(request.scope):
            return json_reply(anthropic.model_page(self._dispatcher, request))
        for parameter in anthropic.PAGING:
            if parameter.name in request.query_params:
                hint = f"Send the header {anthropic.VERSION.name}, or leave it out: the list is complete."
                raise RequestError(f"{parameter.name} is a parameter of Anthropic's API.", field=parameter.name, hint=hint)
        offered = self._dispatcher.offered(request)
        return json_reply(openai_wire.ModelList(data=[openai.describe(name, served) for name, served in offered]))

    async def get(self, request: Request) -> Response:
        name = request.path_params["model"]
        served = self._dispatcher.find(name, request)
        if is_anthropic(request.scope):
            return json_reply(anthropic.describe(name, served, self._dispatcher))
        return json_reply(openai.describe(name, served))


def _error_body(error: PenstockError, scope: Scope) -> object:
    return (ANTHROPIC if is_anthropic(scope) else OPENAI).error_body(error, scope)
