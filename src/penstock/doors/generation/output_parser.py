"""Speech: what one output of a model says, told apart as it comes: text for the reader, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.domain.updates import FinishReason
from penstock.doors.tools import ArgumentsDelta, CallFinished, CallStarted, TextDelta, ToolEvent, ToolParser


@dataclass(slots=True)
class Call:
    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    finished: bool = False

    @property
    def arguments(self) -> str:
        """As JSON; of a call that was cut off, the beginning of it."""
        return "".join(self.parts)

    @property
    def as_written(self) -> Any:
        """The arguments of a finished call, for an answer that holds them as an object. They are not read, since not all that
        JSON allows can be (1e999); and they are on one line, as events are."""
        return msgspec.Raw(self.arguments.replace("\n", " ").replace("\r", " "))


class OutputParser:
    """`text` and `calls` are what was said so far. Without a parser all is text."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._text: list[str] = []
        self.calls: list[Call] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def feed(self, text: str) -> Sequence[ToolEvent]:
        if self._parser is None:
            return self._record([TextDelta(text)] if text else [])
        return self._record(self._parser.push(text))

    def close(self, reason: FinishReason) -> Sequence[ToolEvent]:
        """The output is over; what was held back comes now."""
        return self._record([] if self._parser is None else self._parser.finish(cut=reason is FinishReason.LENGTH))

    @property
    def calls_tools(self) -> bool:
        """Whether it ended by calling tools: a stop string may have cut a call."""
        return bool(self.calls) and all(call.finished for call in self.calls)

    def _record(self, events: Sequence[ToolEvent]) -> Sequence[ToolEvent]:
        for event in events:
            match event:
                case TextDelta(text):
                    self._text.append(text)
                case CallStarted(_, call_id, name):
                    self.calls.append(Call(call_id, name))
                case ArgumentsDelta(index, text):
                    self.calls[index].parts.append(text)
                case CallFinished(index):
                    self.calls[index].finished = True
        return events
