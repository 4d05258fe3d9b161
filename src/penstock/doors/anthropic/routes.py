"""The routes of Anthropic's API."""

from __future__ import annotations

from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.anthropic import messages, wire
from penstock.doors.anthropic.batches import PATH, MessageBatchEndpoints
from penstock.doors.anthropic.count_tokens import CountTokensEndpoint
from penstock.doors.anthropic.errors import ANTHROPIC
from penstock.doors.anthropic.paging import PAGING
from penstock.doors.anthropic.requests import CountTokensRequest, MessageBatchRequest, MessagesRequest
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.route import Handler, Route, in_dialect
from penstock.doors.jobs.backlog import Backlog
from penstock.errors import NoSuchPath


def anthropic_routes(dispatcher: RequestDispatcher, backlog: Backlog | None) -> list[Route]:
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
            *_batch_routes(dispatcher, backlog),
        ],
    )


def _batch_routes(dispatcher: RequestDispatcher, backlog: Backlog | None) -> list[Route]:
    """Without a backlog all of them answer with the reason."""
    batches = (
        None if backlog is None else MessageBatchEndpoints(dispatcher, backlog.workspace, backlog.accepts, backlog.batches.wake)
    )

    def handler(name: str) -> Handler:
        return _refuse_without_workspace if batches is None else getattr(batches, name)

    one = f"{PATH}/{{batch}}"
    return [
        Route(
            "POST",
            PATH,
            handler("create"),
            "Answer many conversations in the background (Anthropic)",
            request=MessageBatchRequest,
            response=wire.MessageBatchOut,
        ),
        Route(
            "GET",
            PATH,
            handler("all"),
            "List the message batches (Anthropic)",
            response=wire.MessageBatchPage,
            parameters=PAGING,
            errors=(404,),
        ),
        Route("GET", one, handler("one"), "Get the progress of a message batch (Anthropic)", response=wire.MessageBatchOut),
        Route("POST", f"{one}/cancel", handler("cancel"), "Cancel a message batch (Anthropic)", response=wire.MessageBatchOut),
        Route(
            "DELETE",
            one,
            handler("delete"),
            "Delete a message batch that has ended, with its results (Anthropic)",
            response=wire.MessageBatchDeleted,
            errors=(400,),
        ),
        Route("GET", f"{one}/results", handler("results"), "Get the results of a message batch (Anthropic)", errors=(400,)),
    ]


async def _refuse_without_workspace(request: Request) -> Response:
    raise NoSuchPath("This server has no workspace, so it has no batches.", hint="Start it with --workspace FOLDER.")
