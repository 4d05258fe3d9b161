"""RequestDispatcher: the path of every request that a model answers, in all dialects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.domain.job import Job
from penstock.doors.access.gate import shutting_down
from penstock.doors.access.keys import Caller
from penstock.doors.access.meter import Meter, Ticket
from penstock.doors.api_config import ApiConfig
from penstock.doors.dispatch.answering import respond
from penstock.doors.dispatch.compiling import CompileTurns
from penstock.doors.dispatch.mailbox import Mailbox
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.fields import LARGE_BODY_BYTES, Body, Result, ignored_headers, parse, renamed_fields, whole_body
from penstock.doors.http.route import Route
from penstock.doors.http.threads import run_in_thread
from penstock.doors.http.workers import Worker, Workers
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import KeyLimit, RequestError, UnknownModel

MAX_MESSAGES = 1 << 16  # for a model whose chat template drops messages, so that its context sets no limit


@dataclass(frozen=True, slots=True)
class MeteredWork:
    """Work for a request that needs no job, counted against its key's limits separately from answers."""

    worker: Worker
    ticket: Ticket
    max_messages: int

    async def read(self, kind: type[Body], request: Request) -> Body:
        """Read and parse a body, a large one in a thread."""
        body = await whole_body(request)
        large = len(body) > LARGE_BODY_BYTES
        max_messages = self.max_messages if large else None
        return await self.worker.run(lambda: parse(kind, body, max_messages=max_messages), enabled=large)

    async def run(self, make: Callable[[], Result]) -> Result:
        return await self.worker.run(make)

    def count(self, tokens: int) -> None:
        self.ticket.count(tokens)


class RequestDispatcher:
    """Takes every request that a model answers: finds the model, checks the key, runs the jobs.

    layers: models of which this node only holds layers, for other nodes.
    mailbox: set while the server runs.
    """

    def __init__(self, api: ApiConfig, layers: Sequence[HostedLayers] = ()) -> None:
        self.api = api
        self.layers = layers
        self.mailbox: Mailbox | None = None
        self.draining = False
        self._meter = Meter(record=api.usage.count)
        self._turns = CompileTurns()
        self._work_meter = Meter()  # of requests that no job answers
        self._workers = Workers()
        api.keys.on_revoked = self._meter.revoke

    def offered(self, request: Request) -> list[tuple[str, ServedModel]]:
        """List the names that the caller may use, the models' own first."""
        caller, catalog = caller_of(request), self.api.catalog
        return [(name, served) for name, served in catalog.names() if caller.may_use(name, catalog.canonical)]

    def names(self, request: Request) -> str:
        return ", ".join(name for name, _ in self.offered(request))

    def route(
        self, path: str, request: type[Body], exchange: Callable[[Body, Context], Exchange], description: str, **rest: Any
    ) -> Route:
        """Make the route of an operation that a model answers."""
        return Route("POST", path, partial(self.answer, request, exchange), description, request=request, **rest)

    async def answer(self, kind: type[Body], exchange: Callable[[Body, Context], Exchange], request: Request) -> Response:
        """Read a request, find its model, translate it and run it. A large one is read and translated in a thread.

        It counts as an open answer of its key from the start, so that work before the answer is limited too.
        """
        body = await whole_body(request)
        large = len(body) > LARGE_BODY_BYTES
        caller = caller_of(request)
        mailbox = self._open_mailbox()
        place = self._meter.hold(caller)
        try:
            async with self._workers.worker(caller.owner) as worker:
                max_messages = self._max_messages() if large else None
                params = await worker.run(lambda: parse(kind, body, max_messages=max_messages), enabled=large)
                served = self.find(getattr(params, "model", None), request)
                slow = large or params.slow
                if slow:
                    served.hosted.jobs.check_room()  # before spending anything on it; others are refused when submitted
                context = Context(served, self.api.limits, caller.owner)
                with renamed_fields(params.names):
                    if params.compiles:
                        made = await self._turns.run(lambda: exchange(params, context), caller.owner, request, context.aborted)
                    else:
                        made = await worker.run(lambda: exchange(params, context), enabled=slow)
                    if made.check_room is not None:
                        await run_in_thread(made.check_room)
                    priority = caller.priority(made.priority)
                    jobs = [
                        replace(job, priority=priority, owner=context.prefix_owner, submitter=caller.owner or "")
                        for job in made.jobs
                    ]
                    admit = partial(self._admit, caller, place)
                    keep_alive = self.api.server.keep_alive
                    try:
                        return await respond(
                            replace(made, jobs=jobs),
                            served,
                            mailbox,
                            admit,
                            keep_alive=keep_alive,
                            worker=worker if slow else None,
                            headers=ignored_headers(params),
                        )
                    except KeyLimit as refusal:
                        if params.compiles:
                            self._turns.record_wasted(caller.owner, refusal)
                        raise
        finally:
            place.close()

    @asynccontextmanager
    async def metered(self, request: Request) -> AsyncIterator[MeteredWork]:
        """Admit a request that needs no job, such as one to tokenize a text. Its tokens are counted once they are known."""
        caller = caller_of(request)
        ticket = self._work_meter.hold(caller)
        try:
            async with self._workers.worker(caller.owner) as worker:
                yield MeteredWork(worker, ticket, self._max_messages())
        finally:
            ticket.close()

    def _admit(self, caller: Caller, place: Ticket, jobs: Sequence[Job]) -> Ticket:
        """Count the jobs against the key's limits. Answers without a max_tokens are cut to what the key has left.

        place: the ticket that the request has held until now.
        """
        self.api.keys.check(caller)
        place.close()
        generating = [job for job in jobs if not job.request.embed]
        ticket = self._meter.admit(
            caller,
            outputs=max(1, sum(job.sampling.n for job in generating)),  # embeddings of any number of texts are one answer
            prompt_tokens=sum(len(job.prompt_ids) for job in jobs),
            max_tokens=max((job.max_tokens for job in generating), default=0),
            open_ended=any(job.sampling.max_tokens is None for job in generating),
        )
        self.api.usage.count(caller.owner, requests=1)
        for job in generating:
            job.max_tokens = min(job.max_tokens, ticket.max_tokens)
        return ticket

    def find(self, name: str | None, request: Request) -> ServedModel:
        """Find the model that a request names; one that names none gets the only one."""
        catalog = self.api.catalog
        if not catalog.models:
            raise UnknownModel("No model is served here.", hint=self.describe_layers())
        if name is None and len(catalog.models) > 1:
            raise RequestError("model is missing.", field="model", hint=f"Served here: {self.names(request)}.")
        served = catalog.resolve(name)
        if served is None:
            raise UnknownModel(f"Model '{name or '':.100}' is not served here.", hint=f"Served here: {self.names(request)}.")
        caller_of(request).check_model(name or served.hosted.name, catalog.canonical)
        request.state.log["model"] = served.hosted.name
        return served

    def _max_messages(self) -> int:
        """The most messages, or parts of them, that any model takes. The request's own model is known only after parsing."""
        return max((served.max_messages or MAX_MESSAGES for served in self.api.catalog.models.values()), default=MAX_MESSAGES)

    def describe_layers(self) -> str:
        names = ", ".join(hosted.name for hosted in self.layers)
        return f"This node only holds layers of {names} for other nodes. `penstock network status` shows which nodes serve it."

    def _open_mailbox(self) -> Mailbox:
        if self.draining or self.mailbox is None:
            raise shutting_down()
        return self.mailbox


def caller_of(request: Request) -> Caller:
    """The caller that the gate has identified."""
    caller: Caller = request.state.caller
    return caller
