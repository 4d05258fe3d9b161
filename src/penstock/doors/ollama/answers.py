"""Ollama's answers. A whole answer is the last line with all of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from penstock.domain.updates import FinishReason, JobDone, JobUpdate, OutputFinished, Timings, TokenLogprob, TokensOut, Usage
from penstock.doors.generation.embedding import VectorAnswer
from penstock.doors.generation.logprobs import ContentLogprob, chat_logprobs
from penstock.doors.generation.output_parser import Call, OutputParser
from penstock.doors.http.framing import LINES
from penstock.doors.ollama import wire
from penstock.doors.ollama.errors import ollama_body
from penstock.doors.tools import CallFinished, TextDelta, ToolEvent
from penstock.errors import PenstockError

Logprobs = list[ContentLogprob] | None  # Ollama's have the shape of OpenAI's


def rfc3339(seconds: float | None = None) -> str:
    """Now, or a time since the epoch."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class OllamaAnswer(ABC):
    """The lines of an answer; subclasses define what one looks like. Without jobs it only says that the model is loaded.

    format_logprobs: None if the request asks for no logprobs.
    """

    framing = LINES

    def __init__(
        self, model: str, parser: OutputParser, format_logprobs: Callable[[Sequence[TokenLogprob]], Logprobs] | None
    ) -> None:
        self._model = model
        self._parser = parser
        self._format_logprobs = format_logprobs
        self._reason: Literal["stop", "length", "load"] = "load"
        self._logprobs: list[ContentLogprob] = []
        self._timings = Timings()

    @abstractmethod
    def part(self, text: str, calls: Sequence[Call], **rest: Any) -> wire.OllamaChunk: ...

    def begin(self) -> Iterable[wire.OllamaChunk]:
        return ()

    def take(self, number: int, update: JobUpdate) -> Iterable[wire.OllamaChunk]:
        match update:
            case TokensOut(_, text, _, logprobs):
                formatted = self._format_logprobs(logprobs) if self._format_logprobs is not None else None
                self._logprobs += formatted or ()
                yield from self._parts(self._parser.feed(text), formatted)
            case OutputFinished(_, reason, _):
                self._reason = "length" if reason is FinishReason.LENGTH else "stop"
                yield from self._parts(self._parser.close(reason), None)
            case JobDone(_, timings):
                self._timings = timings

    def end(self, usage: Usage) -> Iterable[wire.OllamaChunk]:
        return [self._last("", (), usage)]

    def failed(self, error: PenstockError) -> Iterable[Any]:
        return [ollama_body(error)]

    def whole(self, usage: Usage) -> wire.OllamaChunk:
        calls = [call for call in self._parser.calls if call.finished]
        return self._last(self._parser.text, calls, usage, logprobs=self._logprobs if self._format_logprobs is not None else None)

    def _parts(self, events: Iterable[ToolEvent], formatted: Logprobs) -> Iterable[wire.OllamaChunk]:
        """Calls are sent when they are complete. One that was cut off has no valid arguments and is left out."""
        for event in events:
            match event:
                case TextDelta(text):
                    yield self._chunk(text, (), logprobs=formatted)
                case CallFinished(index):
                    yield self._chunk("", [self._parser.calls[index]], logprobs=formatted)
                case _:
                    continue
            formatted = None
        if formatted:
            yield self._chunk("", (), logprobs=formatted)

    def _last(self, text: str, calls: Sequence[Call], usage: Usage, **rest: Any) -> wire.OllamaChunk:
        timings = self._timings
        if self._reason != "load":
            rest |= {
                "total_duration": nanoseconds(timings.total),
                "load_duration": 0,  # it was loaded before the request
                "prompt_eval_count": usage.prompt_tokens,
                "prompt_eval_duration": nanoseconds(timings.first_token - timings.queued),
                "eval_count": usage.completion_tokens,
                "eval_duration": nanoseconds(timings.total - timings.first_token),
            }
        return self._chunk(text, calls, done=True, done_reason=self._reason, **rest)

    def _chunk(self, text: str, calls: Sequence[Call], *, done: bool = False, **rest: Any) -> wire.OllamaChunk:
        return self.part(text, calls, model=self._model, created_at=rfc3339(), done=done, **rest)


class OllamaChatAnswer(OllamaAnswer):
    def part(self, text: str, calls: Sequence[Call], **rest: Any) -> wire.OllamaChatChunk:
        tool_calls = [_call_out(self._parser.calls.index(call), call) for call in calls] or None
        return wire.OllamaChatChunk(message=wire.OllamaMessageOut(role="assistant", content=text, tool_calls=tool_calls), **rest)


class OllamaGenerateAnswer(OllamaAnswer):
    def part(self, text: str, calls: Sequence[Call], **rest: Any) -> wire.OllamaGenerateChunk:
        return wire.OllamaGenerateChunk(response=text, **rest)


def _call_out(index: int, call: Call) -> wire.OllamaToolCallOut:
    return wire.OllamaToolCallOut(id=call.id, function=wire.OllamaCallOut(index=index, name=call.name, arguments=call.as_written))


class OllamaEmbedAnswer(VectorAnswer):
    def __init__(self, model: str, count: int) -> None:
        super().__init__(count)
        self._model = model
        self._took = 0.0

    def take(self, number: int, update: JobUpdate) -> Iterable[Any]:
        if isinstance(update, JobDone):
            self._took = max(self._took, update.timings.total)
        return super().take(number, update)

    def whole(self, usage: Usage) -> Any:
        return wire.EmbedOut(
            model=self._model,
            embeddings=[vector.tolist() for vector in self.vectors],
            total_duration=nanoseconds(self._took),
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
        )


class OllamaEmbeddingAnswer(OllamaEmbedAnswer):
    """The older format: one vector, or none for an empty text."""

    def whole(self, usage: Usage) -> wire.EmbeddingsOut:
        return wire.EmbeddingsOut(embedding=[number for vector in self.vectors for number in vector.tolist()])


def logprobs_formatter(
    wanted: int | None, hidden: frozenset[int], token_bytes: Callable[[Sequence[int]], list[bytes]]
) -> Callable[[Sequence[TokenLogprob]], Logprobs] | None:
    """Make the formatter of logprobs. hidden: tokens that end an answer and do not belong to it."""
    if wanted is None:
        return None
    return lambda logprobs: chat_logprobs([one for one in logprobs if one.token_id not in hidden], token_bytes)
