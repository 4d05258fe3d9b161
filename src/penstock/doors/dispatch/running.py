"""RunningRequest: the jobs of one HTTP request, which are started, read and cancelled together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from penstock.domain.job import Job
from penstock.domain.request import JobRequest, new_public_id
from penstock.domain.updates import JobDone, JobFailed, Timings, TokensOut, Usage
from penstock.doors.access.meter import Ticket
from penstock.doors.dispatch.mailbox import Mailbox, NumberedUpdate
from penstock.doors.http.workers import Worker
from penstock.engine.hosted_model import HostedModel
from penstock.engine.job_factory import JobHandle, PreparedJob
from penstock.errors import NotReady, PenstockError, QueueFull

STATUS_HINT = "`penstock network status` shows which layers are missing, and what to run."
MAX_CONCURRENT_JOBS = 128  # of one request in the engine, so that later requests do not wait for all of a long list


Admit = Callable[[Sequence[Job]], Ticket]  # raises if the key's limits do not allow these jobs now


class RunningRequest:
    """The jobs of one request.

    job_id: of its first job, or a new one if it has none.
    prompts: the prompt tokens of each job.
    error: the first failure of any job.
    usage, timings: complete when it is `done`.
    """

    def __init__(self, mailbox: Mailbox, hosted: HostedModel, admit: Admit) -> None:
        self._updates = mailbox.open()
        self._hosted = hosted
        self._admit = admit
        self._ticket: Ticket | None = None
        self._waiting: deque[PreparedJob] = deque()  # not in the engine yet
        self._handles: list[JobHandle] = []
        self._ended = 0
        self._counted_job: int | None = None  # number of the running job that counts against the node's limit
        self.job_id = ""
        self.prompts: list[Sequence[int]] = []
        self.error: PenstockError | None = None
        self.usage = Usage()
        self.timings = Timings()

    async def start(self, requests: Sequence[JobRequest], worker: Worker | None = None) -> None:
        """Start all jobs, or none if one is refused. worker: tokenizes them, if that takes long."""
        hosted = self._hosted
        if missing := hosted.engine.pipe.explain():
            raise NotReady(missing, hint=STATUS_HINT)

        def prepare() -> list[PreparedJob]:
            return [hosted.jobs.prepare(request, self._updates.sink(number)) for number, request in enumerate(requests)]

        prepared = prepare() if worker is None else await worker.run(prepare)
        self.job_id = prepared[0].job.job_id if prepared else new_public_id()
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

    async def read(self) -> list[NumberedUpdate]:
        """Wait for updates; an empty list after `wake`."""
        found = await self._updates.read()
        generated = 0
        for number, update in found:
            if isinstance(update, TokensOut):
                generated += len(update.token_ids)
            elif isinstance(update, JobDone | JobFailed):
                self._ended += 1
                self._counted_job = None if number == self._counted_job else self._counted_job
            if isinstance(update, JobDone):
                self._add(update)
            elif isinstance(update, JobFailed):
                self._fail(update.error)
        if generated and self._ticket is not None:
            self._ticket.count(generated, generated=True)
        try:
            self._submit_some()
        except PenstockError as error:
            self._fail(error)
        return found

    def wake(self) -> None:
        self._updates.wake()

    def cancel(self) -> None:
        self._waiting.clear()
        for handle in self._handles:
            handle.cancel()

    def close(self) -> None:
        """Must be called after `start`, whatever happens."""
        self.cancel()
        if self._ticket is not None:
            self._ticket.close()

    def _submit_some(self) -> None:
        """Submit as many jobs as the engine may hold.

        If the node is full, the next job waits for another of this request to end; a request that has begun is not refused.
        Texts to embed count as one job together, so that a long list does not use up the node's limit.
        """
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
