"""EngineRunner: runs the jobs of a workspace on the models of this node, beside the requests of the API."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.domain.request import JobRequest, JobSource, new_public_id
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, Timings, Usage
from penstock.doors.access.job_meter import JobMeter
from penstock.doors.api_config import ApiConfig
from penstock.doors.generation.exchange import Answer, Context, Exchange
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.output_format import OutputFormat
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.generation.turn import resolve_sampling
from penstock.doors.grammar.remote import Aborted
from penstock.doors.http.fields import parse, renamed_fields
from penstock.doors.http.framing import encode
from penstock.doors.jobs.job_api import JobEndpoint
from penstock.doors.jobs.metering import Metering
from penstock.engine.job_factory import JobHandle
from penstock.errors import EngineStopped, KeyLimit, KeyRevoked, NotReady, RequestError, UnknownModel
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.tokens import FINGERPRINT_BYTES
from penstock.workspace.worker.runner import PartUpdate, Sink, TextWriter, Writer

TOKENIZING_THREADS = 2  # of those that prepare jobs: more would slow down the answers that run
GRAMMAR_RETRY_S = 1  # for a job whose key has too many grammars in use
MIN_DEADLINE_S = 0.001  # replaces a deadline that has passed, so that the job is the most urgent


class EngineTask:
    """A job of the workspace, tokenized, with its grammar compiled. exchange: None if its result is plain text."""

    def __init__(
        self,
        context: Context,
        request: WorkRequest,
        jobs: Sequence[JobRequest],
        exchange: Exchange | None,
        metering: Metering,
    ) -> None:
        self._metering = metering
        self._served = served = context.served
        self._owner = context.prefix_owner
        self._request = request
        self._exchange = exchange
        self._jobs = [_tokenized(served, job) for job in jobs]
        first = self._jobs[0].sampling
        self.model = served.hosted.name
        self.seed = first.seed
        plain = first.n == 1 and first.logprobs is None and first.prompt_logprobs is None
        self.resumable = len(jobs) == 1 and plain and not jobs[0].embed
        self.fingerprint = _fingerprint(self.model, request, self._jobs)
        self.writer: Writer = TextWriter()

    def start(self, job_id: str, seed: int, resume: Sequence[int], sink: Sink) -> Callable[[], None]:
        """Raises KeyLimit if the job does not fit its key's limits now."""
        hosted, request = self._served.hosted, self._request
        if missing := hosted.engine.pipe.explain():
            raise NotReady(missing)
        metered = self._metering.admit(request.owner, self._jobs, hosted.context, len(resume), sink)
        try:
            return self._start(job_id, seed, resume, metered.on_update)
        except BaseException:
            metered.close()
            raise

    def _start(self, job_id: str, seed: int, resume: Sequence[int], sink: Sink) -> Callable[[], None]:
        hosted, request = self._served.hosted, self._request
        deadline = request.deadline
        if deadline is not None:  # counted from the submission; the engine counts from now
            deadline = max(MIN_DEADLINE_S, request.submitted + deadline - time.time())
        jobs = [
            dataclasses.replace(
                job,
                sampling=job.sampling if job.embed else dataclasses.replace(job.sampling, seed=seed),
                priority=request.priority,
                deadline=deadline,
                resume=resume,
                owner=self._owner,
                submitter=request.owner or "",
                source=JobSource.BATCH if request.batch else JobSource.WORKSPACE,
            )
            for job in self._jobs
        ]
        if self._exchange is not None:
            prompts = [[int(token) for token in job.prompt or ()] for job in jobs]
            self.writer = AnswerWriter(self._exchange, self._exchange.answer(new_public_id(), prompts))
        if len(jobs) == 1:
            return hosted.jobs.start_job(jobs[0], sink, counted=False, job_id=job_id).cancel
        return _JobGroup(sink, len(jobs)).start(
            [functools.partial(hosted.jobs.start_job, job, counted=False, job_id=f"{job_id}_{i}") for i, job in enumerate(jobs)]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Writes the body of the answer, as a client of the API would get it."""

    exchange: Exchange
    answer: Answer

    def take(self, update: JobUpdate | PartUpdate) -> str:
        number, inner = (update.number, update.update) if isinstance(update, PartUpdate) else (0, update)
        for _ in self.answer.take(number, inner):
            pass  # the answer collects them
        return ""

    def result(self, usage: Usage) -> str:
        if self.exchange.keep is not None:
            self.exchange.keep(self.answer, usage)
        return encode(self.answer.whole(usage)).decode()


class _JobGroup:
    """Runs several jobs of the engine as one task, which ends when all of them have, or with the first error."""

    def __init__(self, sink: Sink, count: int) -> None:
        self._sink = sink
        self._left = count
        self._handles: list[JobHandle] = []
        self._usage = Usage()
        self._cancelled = False
        self._error: JobFailed | None = None

    def start(self, starts: Sequence[Callable[..., JobHandle]]) -> Callable[[], None]:
        try:
            for number, start in enumerate(starts):
                self._handles.append(start(sink=functools.partial(self._on_update, number)))
        except BaseException:
            self.cancel()
            raise
        return self.cancel

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _on_update(self, number: int, update: JobUpdate) -> None:
        """Runs on the compute thread, so needs no lock."""
        if not isinstance(update, JobDone | JobFailed):
            self._cancelled |= isinstance(update, OutputFinished) and update.reason is FinishReason.CANCELLED
            self._sink(PartUpdate(number, update))
            return
        self._left -= 1
        if isinstance(update, JobDone):
            self._usage += update.usage
        elif self._error is None:
            self._error = update
            self.cancel()
        if self._left:
            return
        if self._cancelled and self._error is None:
            self._sink(OutputFinished(0, FinishReason.CANCELLED))
        self._sink(self._error or JobDone(self._usage, Timings()))


class EngineRunner:
    """Runs the jobs of a workspace on the served models. A job that names no model gets the first.

    endpoints: by path; a job may be the body of a request to one of them.
    """

    def __init__(self, api: ApiConfig, endpoints: Mapping[str, JobEndpoint]) -> None:
        self._catalog = api.catalog
        self._keys = api.keys
        self._limits = api.limits
        self._endpoints = endpoints
        self._tokenizing = threading.Semaphore(TOKENIZING_THREADS)
        self._metering = Metering(JobMeter(api.keys.limits_of), api.usage)

    def accepts(self, model: str | None) -> bool:
        return self._catalog.resolve(model) is not None

    def ready(self, model: str | None) -> bool:
        served = self._catalog.resolve(model)
        return served is not None and served.hosted.engine.running and served.hosted.engine.pipe.is_complete()

    def check(self) -> None:
        if not any(served.hosted.engine.running for served in self._catalog.models.values()):
            raise EngineStopped("The engine has stopped.", hint="The log says why. Start it again.")

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> EngineTask:
        try:
            return self._prepare(request, prompt, aborted)
        except KeyLimit as error:  # too many grammars of its key are in use: the job waits in the queue
            raise KeyLimit(error.message, retry_after=GRAMMAR_RETRY_S) from None
        except Aborted as error:
            raise NotReady(str(error)) from None

    def _prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> EngineTask:
        served = self._catalog.resolve(request.model)
        if served is None:
            names = ", ".join(name for name, _ in self._catalog.names())
            raise UnknownModel(f"Model '{request.model or '':.100}' is not served here.", hint=f"Served here: {names}.")
        if request.batch is None:  # a batch checks the key for its lines
            self._check_key(request.owner, served)
        context = Context(served, self._limits, request.owner, aborted)
        if request.endpoint is not None:
            endpoint = self._endpoint(request.endpoint)
            params = parse(endpoint.request, prompt if request.batch else _with_model(prompt, served.hosted.name))
            self._check_model(params, served)
            with renamed_fields(params.names):
                exchange = endpoint.exchange(params, context)
                _refuse_stream(exchange)
                if exchange.check_room is not None:
                    exchange.check_room()
                return self._task(context, request, exchange.jobs, exchange)
        sampling = dict(request.sampling)
        limit = answer_limit(sampling.pop("max_tokens", None), self._limits, "max_tokens")
        answer_format = _answer_format(request)
        job = JobRequest(
            prompt=prompt if request.raw else None,
            messages=None if request.raw else _messages(request, prompt),
            sampling=resolve_sampling(sampling, context, max_tokens=limit),
            constraint=None if answer_format is None else answer_format.compile(context.grammars),
        )
        return self._task(context, request, [job], None)

    def _check_key(self, owner: str | None, served: ServedModel) -> None:
        """Refuse a job that a key has retried, if that key was revoked or may no longer use the model."""
        if self._keys.is_valid(owner) is False:
            raise KeyRevoked("The API key of this job is no longer valid.")
        self._keys.check_model(owner, served.hosted.name, self._catalog.canonical)

    def _task(self, context: Context, request: WorkRequest, jobs: Sequence[JobRequest], exchange: Exchange | None) -> EngineTask:
        with self._tokenizing:
            return EngineTask(context, request, jobs, exchange, self._metering)

    def _check_model(self, params: Any, served: ServedModel) -> None:
        """Refuse a body that names another model than the job, since the queue only looks at the job's."""
        if params.model is not None and self._catalog.resolve(params.model) is not served:
            hint = "Give the job the same model: `penstock work --request` does."
            raise RequestError(f"The body is for the model '{params.model:.100}', the job for another.", field="model", hint=hint)

    def _endpoint(self, path: str) -> JobEndpoint:
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            hint = f"These can: {', '.join(self._endpoints)}."
            raise RequestError(f"{path[:80]} cannot be a job.", field="endpoint", hint=hint)
        return endpoint


def _with_model(body: str, model: str) -> str:
    """Name the model in a body that leaves it out, as a job without a model does."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return body  # refused when it is parsed
    return json.dumps({**found, "model": model}) if isinstance(found, dict) and found.get("model") is None else body


def _refuse_stream(exchange: Exchange) -> None:
    if exchange.stream:
        raise RequestError("A job cannot be streamed.", field="stream", hint="Leave stream out.")


def _tokenized(served: ServedModel, job: JobRequest) -> JobRequest:
    ids = served.hosted.jobs.prepare(job).job.prompt_ids
    return dataclasses.replace(job, prompt=list(ids), messages=None, template={})


def _messages(request: WorkRequest, prompt: str) -> list[dict[str, Any]]:
    before = [] if request.system is None else [{"role": "system", "content": request.system}]
    return [*before, {"role": "user", "content": prompt}]


def _answer_format(request: WorkRequest) -> OutputFormat | None:
    if request.schema is not None:
        return OutputFormat("json_schema", "schema", request.schema)
    if request.grammar is not None:
        return OutputFormat("grammar", "grammar", request.grammar)
    return None if request.regex is None else OutputFormat("regex", "regex", request.regex)


def _fingerprint(model: str, request: WorkRequest, jobs: Sequence[JobRequest]) -> bytes:
    answer_format = [request.schema, request.grammar, request.regex, request.endpoint]
    params = [[list(job.prompt or ()), dataclasses.asdict(job.sampling)] for job in jobs]
    return hashlib.blake2b(
        json.dumps([model, params, answer_format], sort_keys=True).encode(), digest_size=FINGERPRINT_BYTES
    ).digest()
