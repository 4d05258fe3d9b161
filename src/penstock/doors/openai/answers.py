"""OpenAI's chat and text completions: chunks, and whole answers combined from them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from penstock.domain.updates import FinishReason, JobUpdate, OutputFinished, PromptLogprobs, TokenLogprob, TokensOut, Usage
from penstock.doors.generation.logprobs import ContentLogprob, TokenBytes, chat_logprobs, text_of_token
from penstock.doors.generation.output_parser import OutputParser
from penstock.doors.http.framing import EVENTS_UNTIL_DONE
from penstock.doors.openai import wire
from penstock.doors.openai.errors import openai_body
from penstock.doors.tools import ArgumentsDelta, CallStarted, TextDelta, ToolEvent
from penstock.errors import PenstockError


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The fields that all chunks of an answer share."""

    id: str
    model: str
    fingerprint: str
    tier: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def fields(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}


def usage_out(usage: Usage) -> wire.UsageOut:
    return wire.UsageOut(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=wire.PromptDetails(cached_tokens=usage.cached_tokens),
    )


@dataclass(slots=True)
class RunningUsage:
    """The usage so far, for clients that want it in every chunk. How many prompt tokens were cached is only known at the end."""

    prompt_tokens: int
    completion_tokens: int = 0

    def take(self, update: JobUpdate) -> None:
        if isinstance(update, TokensOut):
            self.completion_tokens += len(update.token_ids)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens)


# ---- chat ----


@dataclass
class ChatAnswer:
    """hidden: tokens that end an answer and do not belong to it. running_usage: None if chunks have no usage."""

    framing = EVENTS_UNTIL_DONE
    head: ChunkHeader
    outputs: InitVar[Sequence[OutputParser]]
    token_bytes: TokenBytes
    hidden: frozenset[int]
    logprobs: bool
    include_usage: bool
    running_usage: RunningUsage | None = None

    def __post_init__(self, outputs: Sequence[OutputParser]) -> None:
        self._choices = [_ChatChoice(parser) for parser in outputs]

    def begin(self) -> Iterable[wire.ChatChunk]:
        return ()

    def take(self, number: int, update: JobUpdate) -> Iterable[wire.ChatChunk]:
        if self.running_usage is not None:
            self.running_usage.take(update)
        match update:
            case TokensOut(index, text, _, logprobs):
                choice = self._choices[index]
                visible = [one for one in logprobs if one.token_id not in self.hidden]
                logprobs_out = self._logprobs_out(visible) if self.logprobs and visible else None
                for delta in choice.deltas(text, quiet=logprobs_out is None):
                    yield self._chunk(index, delta, logprobs=logprobs_out)
                    logprobs_out = None
            case OutputFinished(index, reason, _):
                choice = self._choices[index]
                for delta in choice.rest(reason):
                    yield self._chunk(index, delta)
                yield self._chunk(index, wire.ChatDelta(), finish_reason=choice.finish_reason)

    def _logprobs_out(self, logprobs: Sequence[TokenLogprob]) -> wire.ChatLogprobs:
        return wire.ChatLogprobs(content=chat_logprobs(logprobs, self.token_bytes))

    def end(self, usage: Usage) -> Iterable[wire.ChatChunk]:
        return [self._chunk_of([], usage_out(usage))] if self.include_usage else []

    def failed(self, error: PenstockError) -> Iterable[Any]:
        return [openai_body(error)]

    def whole(self, usage: Usage) -> wire.ChatCompletion:
        return wire.ChatCompletion(
            **self.head.fields,
            object="chat.completion",
            service_tier=self.head.tier,
            choices=[choice.whole(i, self.logprobs) for i, choice in enumerate(self._choices)],
            usage=usage_out(usage),
        )

    def _chunk(
        self, index: int, delta: wire.ChatDelta, *, logprobs: wire.ChatLogprobs | None = None, finish_reason: str | None = None
    ) -> wire.ChatChunk:
        if logprobs is not None:
            self._choices[index].logprobs += logprobs.content
        usage = None if self.running_usage is None else usage_out(self.running_usage.usage)
        choice = wire.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._chunk_of([choice], usage)

    def _chunk_of(self, choices: list[wire.ChatChunkChoice], usage: wire.UsageOut | None = None) -> wire.ChatChunk:
        return wire.ChatChunk(
            **self.head.fields, object="chat.completion.chunk", service_tier=self.head.tier, choices=choices, usage=usage
        )


class _ChatChoice:
    """One of `n` answers, as far as it is generated."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._begun = False
        self.logprobs: list[ContentLogprob] = []
        self.finish_reason = "stop"

    def deltas(self, text: str, *, quiet: bool) -> Iterable[wire.ChatDelta]:
        """quiet: yield nothing if there is no text."""
        yield from self._begin()
        found = _deltas(self._parser.feed(text))
        yield from found
        if not found and not quiet:
            yield wire.ChatDelta(content="")

    def rest(self, reason: FinishReason) -> Iterable[wire.ChatDelta]:
        yield from self._begin()
        yield from _deltas(self._parser.close(reason))
        cut = reason is FinishReason.LENGTH
        self.finish_reason = "length" if cut else "tool_calls" if self._parser.calls_tools else "stop"

    def _begin(self) -> Iterable[wire.ChatDelta]:
        if not self._begun:
            self._begun = True
            yield wire.ChatDelta(role="assistant", content="")

    def whole(self, index: int, logprobs: bool) -> wire.ChatChoice:
        text, calls = self._parser.text, self._parser.calls
        message = wire.ChatMessageOut(content=None if calls and not text else text)
        if calls:
            message.tool_calls = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return wire.ChatChoice(
            index=index,
            message=message,
            logprobs=wire.ChatLogprobs(content=self.logprobs) if logprobs else None,
            finish_reason=self.finish_reason,
        )


def _deltas(events: Iterable[ToolEvent]) -> list[wire.ChatDelta]:
    return [delta for event in events if (delta := _delta(event)) is not None]


def _delta(event: ToolEvent) -> wire.ChatDelta | None:
    match event:
        case TextDelta(text):
            return wire.ChatDelta(content=text)
        case CallStarted(index, call_id, name):
            call = wire.ToolCallDelta(index=index, id=call_id, type="function", function={"name": name, "arguments": ""})
            return wire.ChatDelta(tool_calls=[call])
        case ArgumentsDelta(index, text):
            return wire.ChatDelta(tool_calls=[wire.ToolCallDelta(index=index, function={"arguments": text})])
    return None


# ---- completions ----


@dataclass
class TextAnswer:
    """Choice `i * n + j` is the j-th answer to the i-th prompt.

    echo: the texts of the prompts, if they are to be repeated.
    silent: for max_tokens = 0: the one token that the engine generates is left out.
    running_usage: None if chunks have no usage.
    """

    framing = EVENTS_UNTIL_DONE
    head: ChunkHeader
    prompts: Sequence[Sequence[int]]
    n: int
    token_bytes: TokenBytes
    hidden: frozenset[int]
    echo: Sequence[str] | None
    logprobs: int | None
    silent: bool = False
    include_usage: bool = False
    running_usage: RunningUsage | None = None

    def __post_init__(self) -> None:
        self._offsets = [0] * (len(self.prompts) * self.n)
        self._begun = [False] * (len(self.prompts) * self.n)
        self._scores: list[list[TokenLogprob]] = [[] for _ in self.prompts]
        self._parts: list[list[wire.TextChoice]] = [[] for _ in self._offsets]

    def begin(self) -> Iterable[wire.TextCompletion]:
        return ()

    def take(self, number: int, update: JobUpdate) -> Iterable[wire.TextCompletion]:
        if self.running_usage is not None:
            self.running_usage.take(update)
        match update:
            case PromptLogprobs(_, logprobs):
                self._scores[number] += logprobs
            case TokensOut(index, text, _, logprobs):
                at = number * self.n + index
                yield from self._begin(number, at)
                visible = [one for one in logprobs if one.token_id not in self.hidden]
                if not self.silent and (text or (self.logprobs is not None and visible)):
                    logprobs_out = self._logprobs_out(visible, [self._offsets[at]] * len(visible))
                    self._offsets[at] += len(text)
                    yield self._add(at, text, logprobs_out)
            case OutputFinished(index, reason, _):
                at = number * self.n + index
                yield from self._begin(number, at)
                why = "length" if reason is FinishReason.LENGTH or self.silent else "stop"
                yield self._add(at, "", None, why)

    def end(self, usage: Usage) -> Iterable[wire.TextCompletion]:
        return [self._chunk_of([], usage)] if self.include_usage else []

    def failed(self, error: PenstockError) -> Iterable[Any]:
        return [openai_body(error)]

    def whole(self, usage: Usage) -> wire.TextCompletion:
        return self._chunk_of([self._joined(at, parts) for at, parts in enumerate(self._parts)], usage)

    def _begin(self, number: int, at: int) -> Iterable[wire.TextCompletion]:
        """Yield the echoed prompt and its logprobs before the first token."""
        if self._begun[at]:
            return
        self._begun[at] = True
        if self.echo is None:
            return
        logprobs = None
        if self.logprobs is not None:
            ids = self.prompts[number]
            offsets = _offsets(self.token_bytes(ids))
            logprobs = wire.TextLogprobs(
                tokens=[text_of_token(self.token_bytes(ids[:1])[0])],
                token_logprobs=[None],
                top_logprobs=[None] if self.logprobs else None,
                text_offset=offsets[:1],
            )
            rest = self._logprobs_out(self._scores[number], offsets[1:])
            if rest is not None:
                _extend(logprobs, rest)
        self._offsets[at] = len(self.echo[number])
        yield self._add(at, self.echo[number], logprobs)

    def _logprobs_out(self, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]) -> wire.TextLogprobs | None:
        if self.logprobs is None:
            return None
        out = self._no_logprobs()
        for one, offset in zip(logprobs, offsets, strict=True):
            own, *alternatives = map(text_of_token, self.token_bytes([one.token_id, *(token for token, _ in one.top)]))
            out.tokens.append(own)
            out.token_logprobs.append(one.logprob)
            out.text_offset.append(offset)
            if out.top_logprobs is not None:
                top = {name: value for name, (_, value) in zip(alternatives, one.top, strict=True)}
                out.top_logprobs.append({**top, own: top.get(own, one.logprob)})  # always includes the token itself
        return out

    def _no_logprobs(self) -> wire.TextLogprobs:
        return wire.TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[] if self.logprobs else None, text_offset=[])

    def _add(self, at: int, text: str, logprobs: wire.TextLogprobs | None, why: str | None = None) -> wire.TextCompletion:
        choice = wire.TextChoice(index=at, text=text, logprobs=logprobs, finish_reason=why)
        self._parts[at].append(choice)
        return self._chunk_of([choice], None if self.running_usage is None else self.running_usage.usage)

    def _joined(self, at: int, parts: Sequence[wire.TextChoice]) -> wire.TextChoice:
        logprobs = None
        if self.logprobs is not None:
            logprobs = self._no_logprobs()
            for part in parts:
                if part.logprobs is not None:
                    _extend(logprobs, part.logprobs)
        why = parts[-1].finish_reason if parts else "stop"
        return wire.TextChoice(index=at, text="".join(part.text for part in parts), logprobs=logprobs, finish_reason=why)

    def _chunk_of(self, choices: list[wire.TextChoice], usage: Usage | None = None) -> wire.TextCompletion:
        return wire.TextCompletion(
            **self.head.fields,
            object="text_completion",
            choices=choices,
            usage=None if usage is None else usage_out(replace(usage, completion_tokens=0) if self.silent else usage),
        )


def _extend(logprobs: wire.TextLogprobs, more: wire.TextLogprobs) -> None:
    logprobs.tokens += more.tokens
    logprobs.token_logprobs += more.token_logprobs
    logprobs.text_offset += more.text_offset
    if logprobs.top_logprobs is not None and more.top_logprobs is not None:
        logprobs.top_logprobs += more.top_logprobs


def _offsets(tokens: Sequence[bytes]) -> list[int]:
    """The character at which each token begins; a token that continues a character's bytes begins with that character."""
    out, characters = [], 0
    for raw in tokens:
        goes_on = bool(raw) and raw[0] & 0xC0 == 0x80
        out.append(max(0, characters - 1) if goes_on else characters)
        characters += sum(byte & 0xC0 != 0x80 for byte in raw)
    return out
