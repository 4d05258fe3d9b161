"""Desk: what every dialect asks before it answers. Which models are offered, for whom, and whether there is room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.config.node import LimitsConfig, ServerConfig
from penstock.domain.job import Job
from penstock.doors.access.gate import leaving
from penstock.doors.access.keys import Caller, Keys
from penstock.doors.access.meter import Meter, Ticket
from penstock.doors.dispatch.answering import respond
from penstock.doors.dispatch.mailbox import Mailbox
from penstock.doors.generation.catalog import LATEST
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.fields import LARGE, Asked, named_as_given, parse, run_in_thread, whole_body
from penstock.doors.http.route import Route
from penstock.engine.hosted_model import HostedLayers
from penstock.errors import RequestError, UnknownModel


class RequestDispatcher:
    """`models` are those that are offered, by name, `aliases` further names for them; `layers` are what the node holds only for
    others."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        aliases: Mapping[str, str],
        layers: Sequence[HostedLayers],
        *,
        server: ServerConfig,
        limits: LimitsConfig,
        keys: Keys,
    ) -> None:
        self.models, self.aliases, self.layers = models, aliases, layers
        self.server, self.limits, self.keys = server, limits, keys
        self._meter = Meter()
        keys.on_revoked = self._meter.revoke
        self.mailbox: Mailbox | None = None  # from the moment that the server runs
        self.draining = False

    def offered(self, request: Request) -> list[tuple[str, ServedModel]]:
        """All names that whoever asks may use, the models' own first."""
        caller = caller_of(request)
        known = [*((name, name) for name in self.models), *self.aliases.items()]
        return [(name, self.models[own]) for name, own in known if caller.may_use(name, own)]

    def route(
        self, path: str, asks: type[Asked], exchange: Callable[[Asked, Context], Exchange], about: str, **rest: Any
    ) -> Route:
        """An operation that a model answers."""
        return Route("POST", path, partial(self.answer, asks, exchange), about, asks=asks, **rest)

    def names(self, request: Request) -> str:
        return ", ".join(name for name, _ in self.offered(request))

    async def answer(self, kind: type[Asked], exchange: Callable[[Asked, Context], Exchange], request: Request) -> Response:
        """The way of every request that a model answers: read it, find the model, understand it, run it. A large one goes it
        aside."""
        body = await whole_body(request)
        large = len(body) > LARGE
        asked = await run_in_thread(lambda: parse(kind, body), enabled=large)
        served = self.find(getattr(asked, "model", None), request)
        mailbox = self.room()
        slow = large or asked.slow
        if slow:
            served.hosted.jobs.check_room()  # before anything is spent on it; others are refused when they are submitted
        caller = caller_of(request)
        context = Context(served, self.limits, caller.owner)
        with named_as_given(asked.names):
            made = await run_in_thread(lambda: exchange(asked, context), enabled=slow)
            priority = caller.priority(made.priority)
            made = replace(made, jobs=[replace(job, priority=priority) for job in made.jobs])
            admit = partial(self._admit, caller)
            return await respond(made, served, mailbox, admit, keep_alive=self.server.keep_alive, slow=slow)

    def _admit(self, caller: Caller, jobs: Sequence[Job]) -> Ticket:
        """Answers that may be as long as they like are cut to what the key has left."""
        self.keys.check(caller)
        saying = [job for job in jobs if not job.request.embed]
        ticket = self._meter.admit(
            caller,
            outputs=max(1, sum(job.sampling.n for job in saying)),  # embeddings of any number of texts are one answer
            prompt_tokens=sum(len(job.prompt_ids) for job in jobs),
            max_tokens=max((job.max_tokens for job in saying), default=0),
            open_ended=any(job.sampling.max_tokens is None for job in saying),
        )
        for job in saying:
            job.max_tokens = min(job.max_tokens, ticket.max_tokens)
        return ticket

    def find(self, name: str | None, request: Request) -> ServedModel:
        """The model that a request names; where it may leave it out and there is one, that one."""
        if not self.models:
            raise UnknownModel("No model is offered here.", hint=f"T{self.holds()[1:]}")
        if name is None and len(self.models) == 1:
            name = next(iter(self.models))
        elif name is None:
            raise RequestError("model is missing.", field="model", hint=f"This node has: {self.names(request)}.")
        known = (self.aliases.get(one, one) for one in (name, name.removesuffix(LATEST)))
        served = next((self.models[one] for one in known if one in self.models), None)
        if served is None:
            raise UnknownModel(f"The model '{name[:100]}' is not here.", hint=f"This node has: {self.names(request)}.")
        caller_of(request).check_model(name, name.removesuffix(LATEST), served.hosted.name)
        request.state.log["model"] = served.hosted.name
        return served

    def holds(self) -> str:
        names = ", ".join(hosted.name for hosted in self.layers)
        return f"this node only holds layers of {names} for others. `penstock network status` shows which nodes offer it."

    def room(self) -> Mailbox:
        if self.draining or self.mailbox is None:
            raise leaving()
        return self.mailbox


def caller_of(request: Request) -> Caller:
    """The caller that the gate has recognised."""
    caller: Caller = request.state.caller
    return caller
