"""OutputParser: splits the output of a model into text and tool calls, as it arrives."""

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
        """JSON; only the beginning of it if the call was cut off."""
        return "".join(self.parts)

    @property
    def as_written(self) -> Any:
        """The arguments of a finished call as a JSON object, on one line. Not parsed: 1e999 is valid JSON and no number here."""
        return msgspec.Raw(self.arguments.replace("\n", " ").replace("\r", " "))


class OutputParser:
    """`text` and `calls` hold the output so far. Without a parser all of it is text."""

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
        """End the output, and return what was held back."""
        return self._record([] if self._parser is None else self._parser.finish(cut=reason is FinishReason.LENGTH))

    @property
    def calls_tools(self) -> bool:
        """Whether the output ended with tool calls; a stop string may have cut one off."""
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
