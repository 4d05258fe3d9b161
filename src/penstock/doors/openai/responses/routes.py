"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.paging import AFTER, LIMIT, ORDER
from penstock.doors.http.route import Parameter, Route, in_dialect
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.errors import OPENAI
from penstock.doors.openai.responses import wire
from penstock.doors.openai.responses.create import CreateResponse
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.doors.openai.responses.store import ResponseStore
from penstock.doors.openai.responses.stored import StoredResponseEndpoints

PATH = "/v1/responses"
ONE = f"{PATH}/{{response}}"
INCLUDED = Parameter("include", list[str], "Ignored: all is always included.")


def responses_routes(dispatcher: RequestDispatcher, backlog: Backlog | None) -> list[Route]:
    store = ResponseStore(None if backlog is None else backlog.responses)
    creating, stored = CreateResponse(store), StoredResponseEndpoints(store)
    return in_dialect(
        OPENAI,
        [
            dispatcher.route(
                PATH,
                ResponseRequest,
                creating.exchange,
                "Answer a conversation and store the response",
                response=wire.Response,
                stream="text/event-stream",
                events=wire.EVENTS,
            ),
            Route("GET", ONE, stored.get, "Get a stored response", response=wire.Response, parameters=(INCLUDED,)),
            Route("DELETE", ONE, stored.delete, "Delete a stored response", response=wire.Deleted),
            Route(
                "GET",
                f"{ONE}/input_items",
                stored.input_items,
                "List the items before it",
                response=wire.ItemList,
                parameters=(LIMIT, ORDER, AFTER, INCLUDED),
            ),
            Route(
                "POST", f"{ONE}/cancel", stored.cancel, "Refused: there are no background responses", errors=(400,), refused=True
            ),
        ],
    )
