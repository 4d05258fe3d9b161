"""JobFactory: turns a request into a running Job, and returns a handle that streams its updates."""

from __future__ import annotations

import operator
import queue
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.domain.job import Job
from penstock.domain.request import JobRequest, JobSource, new_public_id
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate
from penstock.engine.engine import Engine
from penstock.errors import EmptyPrompt, EngineError, InvalidSampling, NotReady, PromptTooLong, QueueFull, RequestError

MAX_ENDED_JOBS = 200  # of which something is kept


class PromptEncoder(Protocol):
    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def render(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> str: ...

    def exceeds(self, text: str, tokens: int) -> bool: ...


class JobHandle:
    """An accepted job. Iterating yields its updates up to the last, a JobDone or a JobFailed.

    `updates` is None if they go to a sink. Otherwise the job is cancelled when its handle is garbage-collected.
    """

    def __init__(self, job: Job, cancel: Callable[[Job], None], updates: queue.SimpleQueue[JobUpdate] | None) -> None:
        self._job = job
        self._cancel = cancel
        self._updates = updates
        self._last: JobUpdate | None = None
        if updates is not None:
            weakref.finalize(self, cancel, job).atexit = False

    @property
    def job_id(self) -> str:
        return self._job.job_id

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self._job.prompt_ids

    def __iter__(self) -> Iterator[JobUpdate]:
        if self._updates is None:
            raise EngineError("The updates of this job go to its sink.")
        while self._last is None:
            update = self._updates.get()
            if isinstance(update, JobDone | JobFailed):
                self._last = update
                self._updates.put(update)  # wakes other threads that iterate
            yield update

    def cancel(self) -> None:
        """Cancel the job. Each open output keeps its text and ends as cancelled, then the job is done."""
        self._cancel(self._job)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that is checked and tokenized, but not in the engine yet."""

    job: Job
    updates: queue.SimpleQueue[JobUpdate] | None


class EndedJob(NamedTuple):
    """The record of a job that has ended: numbers only.

    outcome: done, cancelled, or the code of its error. ended: monotonic time; the other times are seconds from its arrival.
    """

    job_id: str
    submitter: str
    source: JobSource
    outcome: str
    ended: float
    seconds: float
    queued: float | None
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int
    generated: int
    preemptions: int
    priority: int

    @classmethod
    def of(cls, job: Job, update: JobDone | JobFailed) -> EndedJob:
        now = time.monotonic()
        cancelled = any(seq.finish is FinishReason.CANCELLED for seq in job.sequences)
        return cls(
            job_id=job.job_id,
            submitter=job.request.submitter,
            source=job.request.source,
            outcome=update.error.code if isinstance(update, JobFailed) else "cancelled" if cancelled else "done",
            ended=now,
            seconds=now - job.arrival,
            queued=None if job.first_grant is None else job.first_grant - job.arrival,
            first_token=None if job.first_token is None else job.first_token - job.arrival,
            prompt_tokens=len(job.prompt_ids),
            cached_tokens=job.cached_tokens,
            generated=sum(seq.generated for seq in job.sequences),
            preemptions=job.preemptions,
            priority=job.priority,
        )


class JobFactory:
    def __init__(
        self, engine: Engine, tokenizer: PromptEncoder, *, context: int, vocab: int, max_jobs: int | None = None
    ) -> None:
        """max_jobs: outputs that may be open at once, running or waiting; None for any number."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._context = context
        self._max_jobs = max_jobs
        self._open: set[Job] = set()  # jobs that count towards `max_jobs`
        self._uncounted: set[Job] = set()  # open jobs that do not
        self._ended: deque[EndedJob] = deque(maxlen=MAX_ENDED_JOBS)
        self._id_hint = f"Ids go from 0 to {vocab - 1}."

    def start_job(
        self,
        request: JobRequest,
        sink: Callable[[JobUpdate], None] | None = None,
        *,
        counted: bool = True,
        job_id: str | None = None,
    ) -> JobHandle:
        """Check, tokenize and submit. Updates go to `sink` (on the compute thread, so it must be quick), or to the handle."""
        if counted:
            self.check_room(request.sampling.n)
        return self.submit(self.prepare(request, sink, job_id=job_id), counted=counted)

    def prepare(
        self, request: JobRequest, sink: Callable[[JobUpdate], None] | None = None, *, job_id: str | None = None
    ) -> PreparedJob:
        """Check, tokenize and hash in the caller's thread, so that bad input is refused at once and costs the engine nothing."""
        if not self._engine.max_tokens and (missing := self._engine.pipe.explain()):
            raise NotReady(missing)  # it is not known yet how much memory there will be
        prompt = self._prompt(request)
        if not all(0 <= token < self._vocab for token in request.resume):
            raise RequestError("resume contains ids outside the vocabulary.", field="resume", hint=self._id_hint)
        sampling = request.sampling
        for name in ("logit_bias", "stop_token_ids"):
            beyond = [token for token in getattr(sampling, name) if token >= self._vocab]
            if beyond:
                raise InvalidSampling(
                    f"{name} names token {beyond[0]}, which does not exist.",
                    field=name,
                    hint=self._id_hint,
                )
        limit, what = min((self._context, "the model's context"), (self._engine.max_tokens, "the KV memory"))
        room = limit - len(prompt)
        if room < 0 or (room == 0 and not request.embed):
            answer = "" if request.embed else ", and one is needed for the answer"
            raise PromptTooLong(
                f"The prompt has {len(prompt)} tokens, but {what} holds {limit}{answer}.",
                tokens=len(prompt),
                limit=limit,
                field="prompt" if request.messages is None else "messages",
                hint="Shorten it." if limit == self._context else "Shorten it, or give the engine more KV memory (kv_memory).",
            )
        updates: queue.SimpleQueue[JobUpdate] | None = None if sink else queue.SimpleQueue()
        job = Job(
            job_id=job_id or new_public_id(),
            request=request,
            prompt_ids=prompt,
            max_tokens=min(sampling.max_tokens or room, room),
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
            arrival=time.monotonic(),
            sink=sink or updates.put,  # type: ignore[union-attr]
        )
        self._engine.sequences.hash_prompt(job)
        return PreparedJob(job, updates)

    def submit(self, prepared: PreparedJob, *, counted: bool = True) -> JobHandle:
        """Hand a prepared job to the engine.

        counted: whether it counts towards `max_jobs`. Jobs from a queue with its own limit do not, and never get QueueFull.
        """
        job = prepared.job
        if counted:
            self.check_room(job.sampling.n)
        among = self._open if counted else self._uncounted
        job.arrival = time.monotonic()  # a job prepared earlier must not overtake those submitted before it
        among.add(job)
        job.on_end = self._on_end
        try:
            self._engine.submit(job)
        except EngineError:
            among.discard(job)
            raise
        return JobHandle(job, self._engine.cancel, prepared.updates)

    @property
    def open_jobs(self) -> list[Job]:
        """Accepted jobs that have not ended, in no particular order. The compute thread owns them: read only."""
        return [*self._open, *self._uncounted]

    @property
    def ended_jobs(self) -> list[EndedJob]:
        """The last jobs that have ended, oldest first."""
        return list(self._ended)

    def cancel(self, job: Job) -> None:
        """Cancel one of `open_jobs`."""
        self._engine.cancel(job)

    @property
    def counted_jobs(self) -> int:
        """How many of `open_jobs` count towards `max_jobs`."""
        return len(self._open)

    def check_room(self, outputs: int = 1) -> None:
        """Raise QueueFull if this many more outputs are too many. The only open job is always accepted."""
        open_outputs = sum(job.sampling.n for job in list(self._open))
        if self._max_jobs is None or not open_outputs or open_outputs + outputs <= self._max_jobs:
            return
        took = self._engine.stats.job_time
        each = took.total / took.count if took.count else 1.0
        raise QueueFull(
            f"{open_outputs} answers are open, and this node accepts no more at once.",
            retry_after=max(1, min(60, round(each / 2))),
            hint="Try again a little later.",
        )

    def _on_end(self, job: Job, update: JobDone | JobFailed) -> None:
        """Runs on the compute thread."""
        self._open.discard(job)
        self._uncounted.discard(job)
        self._ended.append(EndedJob.of(job, update))

    def _prompt(self, request: JobRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("Give either a prompt or messages.", field="prompt")
        if request.messages is not None:
            if not request.messages:
                raise EmptyPrompt("The conversation has no messages.", field="messages", hint="Send at least one message.")
            text = self._tokenizer.render(request.messages, **request.template)
            ids = self._encode(text, "messages", special=False)
        elif isinstance(request.prompt, str):
            ids = self._encode(request.prompt, "prompt", special=True)
        else:
            try:
                ids = [operator.index(token) for token in request.prompt or ()]
            except TypeError:
                raise RequestError("The prompt is neither text nor a list of token ids.", field="prompt") from None
        if not ids:
            raise EmptyPrompt("The prompt is empty.", field="prompt", hint="Send at least one character.")
        if not all(0 <= token < self._vocab for token in ids):
            raise RequestError("The prompt contains ids outside the vocabulary.", field="prompt", hint=self._id_hint)
        return ids

    def _encode(self, text: str, field: str, *, special: bool) -> list[int]:
        limit = min(self._context, self._engine.max_tokens)
        if self._tokenizer.exceeds(text, limit):
            raise PromptTooLong(
                f"The prompt has {len(text)} characters, which are more than the {limit} tokens that fit.",
                tokens=limit + 1,
                limit=limit,
                field=field,
                hint="Shorten it.",
            )
        try:
            return self._tokenizer.encode(text, special=special)
        except (UnicodeEncodeError, TypeError):  # how the tokenizer refuses lone surrogates
            raise RequestError("The text is not valid Unicode.", field=field, hint="Remove lone surrogates.") from None
