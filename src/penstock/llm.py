"""LLM: a model for use from Python, whole on this machine or over the nodes of a network."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.config.checks import unusable
from penstock.config.engine import EngineConfig
from penstock.config.kinds import SIZE
from penstock.config.node import HostedModelConfig
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
from penstock.errors import ConfigError, PenstockError, RequestError
from penstock.model.sources import DEFAULT_MODEL, recommended_sampling
from penstock.pipes.loading.model_manager import ModelManager
from penstock.progress import Progress, silent
from penstock.stats import EngineStats

if TYPE_CHECKING:
    from penstock.node import Node

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
    embedding: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))  # empty unless it was requested
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
                self.embedding = np.asarray(vector, np.float32)
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

    model: a name, a folder, a .gguf file or a hub id; by default smollm2-135m, or the model that the network runs.
    quant: what 16- and 32-bit weights are rounded to when they are loaded: none, int8 or int4, or fp8 on a CUDA GPU.
    segments: layer ranges to split the model into, all local.
    kv_memory: for keys and values, in bytes or as "4GB"; None for as much as fits.
    network: the name of a network that this machine has joined, which computes the layers; this process holds the model's ends.
    The settings from `policy` on are those of `EngineConfig`.

    Without SamplingParams, the model is sampled as its makers recommend, as in the API.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quant: str = "none",
        segments: Sequence[tuple[int, int]] | None = None,
        kv_memory: int | str | None = None,
        network: str | None = None,
        progress: Progress | None = None,
        policy: str = "lrs",
        chunk: int | None = None,
        idle_chunk: int | None = None,
        crowd_chunk: int | None = None,
        step_target: float | None = None,
        max_sequences: int = 256,
        block_size: int = 16,
        prefix_cache: bool = True,
        window: int | None = None,
        gpu_memory: float = 0.9,
        kv_dtype: str = "auto",
        print_times: bool = False,
        time_parts: bool = False,
    ) -> None:
        self.config = EngineConfig(
            policy=policy,
            chunk=chunk,
            idle_chunk=idle_chunk,
            crowd_chunk=crowd_chunk,
            step_target=step_target,
            max_sequences=max_sequences,
            block_size=block_size,
            prefix_cache=prefix_cache,
            window=window,
            gpu_memory=gpu_memory,
            kv_dtype=kv_dtype,
            print_times=print_times,
            time_parts=time_parts,
        )
        if network is not None and (segments is not None or kv_memory is not None):
            raise ConfigError("segments and kv_memory are for a model without a network.", hint="Leave them out.")
        if network is None:
            loaded = ModelManager(self.config, progress or silent).load(
                model or DEFAULT_MODEL, dtype=dtype, device=device, quant=quant, segments=segments, kv_memory=_bytes(kv_memory)
            )
            hosted = host_standalone(loaded, self.config)
            hosted.start()
            close = hosted.engine.stop
        else:
            hosted_model = HostedModelConfig(id=model or DEFAULT_MODEL, dtype=dtype, device=device, quant=quant)
            node = _enter_network(network, hosted_model, self.config, progress or silent, adopts=model is None)
            (hosted,) = node.models
            close = node.close
        self.model_name = hosted.name
        self.network = network
        self.folder = hosted.folder
        self.spec = hosted.spec
        self.num_layers = hosted.spec.num_layers
        self.dtype = hosted.dtype
        self.device = hosted.device
        self.backend = hosted.backend
        self.tokenizer = hosted.tokenizer
        self.recommended_sampling: dict[str, Any] = recommended_sampling(hosted.name, hosted.folder)
        self.engine = hosted.engine
        self._jobs = hosted.jobs
        self._close = weakref.finalize(self, close)  # garbage collection ends the compute thread

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def start(self, request: JobRequest, sink: Callable[[JobUpdate], None] | None = None) -> JobHandle:
        """Submit one request; iterate over the returned handle for its updates. A `sink` gets them instead, on the compute
        thread, so it must be quick."""
        return self._jobs.start_job(request, sink)

    def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Complete all prompts (text or token ids) together and return the results in the same order."""
        prompt_list = _as_list(prompts)
        each = self._params_for(len(prompt_list), sampling_params)
        return self._run([JobRequest(prompt=p, sampling=s) for p, s in zip(prompt_list, each, strict=True)], use_tqdm)

    def chat(
        self,
        messages: str | Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the model's chat format. A text is a conversation with one question."""
        conversations = _conversations(messages)
        each = self._params_for(len(conversations), sampling_params)
        return self._run([JobRequest(messages=m, sampling=s) for m, s in zip(conversations, each, strict=True)], use_tqdm)

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        messages: str | Sequence[Message] | None = None,
    ) -> Iterator[str]:
        """Yield the text of one answer as it is generated: to a prompt, as `generate` takes it, or to a conversation, as `chat`
        does. An iterator that is closed or dropped cancels the rest."""
        request = self.make_request(prompt, messages, sampling_params)
        handle = self.start(request)

        def pieces() -> Iterator[str]:
            try:
                for update in handle:
                    if isinstance(update, JobFailed):
                        raise update.error
                    if isinstance(update, TokensOut) and update.text:
                        yield update.text
            finally:
                handle.cancel()

        stream = pieces()
        weakref.finalize(stream, handle.cancel).atexit = False  # also if it is dropped before its first piece
        return stream

    def embed(self, prompts: Prompts, *, use_tqdm: bool = True) -> list[NDArray[np.float32]]:
        """Return the embedding of each prompt (text or token ids): the mean of its last hidden states, not normalised."""
        results = self._run([JobRequest(prompt=p, embed=True) for p in _as_list(prompts)], use_tqdm, "Embedding")
        return [result.embedding for result in results]

    def close(self) -> None:
        """Stop the engine, and leave the network. Memory is freed with the object."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def make_request(
        self, prompt: str | Sequence[int] | None, messages: str | Sequence[Message] | None, params: SamplingParams | None
    ) -> JobRequest:
        """Make a request from a prompt or a conversation, by default with the recommended sampling."""
        if messages is not None:
            (messages,) = _conversations(messages)
        return JobRequest(prompt=prompt, messages=messages, sampling=params or self._default_sampling)

    @property
    def _default_sampling(self) -> SamplingParams:
        return SamplingParams(**self.recommended_sampling)

    def _params_for(self, count: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self._default_sampling] * count
        if len(params) != count:
            raise PenstockError(f"{len(params)} SamplingParams for {count} prompts.", hint="Give one, or one for each.")
        return list(params)

    def _run(self, requests: list[JobRequest], use_tqdm: bool, label: str = "Generating") -> list[RequestOutput]:
        prepared = [self._jobs.prepare(request) for request in requests]  # all before any runs: a refused one wastes no work
        handles: list[JobHandle] = []
        try:
            for job in prepared:
                handles.append(self._jobs.submit(job))  # noqa: PERF401 - if one is refused, the earlier ones are cancelled
            return list(_with_bar(self._collect(requests, handles), len(requests), use_tqdm, label))
        except BaseException:
            for handle in handles:  # their output would never be read
                handle.cancel()
            raise

    def _collect(self, requests: list[JobRequest], handles: list[JobHandle]) -> Iterable[RequestOutput]:
        for request, handle in zip(requests, handles, strict=True):
            result = empty_output(request, handle)
            for update in handle:
                if isinstance(update, JobFailed):
                    raise update.error
                result.apply(update)
            yield result


def empty_output(request: JobRequest, handle: JobHandle) -> RequestOutput:
    sampling = request.sampling
    outputs = [CompletionOutput(i, logprobs=None if sampling.logprobs is None else []) for i in range(sampling.n)]
    text = request.prompt if isinstance(request.prompt, str) else None
    return RequestOutput(handle.job_id, text, list(handle.prompt_ids), outputs)


def _enter_network(name: str, model: HostedModelConfig, engine: EngineConfig, progress: Progress, *, adopts: bool) -> Node:
    """Join a network of this machine as its node, which holds the ends of the model, and layers only if the settings say that
    some are private.

    adopts: whether to use the model that the network runs.
    """
    from penstock.config.settings import load_settings
    from penstock.node import Node

    settings = load_settings(None, os.environ, {"network.name": name, "workspace.path": "none"}, serving=False).node
    ends = replace(model, private_layers=settings.models[0].private_layers).ends_only()
    node = Node(replace(settings, models=(ends,), engine=engine, adopts=adopts), progress=progress, door=False)
    with ExitStack() as stack:
        stack.enter_context(node)
        node.wait_for_layers()
        stack.pop_all()  # it stays until `close`
    return node


def _conversations(messages: str | Sequence[Any]) -> list[list[Message]]:
    """Check conversations: one or several, each a text or a list of messages."""
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    if not isinstance(messages, Sequence):
        raise _wrong("messages", f"is a {type(messages).__name__}")
    if not messages or isinstance(messages[0], Mapping):
        return [_checked(messages, "messages")]
    return [
        [{"role": "user", "content": one}] if isinstance(one, str) else _checked(one, f"messages[{index}]")
        for index, one in enumerate(messages)
    ]


def _checked(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, Sequence):
        raise _wrong(where, f"is a {type(messages).__name__}")
    for index, message in enumerate(messages):
        name = f"{where}[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(name, f"is a {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise _wrong(name, "has no role")
        content = message.get("content")
        if not isinstance(content, str | Sequence) and not (content is None and message.get("tool_calls")):
            raise _wrong(name, "has no content")
    return list(messages)


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(
        f"{where} {what}.",
        field="messages",
        hint='Give a text, or a list of messages such as {"role": "user", "content": "Hello"}.',
    )


def _bytes(kv_memory: int | str | None) -> int | None:
    try:
        if isinstance(kv_memory, str):
            return SIZE.parse(kv_memory)  # type: ignore[no-any-return]
        if kv_memory is None or type(kv_memory) is int:
            return kv_memory
    except ValueError:
        pass
    raise unusable("kv_memory", kv_memory, f"Give a whole number of bytes, or {SIZE.expects}.")


def _as_list(prompts: Prompts) -> Sequence[Any]:
    """Wrap a single prompt into a list."""
    return [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else prompts


def _with_bar(results: Iterable[RequestOutput], total: int, show: bool, label: str) -> Iterable[RequestOutput]:
    """Pass results on and show a progress bar, on a terminal only."""
    import sys

    if not show or not sys.stderr.isatty():
        yield from results
        return
    from rich.progress import track

    yield from track(results, description=label, total=total)
