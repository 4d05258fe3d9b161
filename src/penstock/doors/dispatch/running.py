"""The jobs of one HTTP request: started together, read together, and cancelled together when the client leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from penstock.domain.job import Job
from penstock.domain.request import JobRequest, new_job_id
from penstock.domain.updates import JobDone, JobFailed, Timings, TokensOut, Usage
from penstock.doors.access.meter import Ticket
from penstock.doors.dispatch.mailbox import Mailbox, NumberedUpdate
from penstock.doors.http.fields import run_in_thread
from penstock.engine.hosted_model import HostedModel
from penstock.engine.job_factory import JobHandle, PreparedJob
from penstock.errors import NotReady, PenstockError, QueueFull

STATUS_HINT = "`penstock network status` shows who holds what, and what to run."
MAX_CONCURRENT_JOBS = 128  # jobs of one request in the engine: whoever comes later waits for these, not for all of a long list


Admit = Callable[[Sequence[Job]], Ticket]  # whether its client may have these jobs now


class RunningRequest:
    """`job_id` names it, and is that of its first job where it has one. `prompts` are the tokens of each job's prompt. `error` is
    the first failure of any of its jobs; `usage` and `timings` are known when it is `done`."""

    def __init__(self, mailbox: Mailbox, hosted: HostedModel, admit: Admit) -> None:
        self._updates, self._hosted, self._admit = mailbox.open(), hosted, admit
        self._ticket: Ticket | None = None
        self._waiting: deque[PreparedJob] = deque()  # not in the engine yet
        self._handles: list[JobHandle] = []
        self._ended = 0
        self._counted_job: int | None = None  # the number of a job that is counted, as long as it runs
        self.job_id, self.prompts = "", list[Sequence[int]]()
        self.error: PenstockError | None = None
        self.usage, self.timings = Usage(), Timings()

    async def start(self, requests: Sequence[JobRequest], *, slow: bool = False) -> None:
        """Refused whole if one of them is. Those that are `slow` are tokenized aside."""
        hosted = self._hosted
        if missing := hosted.engine.pipe.explain():
            raise NotReady(missing, hint=STATUS_HINT)

        def prepare() -> list[PreparedJob]:
            return [hosted.jobs.prepare(request, self._updates.sink(number)) for number, request in enumerate(requests)]

        prepared = await run_in_thread(prepare, enabled=slow)
        self.job_id = prepared[0].job.job_id if prepared else new_job_id()
        self.prompts = [one.job.prompt_ids for one in prepared]
        self._ticket = self._admit([one.job for one in prepared])
        self._waiting.extend(prepared)
        try:
            self._submit_some()
        except BaseException:
            self.close()
            raise
        self._ticket.count(sum(map(len, self.prompts)))
        self._ticket.on_revoked(self._fail)

    @property
    def done(self) -> bool:
        return not self._waiting and self._ended == len(self._handles)

    async def read(self, timeout: float | None = None) -> list[NumberedUpdate]:
        found = await self._updates.read(timeout)
        for number, update in found:
            if isinstance(update, TokensOut):
                self._count(len(update.token_ids))
            elif isinstance(update, JobDone | JobFailed):
                self._ended += 1
                self._counted_job = None if number == self._counted_job else self._counted_job
            if isinstance(update, JobDone):
                self._add(update)
            elif isinstance(update, JobFailed):
                self._fail(update.error)
        try:
            self._submit_some()
        except PenstockError as error:
            self._fail(error)
        return found

    def cancel(self) -> None:
        self._waiting.clear()
        for handle in self._handles:
            handle.cancel()

    def close(self) -> None:
        """Whoever started it does this, whatever happens."""
        self.cancel()
        if self._ticket is not None:
            self._ticket.close()

    def _count(self, tokens: int) -> None:
        if self._ticket is not None:
            self._ticket.count(tokens)

    def _submit_some(self) -> None:
        """As many as may be in the engine. Where the node is full, the next waits for one of its own to end; once a request has
        begun, it goes on. Texts to be embedded take one place together, however many there are: a long list shuts nobody out."""
        jobs = self._hosted.jobs
        while self._waiting and len(self._handles) - self._ended < MAX_CONCURRENT_JOBS:
            prepared = self._waiting[0]
            embeds = prepared.job.request.embed
            try:
                handle = jobs.submit(prepared, counted=not embeds or self._counted_job is None)
                self._counted_job = len(self._handles) if self._counted_job is None else self._counted_job
            except QueueFull:
                if not self._handles:
                    raise
                if not embeds and self._ended < len(self._handles):
                    return
                handle = jobs.submit(prepared, counted=False)
            self._handles.append(handle)
            self._waiting.popleft()

    def _fail(self, error: PenstockError) -> None:
        self.error = self.error or error
        self.cancel()

    def _add(self, done: JobDone) -> None:
        self.usage += done.usage
        if self.timings.total < done.timings.total:
            self.timings = done.timings
