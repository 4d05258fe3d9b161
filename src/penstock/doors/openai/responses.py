"""How an answer leaves: as server-sent events while it is made, or whole. A client that leaves takes its jobs with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.domain.job import JobFailed, JobUpdate, PrefillProgress
from penstock.doors.access import CLIENT_LEFT
from penstock.doors.openai import wire
from penstock.doors.openai.answers import Answer
from penstock.doors.openai.errors import body_of, headers_of, status_of
from penstock.doors.running import RunningRequest
from penstock.errors import PenstockError

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would hold the words back
]


class AnswerResponse(Response):
    """Sends the answer of running jobs. `scope["state"]["log"]` is told what became of them."""

    def __init__(
        self, running: RunningRequest, answer: Answer, *, stream: bool, include_usage: bool, keep_alive: float, request_id: str
    ) -> None:
        self._running, self._answer = running, answer
        self._stream, self._include_usage, self._keep_alive = stream, include_usage, keep_alive
        self._request_id = [(b"x-request-id", request_id.encode())]
        self._failed = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.Event()
        watcher = asyncio.create_task(self._watch(receive, left))
        try:
            await (self._send_events(send) if self._stream else self._send_whole(send, left))
        finally:
            watcher.cancel()
            self._running.cancel()
            scope.setdefault("state", {}).setdefault("log", {}).update(self._facts(left.is_set()))

    async def _watch(self, receive: Receive, left: asyncio.Event) -> None:
        """The request was read, so all that can still come is the news that the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        self._running.cancel()

    async def _send_events(self, send: Send) -> None:
        running = self._running
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM + self._request_id})
        clock = asyncio.get_running_loop().time
        silent_since = clock()
        while not running.done:
            updates = await running.read(max(0.0, silent_since + self._keep_alive - clock()))
            frames = [frame for number, update in updates for frame in self._frames(number, update)]
            if not frames and clock() >= silent_since + self._keep_alive:
                frames = [wire.comment("keep-alive")]
            if frames:
                await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
                silent_since = clock()
        last = []
        if running.error is None and self._include_usage:
            last.append(wire.event(self._answer.usage_chunk(running.usage)))
        await send({"type": "http.response.body", "body": b"".join([*last, wire.DONE])})

    def _frames(self, number: int, update: JobUpdate) -> Iterable[bytes]:
        if self._failed:
            return ()  # after an error nothing more is said
        match update:
            case PrefillProgress(done, total):
                return (wire.comment(f"prompt {done}/{total}"),) if done < total else ()
            case JobFailed(error):
                self._failed = True
                return (wire.event(body_of(error)),)
        return map(wire.event, self._answer.take(number, update))

    async def _send_whole(self, send: Send, left: asyncio.Event) -> None:
        running = self._running
        while not running.done:
            for number, update in await running.read():
                for _ in self._answer.take(number, update):
                    pass  # kept by the answer
        if left.is_set():
            return
        if running.error is not None:
            await send_error(send, running.error, self._request_id)
            return
        await _send_json(send, 200, wire.encode(self._answer.whole(running.usage)), self._request_id)

    def _facts(self, left: bool) -> dict[str, object]:
        running = self._running
        facts: dict[str, object] = {}
        if running.error is not None:
            facts["error"] = running.error.code
        elif running.done:
            facts = {
                "prompt_tokens": running.usage.prompt_tokens,
                "cached_tokens": running.usage.cached_tokens,
                "completion_tokens": running.usage.completion_tokens,
                "first_token": round(running.timings.first_token, 3),
            }
        if left:
            facts["status"] = CLIENT_LEFT
        return facts


async def send_error(send: Send, error: PenstockError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    more = [(name.encode(), value.encode()) for name, value in headers_of(error).items()]
    with contextlib.suppress(OSError):
        await _send_json(send, status_of(error), wire.encode(body_of(error)), [*headers, *more])


async def _send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
