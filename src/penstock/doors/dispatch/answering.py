"""Sends answers, streamed or whole, and cancels the jobs of clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.domain.updates import FinishReason, JobFailed, JobUpdate, OutputFinished, PrefillProgress
from penstock.doors.access.gate import CLIENT_CLOSED_REQUEST
from penstock.doors.dispatch.mailbox import Mailbox
from penstock.doors.dispatch.running import Admit, RunningRequest
from penstock.doors.generation.exchange import Answer, Exchange
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.errors import id_headers, send_error, send_json
from penstock.doors.http.framing import encode
from penstock.doors.http.threads import run_in_thread
from penstock.doors.http.workers import Worker
from penstock.errors import PenstockError

STREAMED = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would hold events back
]

LARGE_ANSWER_TOKENS = 500  # each may have twenty log-probabilities, and is then some kilobytes of JSON


async def respond(
    exchange: Exchange,
    served: ServedModel,
    mailbox: Mailbox,
    admit: Admit,
    *,
    keep_alive: float,
    worker: Worker | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Start the jobs of a request and return the response that follows them. worker: tokenizes the prompt, and the answer is
    encoded in a thread too; None for a short request. headers: additional response headers."""
    if any(job.sampling.logprobs is not None for job in exchange.jobs):
        await served.ready_for_logprobs()
    running = RunningRequest(mailbox, served.hosted, admit)
    await running.start(exchange.jobs, worker)
    try:
        answer = exchange.answer(running.job_id, running.prompts)
    except BaseException:
        running.close()  # nothing would read their updates
        raise
    return AnswerResponse(running, answer, exchange, keep_alive=keep_alive, slow=worker is not None, headers=headers)


class AnswerResponse(Response):
    """Sends the answer of running jobs, and puts their outcome into `scope["state"]["log"]`."""

    def __init__(
        self,
        running: RunningRequest,
        answer: Answer,
        exchange: Exchange,
        *,
        keep_alive: float,
        slow: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._running = running
        self._answer = answer
        self._exchange = exchange
        self._keep_alive = keep_alive
        self._slow = slow
        self._framing = answer.framing
        more = {**id_headers(running.job_id), **(headers or {})}
        self._more_headers = [(name.encode(), value.encode()) for name, value in more.items()]
        self._failed = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.Event()
        watcher = asyncio.create_task(self._watch(receive, left))
        try:
            await (self._send_events(send, left) if self._exchange.stream else self._send_whole(scope, send, left))
        finally:
            watcher.cancel()
            self._running.close()
            scope.setdefault("state", {}).setdefault("log", {}).update(self._facts(left.is_set()))

    async def _watch(self, receive: Receive, left: asyncio.Event) -> None:
        """Wait for the client to disconnect: its request was read, so no other message can come."""
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()
        self._running.cancel()

    # ---- as a stream ----

    async def _send_events(self, send: Send, left: asyncio.Event) -> None:
        running, framing = self._running, self._framing
        headers = [(b"content-type", framing.media_type), *STREAMED, *self._more_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        timer = KeepAliveTimer(self._keep_alive, running.wake)
        frames = [framing.frame(event) for event in self._answer.begin()]
        try:
            while True:
                if frames:
                    await send({"type": "http.response.body", "body": b"".join(frames), "more_body": True})
                    timer.reset()
                if running.done:
                    break
                frames = [frame for number, update in await running.read() for frame in self._frames(number, update)]
                if not frames and framing.comment is not None and timer.has_run_out:
                    frames = [framing.comment("keep-alive")]
        finally:
            timer.close()
        if not left.is_set():  # or half an answer would be stored
            await send({"type": "http.response.body", "body": b"".join([*await self._last_frames(), framing.done])})

    def _frames(self, number: int, update: JobUpdate) -> Iterable[bytes]:
        if self._failed:
            return ()  # an error is the last event
        framing = self._framing
        match update:
            case PrefillProgress(done, total):
                has_comment = framing.comment is not None and done < total
                return (framing.comment(f"prompt {done}/{total}"),) if has_comment and framing.comment else ()
            case JobFailed(error):
                return self._error_frames(error)
            case OutputFinished(reason=FinishReason.CANCELLED):
                return ()  # the client has disconnected, or the error follows
        return map(framing.frame, self._answer.take(number, update))

    async def _last_frames(self) -> Iterable[bytes]:
        running = self._running
        if self._failed:
            return ()
        if running.error is not None:
            return self._error_frames(running.error)
        try:
            await self._keep()
        except PenstockError as error:
            running.error = error
            return self._error_frames(error)
        return map(self._framing.frame, self._answer.end(running.usage))

    def _error_frames(self, error: PenstockError) -> Iterable[bytes]:
        self._failed = True
        return [self._framing.frame(event) for event in self._answer.failed(error)]

    # ---- whole ----

    async def _send_whole(self, scope: Scope, send: Send, left: asyncio.Event) -> None:
        running = self._running
        while not running.done:
            for number, update in await running.read():
                for _ in self._answer.take(number, update):
                    pass  # the answer collects them
        if left.is_set():
            return
        if running.error is None:
            try:
                await self._keep()
            except PenstockError as error:
                running.error = error
        if running.error is not None:
            await send_error(scope, send, running.error, self._more_headers)
            return
        large = self._slow or running.usage.completion_tokens > LARGE_ANSWER_TOKENS
        body = await run_in_thread(lambda: encode(self._answer.whole(running.usage)), enabled=large)
        await send_json(send, 200, body, self._more_headers)

    async def _keep(self) -> None:
        keep, usage = self._exchange.keep, self._running.usage
        if keep is not None:
            await run_in_thread(lambda: keep(self._answer, usage))

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
            facts["status"] = CLIENT_CLOSED_REQUEST
        return facts


class KeepAliveTimer:
    """Wakes the writer of a stream that has sent nothing for `limit` seconds. One timer per stream: one per token is too many."""

    def __init__(self, limit: float, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._wake = wake
        self._since = self._loop.time()
        self._timer = self._loop.call_later(limit, self._check)

    def reset(self) -> None:
        self._since = self._loop.time()

    @property
    def has_run_out(self) -> bool:
        return self._loop.time() >= self._since + self._limit

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self.has_run_out:
            self._wake()
        left = self._since + self._limit - self._loop.time()
        self._timer = self._loop.call_later(left if left > 0 else self._limit, self._check)
