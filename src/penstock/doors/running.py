"""The jobs of one HTTP request: started together, read together, and cancelled together when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.domain.job import JobDone, JobFailed, JobRequest, Timings, Usage
from penstock.doors.mailbox import Mailbox, Numbered
from penstock.engine.hosted_model import HostedModel
from penstock.engine.job_factory import JobHandle
from penstock.errors import NotReady, PenstockError

SEE_STATUS = "`penstock network status` shows who holds what, and what to run."
LONG_TEXT = 20_000  # characters; tokenizing more than that would hold up the other streams


class RunningRequest:
    """`error` is the first failure of any of its jobs; `usage` and `timings` are known when it is `done`."""

    def __init__(self, mailbox: Mailbox, hosted: HostedModel) -> None:
        self._updates, self._hosted = mailbox.open(), hosted
        self._handles: list[JobHandle] = []
        self._ended = 0
        self.error: PenstockError | None = None
        self.usage, self.timings = Usage(), Timings()

    async def start(self, requests: Sequence[JobRequest]) -> None:
        """Refused whole if one of them is: those before it are cancelled."""
        if not self._hosted.engine.pipe.is_complete():
            raise NotReady(self._hosted.engine.pipe.explain(), hint=SEE_STATUS)
        try:
            long = sum(map(_length, requests)) > LONG_TEXT
            for number, request in enumerate(requests):
                sink = self._updates.sink(number)
                if long:
                    handle = await asyncio.to_thread(self._hosted.jobs.start_job, request, sink)
                else:
                    handle = self._hosted.jobs.start_job(request, sink)
                self._handles.append(handle)
        except BaseException:
            self.cancel()
            raise

    @property
    def job_id(self) -> str:
        return self._handles[0].job_id

    def prompt_ids(self, number: int) -> Sequence[int]:
        return self._handles[number].prompt_ids

    @property
    def done(self) -> bool:
        return self._ended == len(self._handles)

    async def read(self, timeout: float | None = None) -> list[Numbered]:
        found = await self._updates.read(timeout)
        for _, update in found:
            if isinstance(update, JobDone):
                self._ended += 1
                self._add(update)
            elif isinstance(update, JobFailed):
                self._ended += 1
                self.error = self.error or update.error
                self.cancel()
        return found

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _add(self, done: JobDone) -> None:
        ours, more = self.usage, done.usage
        self.usage = Usage(
            ours.prompt_tokens + more.prompt_tokens,
            ours.completion_tokens + more.completion_tokens,
            ours.cached_tokens + more.cached_tokens,
        )
        if self.timings.total < done.timings.total:
            self.timings = done.timings


def _length(request: JobRequest) -> int:
    if request.messages is not None:
        return sum(len(str(message.get("content") or "")) for message in request.messages)
    return len(request.prompt or ())
