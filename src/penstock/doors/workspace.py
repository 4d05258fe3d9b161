"""The second front door: jobs of a workspace, run by the models of this node beside the requests of the API."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.config.node import LimitsConfig
from penstock.domain.constraint import ConstraintFactory
from penstock.domain.job import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.doors.openai.limits import answer_limit
from penstock.doors.openai.served import Served
from penstock.errors import EngineStopped, NotReady, UnknownModel
from penstock.model.sources import catalogue
from penstock.workspace.request import WorkRequest
from penstock.workspace.runner import Sink
from penstock.workspace.tokens import FINGERPRINT

LEAST_DEADLINE = 0.001  # seconds; one that has passed is still the most urgent


class EngineTask:
    """A job of the workspace, tokenized, with its grammar compiled."""

    def __init__(self, served: Served, request: WorkRequest, ids: Sequence[int], sampling: SamplingParams) -> None:
        self._served, self._request, self._ids, self._sampling = served, request, ids, sampling
        self._constraint = _constraint(served, request)
        self.model, self.seed = served.hosted.name, sampling.seed
        self.fingerprint = _fingerprint(self.model, request, ids, sampling)

    def start(self, job_id: str, seed: int, said: Sequence[int], sink: Sink) -> Callable[[], None]:
        hosted, request = self._served.hosted, self._request
        if not hosted.engine.pipe.is_complete():
            raise NotReady(hosted.engine.pipe.explain())
        deadline = request.deadline
        if deadline is not None:  # it counts from the submission, and the engine's from now
            deadline = max(LEAST_DEADLINE, request.submitted + deadline - time.time())
        job = JobRequest(
            prompt=list(self._ids),
            sampling=dataclasses.replace(self._sampling, seed=seed),
            priority=request.priority,
            deadline=deadline,
            constraint=self._constraint,
            resume=said,
        )
        return hosted.jobs.start_job(job, sink, counted=False, job_id=job_id).cancel


class EngineRunner:
    """The workspace's Runner over hosted models. A job that names no model gets the first."""

    def __init__(self, models: Mapping[str, Served], aliases: Mapping[str, str], limits: LimitsConfig) -> None:
        self._models, self._aliases, self._limits = models, aliases, limits

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
        tokenizer = served.hosted.tokenizer
        if request.raw:
            ids = tokenizer.encode(prompt)
        else:
            before = [] if request.system is None else [{"role": "system", "content": request.system}]
            ids = tokenizer.encode_chat([*before, {"role": "user", "content": prompt}])
        given = dict(request.sampling)
        limit = answer_limit(given.pop("max_tokens", None), self._limits, "max_tokens")
        recommended: Mapping[str, Any] = served.sampling if given.get("temperature") != 0 else {}
        sampling = SamplingParams(**{**recommended, **given, "max_tokens": limit})
        return EngineTask(served, request, ids, sampling)

    def _find(self, model: str | None) -> Served | None:
        if model is None:
            return next(iter(self._models.values()), None)
        wanted = _own_name(self._aliases.get(model, model))
        return next((served for name, served in self._models.items() if _own_name(name) == wanted), None)


def _own_name(model: str) -> str:
    """The catalogue knows some models by several names."""
    known = catalogue.find(model)
    return model if known is None else known.name


def _constraint(served: Served, request: WorkRequest) -> ConstraintFactory | None:
    grammars = served.grammars
    if request.schema is not None:
        return grammars.json_schema(request.schema, field="schema")
    if request.grammar is not None:
        return grammars.lark(request.grammar, field="grammar")
    return None if request.regex is None else grammars.regex(request.regex, field="regex")


def _fingerprint(model: str, request: WorkRequest, ids: Sequence[int], sampling: SamplingParams) -> bytes:
    shape = [request.schema, request.grammar, request.regex]
    said = json.dumps([model, list(ids), dataclasses.asdict(sampling), shape], sort_keys=True)
    return hashlib.blake2b(said.encode(), digest_size=FINGERPRINT).digest()
