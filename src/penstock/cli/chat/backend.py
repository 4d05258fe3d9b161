"""The backends of `penstock run` and `chat`: a model on a server, or one loaded into this process. Both answer with the same
updates, and one rule chooses between them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import quote

import typer

from penstock.cli.chat.answer import UpdateStream
from penstock.cli.client.api import Client, ServerRefused, ServerUnreachable, ServerUntrusted, error_in_body
from penstock.cli.client.server_url import default_url, named_url
from penstock.cli.options import DEFAULT_MODEL
from penstock.cli.quick_imports import quick_imports
from penstock.cli.ui.bars import ProgressBars
from penstock.config.home import home
from penstock.domain.request import JobRequest, Message
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobUpdate, OutputFinished, PrefillProgress, Timings, TokensOut, Usage
from penstock.errors import UnknownModel

if TYPE_CHECKING:
    from penstock.llm import LLM


class ChatBackend(Protocol):
    @property
    def place(self) -> str:
        """Where the model is, in words: `at http://127.0.0.1:8000`."""

    def models(self) -> list[str]:
        """The models that `ask` accepts; the first is the default."""

    def ask(self, model: str, messages: Sequence[Message], wanted: Mapping[str, Any]) -> UpdateStream:
        """Request an answer. Iterate for its updates; iterating raises errors, `cancel` ends it.

        wanted: the sampling settings that the user gave.
        """

    def complete(self, model: str, prompt: str, wanted: Mapping[str, Any]) -> UpdateStream:
        """Continue a text, without the chat template."""


class RemoteChatBackend:
    def __init__(self, client: Client) -> None:
        self.client = client

    @property
    def place(self) -> str:
        return f"at {self.client.url}"

    def models(self) -> list[str]:
        listed = self.client.get("/v1/models").get("data")
        return [str(model["id"]) for model in listed or () if isinstance(model, dict) and "id" in model]

    def ask(self, model: str, messages: Sequence[Message], wanted: Mapping[str, Any]) -> UpdateStream:
        return RemoteJob(self.client, "/v1/chat/completions", {"model": model, "messages": list(messages), **wanted})

    def complete(self, model: str, prompt: str, wanted: Mapping[str, Any]) -> UpdateStream:
        return RemoteJob(self.client, "/v1/completions", {"model": model, "prompt": prompt, **wanted})

    def knows(self, model: str) -> bool:
        """Whether the server has a model under this name, even if it lists another name for it."""
        try:
            self.client.get(f"/v1/models/{quote(model, safe='')}")
        except ServerRefused as error:
            if error.status != 404:
                raise
            return False
        return True


class LocalChatBackend:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def place(self) -> str:
        return "in this process" if self._llm.network is None else f"over the network '{self._llm.network}'"

    def models(self) -> list[str]:
        return [self._llm.model_name]

    def ask(self, model: str, messages: Sequence[Message], wanted: Mapping[str, Any]) -> UpdateStream:
        return self._llm.start(JobRequest(messages=messages, sampling=self._sampling(wanted)))

    def complete(self, model: str, prompt: str, wanted: Mapping[str, Any]) -> UpdateStream:
        return self._llm.start(JobRequest(prompt=prompt, sampling=self._sampling(wanted)))

    def _sampling(self, wanted: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None, **self._llm.recommended_sampling, **wanted})


ALONE = "--alone"
AloneOption = Annotated[bool, typer.Option(ALONE, help="Load the model into this process, also if a server could answer.")]


@contextmanager
def open_backend(
    url: str | None, model: str | None, bars: ProgressBars, *, alone: bool = False, **options: Any
) -> Iterator[tuple[ChatBackend, str]]:
    """Open the backend for a model, and yield it with the model's name there.

    It is the server that --url or PENSTOCK_URL names; else the one of this machine, if it answers and has the model; else the
    network that this machine has joined; else, and with `alone`, this process. options: of `LLM`, for the latter two.
    """
    found = None if alone else find_server(url, model)
    if found is not None:
        server, names = found
        yield server, choose_model_name(model, names, server.place)
        return
    here = None if alone else home(os.environ)
    network = None if here is None else here.current()
    what = f"loading {model or DEFAULT_MODEL}" if network is None else f"joining {network}"
    bars(what, 0, 0)  # the imports take seconds

    with quick_imports():
        from penstock.llm import LLM

    with LLM(model, network=network, progress=bars, **options) as llm:
        yield LocalChatBackend(llm), llm.model_name


def find_server(url: str | None, model: str | None) -> tuple[RemoteChatBackend, list[str]] | None:
    """Return a server and its models, just `model` if it has it; None if no server is named and this machine's cannot be used."""
    named = named_url(url)
    server = RemoteChatBackend(Client(named or default_url()))
    try:
        names = server.models()
        if model is not None and (model in names or server.knows(model)):
            return server, [model]
    except (ServerUnreachable, ServerRefused) as error:
        speaks_openai = isinstance(error, ServerRefused) and (error.reason or error.status == 401)
        if named is not None or speaks_openai or isinstance(error, ServerUntrusted):
            raise
        return None
    if named is None and (model is not None or not names):
        return None
    return server, names


def choose_model_name(wanted: str | None, names: list[str], place: str) -> str:
    if not names:
        hint = "Is it an OpenAI-compatible server? (A Penstock node that only computes layers for others serves no model.)"
        raise UnknownModel(f"There is no model {place}.", hint=hint)
    if wanted is None or wanted in names:
        return wanted or names[0]
    raise UnknownModel(f"There is no model '{wanted}' {place}.", hint=f"Available: {', '.join(names)}.")


class RemoteJob:
    """An answer of a server, as the updates of a local one. A server sends text and, at the end, the number of tokens."""

    def __init__(self, client: Client, path: str, body: dict[str, Any]) -> None:
        self._events = client.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})

    def __iter__(self) -> Iterator[JobUpdate]:
        usage = Usage()
        started, first_token = time.perf_counter(), 0.0
        for event in self._events:
            if isinstance(event, str):
                yield from _progress(event)
                continue
            refused = error_in_body(event)
            if refused is not None:
                raise refused
            try:
                usage = _usage(event) or usage
                updates = list(_updates(event))
            except (AttributeError, TypeError):
                raise ServerRefused("The server sent a chunk that is not in OpenAI's format.") from None
            if updates and not first_token:
                first_token = time.perf_counter() - started
            yield from updates
        yield JobDone(usage, Timings(first_token=first_token, total=time.perf_counter() - started))

    def cancel(self) -> None:
        self._events.close()


def _progress(comment: str) -> Iterator[JobUpdate]:
    """Parse a comment in which a Penstock server says how much of the prompt it has read: `prompt 512/2048`."""
    word, _, rest = comment.partition(" ")
    done, _, total = rest.partition("/")
    if word == "prompt" and done.isdecimal() and total.isdecimal():
        yield PrefillProgress(int(done), int(total))


def _updates(chunk: dict[str, Any]) -> Iterator[JobUpdate]:
    for choice in chunk.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") or choice.get("text")
        if text:
            yield TokensOut(0, text, ())
        if choice.get("finish_reason"):
            yield OutputFinished(0, FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP)


def _usage(chunk: dict[str, Any]) -> Usage | None:
    counted = chunk.get("usage")
    return counted and Usage(counted.get("prompt_tokens") or 0, counted.get("completion_tokens") or 0)
