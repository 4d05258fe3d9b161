"""Anthropic's answers: the events of a message, whose blocks follow each other: text, then tool calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pydantic_core

from penstock.domain.updates import FinishReason, JobUpdate, OutputFinished, TokensOut, Usage
from penstock.doors.anthropic import wire
from penstock.doors.anthropic.errors import anthropic_body
from penstock.doors.generation.output_parser import Call, OutputParser
from penstock.doors.http.framing import EVENT_STREAM, Framing, comment, named_event
from penstock.doors.tools import ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolEvent
from penstock.errors import PenstockError


def ping(text: str) -> bytes:
    """A ping event, which clients skip, with the text in a comment."""
    return comment(text).removesuffix(b"\n") + named_event(wire.PingEvent())


@dataclass
class MessageAnswer:
    framing = Framing(EVENT_STREAM, named_event, ping)
    message_id: str
    model: str
    parser: OutputParser
    prompt_tokens: int
    _blocks: int = 0  # started so far
    _open: bool = False  # whether the last of them is open
    _stop_reason: wire.StopReason = "end_turn"
    _stop_sequence: str | None = None

    def begin(self) -> Iterable[wire.Event]:
        """How many prompt tokens are cached is not known yet: the last event has the right numbers."""
        return [
            wire.MessageStart(message=self._message([], wire.AnthropicUsageOut(input_tokens=self.prompt_tokens, output_tokens=0)))
        ]

    def take(self, number: int, update: JobUpdate) -> Iterable[wire.Event]:
        match update:
            case TokensOut(_, text):
                yield from self._events(self.parser.feed(text))
            case OutputFinished(_, reason, stop):
                yield from self._events(self.parser.close(reason))
                yield from self._close()
                self._stop_reason = self._reason(reason, stop)
                self._stop_sequence = stop if self._stop_reason == "stop_sequence" and isinstance(stop, str) else None

    def end(self, usage: Usage) -> Iterable[wire.Event]:
        delta = wire.MessageEnd(stop_reason=self._stop_reason, stop_sequence=self._stop_sequence)
        return [wire.MessageDelta(delta=delta, usage=usage_out(usage)), wire.MessageStop()]

    def failed(self, error: PenstockError) -> Iterable[Any]:
        return [anthropic_body(error)]

    def whole(self, usage: Usage) -> wire.MessageOut:
        text: list[wire.Block] = [wire.TextBlockOut(text=self.parser.text)] if self.parser.text else []
        calls = [wire.ToolUseOut(id=call.id, name=call.name, input=_input(call)) for call in self.parser.calls]
        return self._message([*text, *calls], usage_out(usage), self._stop_reason, self._stop_sequence)

    def _message(
        self,
        content: list[wire.Block],
        usage: wire.AnthropicUsageOut,
        stop_reason: wire.StopReason | None = None,
        stop_sequence: str | None = None,
    ) -> wire.MessageOut:
        return wire.MessageOut(
            id=self.message_id,
            model=self.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )

    def _events(self, found: Sequence[ToolEvent]) -> Iterable[wire.Event]:
        for event in found:
            match event:
                case TextDelta(text):
                    if not self._open:
                        yield self._begin(wire.TextBlockOut(text=""))
                    yield self._delta(wire.TextBlockDelta(text=text))
                case CallStarted(_, call_id, name):
                    yield from self._close()
                    yield self._begin(wire.ToolUseOut(id=call_id, name=name, input={}))
                case ArgumentsDelta(_, text):
                    yield self._delta(wire.InputJsonDelta(partial_json=text))
                case CallFinished():
                    yield from self._close()

    def _begin(self, block: wire.Block) -> wire.BlockStart:
        self._blocks, self._open = self._blocks + 1, True
        return wire.BlockStart(index=self._blocks - 1, content_block=block)

    def _delta(self, part: wire.TextBlockDelta | wire.InputJsonDelta) -> wire.BlockDelta:
        return wire.BlockDelta(index=self._blocks - 1, delta=part)

    def _close(self) -> Iterable[wire.BlockStop]:
        if self._open:
            self._open = False
            yield wire.BlockStop(index=self._blocks - 1)

    def _reason(self, reason: FinishReason, stop: str | int | None) -> wire.StopReason:
        if reason is FinishReason.LENGTH:
            return "max_tokens"
        if self.parser.calls_tools:
            return "tool_use"
        return "stop_sequence" if isinstance(stop, str) else "end_turn"


def usage_out(usage: Usage) -> wire.AnthropicUsageOut:
    """The three input numbers add up to the prompt."""
    return wire.AnthropicUsageOut(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _input(call: Call) -> Any:
    """The input of a call. If the call was cut off, its complete part, as clients get it from a stream."""
    if call.finished:
        return call.as_written
    return _bounded(pydantic_core.from_json(call.arguments or "{}", allow_partial=True))


def _bounded(value: Any) -> Any:
    """Write infinite numbers as 1e999: they were too large to be parsed, and null would change the answer."""
    if isinstance(value, dict):
        return {name: _bounded(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_bounded(inside) for inside in value]
    return msgspec.Raw(b"1e999" if value > 0 else b"-1e999") if isinstance(value, float) and math.isinf(value) else value
