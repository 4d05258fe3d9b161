"""The backends of a chat: a model on a server, or one loaded into this process. Both answer with the same updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cli.chat.answer import UpdateStream
from penstock.cli.client.api import Client, ServerRefused, error_in_body
from penstock.domain.request import JobRequest, Message
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobUpdate, OutputFinished, PrefillProgress, Timings, TokensOut, Usage

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


class RemoteChatBackend:
    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def place(self) -> str:
        return f"at {self._client.url}"

    def models(self) -> list[str]:
        listed = self._client.get("/v1/models").get("data")
        return [str(model["id"]) for model in listed or () if isinstance(model, dict) and "id" in model]

    def ask(self, model: str, messages: Sequence[Message], wanted: Mapping[str, Any]) -> UpdateStream:
        body = {"model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        return RemoteJob(self._client, {**body, **wanted})


class LocalChatBackend:
    place = "in this process"

    def __init__(self, llm: LLM) -> None:
        from penstock.model.sources import recommended_sampling

        self._llm = llm
        self._recommended = recommended_sampling(llm.model_name, llm.folder)

    def models(self) -> list[str]:
        return [self._llm.model_name]

    def ask(self, model: str, messages: Sequence[Message], wanted: Mapping[str, Any]) -> UpdateStream:
        sampling: dict[str, Any] = {"max_tokens": None, **self._recommended, **wanted}
        return self._llm.start(JobRequest(messages=messages, sampling=SamplingParams(**sampling)))


class RemoteJob:
    """An answer of a server, as the updates of a local one. A server sends text and, at the end, the number of tokens."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self._events = client.post("/v1/chat/completions", body)

    def __iter__(self) -> Iterator[JobUpdate]:
        usage = Usage()
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
            yield from updates
        yield JobDone(usage, Timings())

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
        text = (choice.get("delta") or {}).get("content")
        if text:
            yield TokensOut(0, text, ())
        if choice.get("finish_reason"):
            yield OutputFinished(0, FinishReason.LENGTH if choice["finish_reason"] == "length" else FinishReason.STOP)


def _usage(chunk: dict[str, Any]) -> Usage | None:
    counted = chunk.get("usage")
    return counted and Usage(counted.get("prompt_tokens") or 0, counted.get("completion_tokens") or 0)
