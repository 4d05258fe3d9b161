"""LiveEvents: GET /events, a stream of one snapshot and then deltas. Nothing is gathered while no client watches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.doors.access.keys import Caller, Canonical
from penstock.doors.app.live.rates import RateMeter
from penstock.doors.app.live.state import Gathered
from penstock.doors.app.live.types import VERSION, Delta, LiveState, Snapshot
from penstock.doors.dispatch.answering import STREAMED
from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.framing import EVENT_STREAM, NAMED_EVENTS
from penstock.doors.http.paging import refuse_unknown_params
from penstock.doors.http.replies import json_reply
from penstock.doors.http.route import Parameter, Route
from penstock.engine.hosted_model import HostedLayers, HostedModel
from penstock.errors import KeyLimit, RequestError

logger = logging.getLogger("penstock.http")

PATH = "/events"
INTERVAL_S = 1.0
MAX_WATCHERS = 16  # of one key
STREAM = Parameter("stream", Literal["true", "false"], "false answers with one snapshot instead, as JSON.")


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that turns `before` into `after`. Neither may contain None."""
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        old = before.get(name)
        if old == value:
            continue
        patch[name] = changes(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return patch


class LiveEvents:
    """Used on the event loop only.

    gather: reads the state of all keys.
    hosted: the models whose rates are measured.
    is_current: whether a key is valid and its limits are unchanged; otherwise its streams end.
    draining: whether the server is about to stop, which ends all streams.
    """

    def __init__(
        self,
        gather: Callable[[], Gathered],
        hosted: Callable[[], list[HostedLayers]],
        canonical: Canonical,
        *,
        is_current: Callable[[Caller], bool] = lambda caller: True,
        draining: Callable[[], bool] = lambda: False,
        interval: float = INTERVAL_S,
    ) -> None:
        self._gather = gather
        self._hosted = hosted
        self._canonical = canonical
        self.is_current = is_current
        self.draining = draining
        self._interval = interval
        self._watchers: Counter[str | None] = Counter()
        self._meters: dict[str, RateMeter] = {}
        self._gathered: Gathered | None = None
        self.number = 0  # of the newest state
        self._time = 0.0
        self._frames: dict[tuple[Caller, int], bytes] = {}  # of the newest state, by caller and number of its previous state
        self._views: dict[Caller, LiveState] = {}  # of the newest state
        self._changed = asyncio.Condition()
        self._ticker: asyncio.Task[None] | None = None

    def route(self) -> Route:
        return Route(
            "GET",
            PATH,
            self.respond,
            "Watch this node and its network",
            response=Snapshot,
            stream="text/event-stream",
            events=(Snapshot, Delta),
            parameters=(STREAM,),
            errors=(429,),
        )

    async def respond(self, request: Request) -> Response:
        refuse_unknown_params(request, "stream")
        stream = request.query_params.get("stream", "true")
        if stream not in ("true", "false"):
            raise RequestError(f"stream = '{stream[:40]}' cannot be used.", field="stream", hint="Give true or false.")
        caller = caller_of(request)
        if stream == "false":
            if self._ticker is None:
                self._refresh()
            return json_reply(self._snapshot(caller))
        if self._watchers[caller.owner] >= MAX_WATCHERS:
            raise KeyLimit(
                f"{MAX_WATCHERS} clients with this key are already watching; more are not allowed.",
                retry_after=1,
                hint="Close one of them.",
            )
        return EventsResponse(self, caller)

    @property
    def watched(self) -> bool:
        return self._ticker is not None

    def enter(self, caller: Caller) -> None:
        """Add a watcher. The first one starts the ticker."""
        self._watchers[caller.owner] += 1
        if self._ticker is None:
            self._refresh()
            self._ticker = asyncio.create_task(self._tick())

    def leave(self, caller: Caller) -> None:
        self._watchers[caller.owner] -= 1
        self._watchers += Counter()  # without zeros
        if not self._watchers and self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
            self._gathered = None
            self._meters.clear()
            self._frames.clear()
            self._views.clear()

    async def newer(self, number: int) -> None:
        """Wait for a state newer than `number`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.number > number)

    def view(self, caller: Caller) -> LiveState:
        """The part of the newest state that a caller may see."""
        assert self._gathered is not None
        if caller not in self._views:
            self._views[caller] = self._gathered.seen_by(caller, self._canonical)
        return self._views[caller]

    def frame(self, caller: Caller, number: int, before: LiveState | None) -> bytes:
        """The event that takes a client from an earlier state to the newest; number: of that state."""
        key = (caller, number)
        if key not in self._frames:
            if before is None:
                self._frames[key] = NAMED_EVENTS.frame(self._snapshot(caller))
            else:
                patch = changes(before, self.view(caller))
                delta: Delta = {"type": "delta", "version": VERSION, "time": self._time, "changes": patch}
                self._frames[key] = NAMED_EVENTS.frame(delta)
        return self._frames[key]

    def _snapshot(self, caller: Caller) -> Snapshot:
        return {"type": "snapshot", "version": VERSION, "time": self._time, "state": self.view(caller)}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                self._refresh()
            except Exception:  # or those who watch would wait for ever
                logger.exception("the state of the node could not be read")
            async with self._changed:
                self._changed.notify_all()

    def _refresh(self) -> None:
        gathered, now = self._gather(), time.monotonic()
        for hosted in self._hosted():
            engine, model = hosted.engine, gathered.state["models"].get(hosted.name)
            if model is None:
                continue
            preemptions = engine.sequences.preemptions if isinstance(hosted, HostedModel) else 0
            rates, latencies = self._meters.setdefault(hosted.name, RateMeter()).read(engine.stats, preemptions, now)
            if rates is not None:
                model["rates"] = rates
            model["latencies"] = latencies
        self._gathered = gathered
        self._time = round(time.time(), 3)
        self.number += 1
        self._frames.clear()
        self._views.clear()


class EventsResponse(Response):
    """Sends the newest state each time the client has read the previous one. The connection drops clients that do not read."""

    def __init__(self, events: LiveEvents, caller: Caller) -> None:
        self._events = events
        self._caller = caller
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, caller = self._events, self._caller
        events.enter(caller)
        sending = asyncio.create_task(self._send(send))
        try:
            leaving = asyncio.create_task(_left(receive))
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            events.leave(caller)

    async def _send(self, send: Send) -> None:
        events, caller = self._events, self._caller
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENT_STREAM), *STREAMED]})
        number, before = 0, None
        while not events.draining() and events.is_current(caller):
            frame = events.frame(caller, number, before)
            number, before = events.number, events.view(caller)
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            await events.newer(number)
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
