"""LLM: a whole model on this machine, for use from Python."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.config.engine import EngineConfig
from penstock.domain.request import JobRequest, Message
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import (
    Embedded,
    FinishReason,
    JobDone,
    JobFailed,
    JobUpdate,
    OutputFinished,
    PromptLogprobs,
    Timings,
    TokenLogprob,
    TokensOut,
    Usage,
)
from penstock.engine.hosted_model import host_standalone
from penstock.engine.job_factory import JobHandle
from penstock.errors import ConfigError, PenstockError
from penstock.model.sources import DEFAULT_MODEL
from penstock.pipes.model_manager import ModelManager
from penstock.progress import Progress, silent
from penstock.stats import EngineStats

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]  # one or several, each text or token ids


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` outputs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None  # the first token has none
    embedding: list[float] = field(default_factory=list)  # empty unless it was requested
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)

    def apply(self, update: JobUpdate) -> None:
        match update:
            case TokensOut(index, text, token_ids, logprobs):
                output = self.outputs[index]
                output.text += text
                output.token_ids += token_ids
                if output.logprobs is not None:
                    output.logprobs += logprobs
            case PromptLogprobs(_, logprobs):
                self.prompt_logprobs = [*(self.prompt_logprobs or [None]), *logprobs]
            case Embedded(vector):
                self.embedding = list(vector)
            case OutputFinished(index, reason, stop_reason):
                self.outputs[index].finish_reason = reason
                self.outputs[index].stop_reason = stop_reason
            case JobDone(usage, timings):
                self.usage = usage
                self.timings = timings


class LLM:
    """A loaded model that answers prompts, many at once.

        with LLM() as llm:
            for result in llm.generate(["The sea is", "The sky is"], SamplingParams(temperature=0)):
                print(result.outputs[0].text)

    segments: layer ranges to split the model into, all local; other keywords are fields of `EngineConfig`.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        segments: Sequence[tuple[int, int]] | None = None,
        kv_memory: int | None = None,
        progress: Progress | None = None,
        **engine: Any,
    ) -> None:
        unknown = [name for name in engine if name not in EngineConfig.__dataclass_fields__]
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ConfigError(f"LLM has no setting '{unknown[0]}'.", hint=f"Engine settings are: {known}.")
        self.config = EngineConfig(**engine)
        loaded = ModelManager(self.config, progress or silent).load(
            model, dtype=dtype, device=device, segments=segments, kv_memory=kv_memory
        )
        hosted = host_standalone(loaded, self.config)
        self.model_name = model
        self.folder = hosted.folder
        self.spec = hosted.spec
        self.num_layers = hosted.spec.num_layers
        self.dtype = hosted.dtype
        self.device = hosted.device
        self.tokenizer = hosted.tokenizer
        self.engine = hosted.engine
        self._jobs = hosted.jobs
        hosted.start()
        weakref.finalize(self, self.engine.stop)  # garbage collection ends the compute thread

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def start(self, request: JobRequest) -> JobHandle:
        """Submit one request; iterate over the returned handle for its updates."""
        return self._jobs.start_job(request)

    def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete all prompts (text or token ids) together and return the results in the same order."""
        prompt_list = _as_list(prompts)
        each = _params_for(len(prompt_list), sampling_params)
        return self._run([JobRequest(prompt=p, sampling=s) for p, s in zip(prompt_list, each, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the model's chat format."""
        conversations: Sequence[Any] = [messages] if not messages or isinstance(messages[0], dict) else messages
        each = _params_for(len(conversations), sampling_params)
        return self._run([JobRequest(messages=m, sampling=s) for m, s in zip(conversations, each, strict=True)], use_tqdm)

    def embed(self, prompts: Prompts, *, use_tqdm: bool = True) -> list[list[float]]:
        """Return the embedding of each prompt (text or token ids): the mean of its last hidden states, not normalised."""
        results = self._run([JobRequest(prompt=p, embed=True) for p in _as_list(prompts)], use_tqdm, "Embedding")
        return [result.embedding for result in results]

    def close(self) -> None:
        """Stop the engine. Memory is freed with the object."""
        self.engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, requests: list[JobRequest], use_tqdm: bool, label: str = "Generating") -> list[RequestOutput]:
        handles: list[JobHandle] = []
        try:
            for request in requests:
                handles.append(self.start(request))  # noqa: PERF401 - if one is refused, the earlier ones are cancelled
            return list(_with_bar(self._collect(requests, handles), len(requests), use_tqdm, label))
        except BaseException:
            for handle in handles:  # their output would never be read
                handle.cancel()
            raise

    def _collect(self, requests: list[JobRequest], handles: list[JobHandle]) -> Iterable[RequestOutput]:
        for request, handle in zip(requests, handles, strict=True):
            sampling = request.sampling
            outputs = [CompletionOutput(i, logprobs=None if sampling.logprobs is None else []) for i in range(sampling.n)]
            text = request.prompt if isinstance(request.prompt, str) else None
            result = RequestOutput(handle.job_id, text, list(handle.prompt_ids), outputs)
            for update in handle:
                if isinstance(update, JobFailed):
                    raise update.error
                result.apply(update)
            yield result


def _as_list(prompts: Prompts) -> Sequence[Any]:
    """Wrap a single prompt into a list."""
    return [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts


def _params_for(count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise PenstockError(f"{len(params)} SamplingParams for {count} prompts.", hint="Give one, or one for each.")
    return list(params)


def _with_bar(results: Iterable[RequestOutput], total: int, show: bool, label: str) -> Iterable[RequestOutput]:
    """Pass results on and show a progress bar, on a terminal only."""
    import sys

    if not show or not sys.stderr.isatty():
        yield from results
        return
    from rich.progress import track

    yield from track(results, description=label, total=total)
