"""The second front door: jobs of a workspace, run by the models of this node beside the requests of the API."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.config.node import LimitsConfig
from penstock.domain.request import JobRequest
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, Timings, Usage
from penstock.doors.generation.catalog import meant
from penstock.doors.generation.exchange import Answer, Context, Exchange
from penstock.doors.generation.limits import answer_limit
from penstock.doors.generation.output_format import OutputFormat
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.generation.turn import chosen_sampling
from penstock.doors.http.fields import named_as_given, parse
from penstock.doors.http.framing import encode
from penstock.doors.jobs.endpoints import JobEndpoint
from penstock.engine.job_factory import JobHandle
from penstock.errors import EngineStopped, NotReady, RequestError, UnknownModel
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.tokens import FINGERPRINT_BYTES
from penstock.workspace.worker.runner import PartUpdate, Sink, TextWriter, Writer

LEAST_DEADLINE = 0.001  # seconds; one that has passed is still the most urgent


class EngineTask:
    """A job of the workspace, tokenized, with its grammar compiled. `exchange` is None for one whose result is plain text."""

    def __init__(self, served: ServedModel, request: WorkRequest, jobs: Sequence[JobRequest], exchange: Exchange | None) -> None:
        self._served, self._request, self._exchange = served, request, exchange
        self._jobs = [_tokenized(served, job) for job in jobs]
        first = self._jobs[0].sampling
        self.model, self.seed = served.hosted.name, first.seed
        plain = first.n == 1 and first.logprobs is None and first.prompt_logprobs is None
        self.resumable = len(jobs) == 1 and plain and not jobs[0].embed
        self.fingerprint = _fingerprint(self.model, request, self._jobs)
        self.writer: Writer = TextWriter()

    def start(self, job_id: str, seed: int, said: Sequence[int], sink: Sink) -> Callable[[], None]:
        hosted, request = self._served.hosted, self._request
        if missing := hosted.engine.pipe.explain():
            raise NotReady(missing)
        deadline = request.deadline
        if deadline is not None:  # it counts from the submission, and the engine's from now
            deadline = max(LEAST_DEADLINE, request.submitted + deadline - time.time())
        jobs = [
            dataclasses.replace(
                job,
                sampling=job.sampling if job.embed else dataclasses.replace(job.sampling, seed=seed),
                priority=request.priority,
                deadline=deadline,
                resume=said,
            )
            for job in self._jobs
        ]
        if self._exchange is not None:
            prompts = [[int(token) for token in job.prompt or ()] for job in jobs]
            self.writer = AnswerWriter(self._exchange, self._exchange.answer(job_id, prompts))
        if len(jobs) == 1:
            return hosted.jobs.start_job(jobs[0], sink, counted=False, job_id=job_id).cancel
        return _Together(sink, len(jobs)).start(
            [functools.partial(hosted.jobs.start_job, job, counted=False, job_id=f"{job_id}_{i}") for i, job in enumerate(jobs)]
        )


class AnswerWriter:
    """The result is the answer's body, as a client of the API would have it."""

    def __init__(self, exchange: Exchange, answer: Answer) -> None:
        self._exchange, self._answer = exchange, answer

    def take(self, update: JobUpdate | PartUpdate) -> str:
        number, inner = (update.number, update.update) if isinstance(update, PartUpdate) else (0, update)
        for _ in self._answer.take(number, inner):
            pass  # kept by the answer
        return ""

    def result(self, usage: Usage) -> str:
        if self._exchange.keep is not None:
            self._exchange.keep(self._answer, usage)
        return encode(self._answer.whole(usage)).decode()


class _Together:
    """Several jobs of the engine as one task: it ends once, when all of them have, or with the first error."""

    def __init__(self, sink: Sink, count: int) -> None:
        self._sink, self._left = sink, count
        self._handles: list[JobHandle] = []
        self._usage, self._cancelled = Usage(), False
        self._error: JobFailed | None = None

    def start(self, starts: Sequence[Callable[..., JobHandle]]) -> Callable[[], None]:
        try:
            for number, start in enumerate(starts):
                self._handles.append(start(sink=functools.partial(self._hear, number)))
        except BaseException:
            self.cancel()
            raise
        return self.cancel

    def cancel(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def _hear(self, number: int, update: JobUpdate) -> None:
        """On the compute thread, of which a model has one."""
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
    """The workspace's Runner over hosted models. A job that names no model gets the first."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        aliases: Mapping[str, str],
        limits: LimitsConfig,
        endpoints: Mapping[str, JobEndpoint],
    ) -> None:
        self._models = models
        self._aliases = aliases
        self._limits = limits
        self._endpoints = endpoints

    def accepts(self, model: str | None) -> bool:
        return self._find(model) is not None

    def ready(self, model: str | None) -> bool:
        served = self._find(model)
        return served is not None and served.hosted.engine.running and served.hosted.engine.pipe.is_complete()

    def check(self) -> None:
        if not any(served.hosted.engine.running for served in self._models.values()):
            raise EngineStopped("The engine has stopped, so no job can be run.", hint="The log says why. Start it again.")

    def prepare(self, request: WorkRequest, prompt: str) -> EngineTask:
        served = self._find(request.model)
        if served is None:
            raise UnknownModel(f"The model '{request.model}' is not here.")
        context = Context(served, self._limits)
        if request.endpoint is not None:
            endpoint = self._endpoint(request.endpoint)
            asked = parse(endpoint.asks, prompt)
            with named_as_given(asked.names):
                exchange = endpoint.exchange(asked, context)
                _refuse_stream(exchange)
                return EngineTask(served, request, exchange.jobs, exchange)
        given = dict(request.sampling)
        limit = answer_limit(given.pop("max_tokens", None), self._limits, "max_tokens")
        shape = _shape(request)
        job = JobRequest(
            prompt=prompt if request.raw else None,
            messages=None if request.raw else _messages(request, prompt),
            sampling=chosen_sampling(given, context, max_tokens=limit),
            constraint=None if shape is None else shape.compile(served.grammars),
        )
        return EngineTask(served, request, [job], None)

    def names_of(self, model: str | None) -> list[str]:
        """All names of the model that jobs get which ask for this one."""
        served = self._find(model)
        return [*([model] if model is not None else []), *([served.hosted.name] if served is not None else [])]

    def _find(self, model: str | None) -> ServedModel | None:
        name = meant(model, self._models, self._aliases)
        return None if name is None else self._models[name]

    def _endpoint(self, path: str) -> JobEndpoint:
        endpoint = self._endpoints.get(path)
        if endpoint is None:
            hint = f"These can: {', '.join(self._endpoints)}."
            raise RequestError(f"{path[:80]} cannot be a job.", field="endpoint", hint=hint)
        return endpoint


def _refuse_stream(exchange: Exchange) -> None:
    if exchange.stream:
        raise RequestError("A job cannot be streamed: nobody listens.", field="stream", hint="Leave stream out.")


def _tokenized(served: ServedModel, job: JobRequest) -> JobRequest:
    ids = served.hosted.jobs.prepare(job).job.prompt_ids
    return dataclasses.replace(job, prompt=list(ids), messages=None, template={})


def _messages(request: WorkRequest, prompt: str) -> list[dict[str, Any]]:
    before = [] if request.system is None else [{"role": "system", "content": request.system}]
    return [*before, {"role": "user", "content": prompt}]


def _shape(request: WorkRequest) -> OutputFormat | None:
    if request.schema is not None:
        return OutputFormat("json_schema", "schema", request.schema)
    if request.grammar is not None:
        return OutputFormat("grammar", "grammar", request.grammar)
    return None if request.regex is None else OutputFormat("regex", "regex", request.regex)


def _fingerprint(model: str, request: WorkRequest, jobs: Sequence[JobRequest]) -> bytes:
    shape = [request.schema, request.grammar, request.regex, request.endpoint]
    asked = [[list(job.prompt or ()), dataclasses.asdict(job.sampling)] for job in jobs]
    return hashlib.blake2b(json.dumps([model, asked, shape], sort_keys=True).encode(), digest_size=FINGERPRINT_BYTES).digest()
