"""ToolParser: splits the text of a model, as it arrives, into text and calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from penstock.doors.tools.formats import NAME, ToolFormat


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A part of the arguments, which are JSON; incomplete if the answer was cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    index: int


ToolEvent = TextDelta | CallStarted | ArgumentsDelta | CallFinished


class _Place(Enum):
    START = auto()  # no text yet: the only place for calls in some formats
    TEXT = auto()
    HEAD = auto()  # from a marker to the arguments, or between two calls
    ARGUMENTS = auto()


class ToolParser:
    """Parses one answer. It relies on the grammar: what looks like the beginning of a call is one."""

    def __init__(self, form: ToolFormat, new_id: Callable[[], str] | None = None) -> None:
        self._format = form
        self._new_id = new_id or (short_id if form.short_ids else long_id)
        self._head = re.compile(f"{_spaced_pattern(form.before)}({NAME}){_spaced_pattern(form.middle)}")
        self._markers = [marker for marker in (form.tag, form.marker) if marker]
        self._place = _Place.START
        self._held = ""
        self._calls = 0
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def push(self, text: str) -> list[ToolEvent]:
        self._held += text
        return list(self._events())

    def finish(self, *, cut: bool = False) -> list[ToolEvent]:
        """End the answer. cut: it was cut off, so what looks like the beginning of a marker is not text."""
        if self._place is _Place.HEAD and not self._calls and not cut:
            # a marker without a call: all of it is text
            rest, self._held = self._held, ""
            return [TextDelta(rest)] if rest else []
        if self._place not in (_Place.START, _Place.TEXT):
            return []
        rest = self._held[: len(self._held) - self._beginning()] if cut else self._held
        self._held = ""
        return [TextDelta(rest)] if rest else []

    def _events(self) -> Iterator[ToolEvent]:
        while self._held:
            before = self._place, len(self._held)
            match self._place:
                case _Place.START:
                    self._look_at_start()
                case _Place.TEXT:
                    yield from self._text()
                case _Place.HEAD:
                    yield from self._call()
                case _Place.ARGUMENTS:
                    yield from self._arguments()
            if (self._place, len(self._held)) == before:
                return  # wait for more text

    def _look_at_start(self) -> None:
        if self._format.anywhere:
            self._place = _Place.TEXT
        elif self._held.startswith(tuple(self._markers)):
            self._place = _Place.HEAD
        elif not any(marker.startswith(self._held) for marker in self._markers):
            self._place = _Place.TEXT

    def _text(self) -> Iterator[ToolEvent]:
        at = min((i for marker in self._markers if (i := self._held.find(marker)) >= 0), default=-1)
        if self._format.anywhere and at >= 0:
            text, self._held, self._place = self._held[:at].rstrip(), self._held[at:], _Place.HEAD
        else:
            # White space before a call is dropped as well.
            keep = len(self._held) - self._beginning()
            keep = len(self._held[:keep].rstrip())
            text, self._held = self._held[:keep], self._held[keep:]
        if text:
            yield TextDelta(text)

    def _beginning(self) -> int:
        """The number of characters at the end that may be the beginning of a marker."""
        if not self._format.anywhere and self._place is _Place.TEXT:
            return 0
        longest = max(map(len, self._markers)) - 1
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(marker.startswith(self._held[-n:]) for marker in self._markers):
                return n
        return 0

    def _call(self) -> Iterator[ToolEvent]:
        found = self._head.search(self._held)
        if found and found.end() < len(self._held):  # the arguments have begun
            self._held, self._place = self._held[found.end() :], _Place.ARGUMENTS
            self._depth, self._quoted, self._escaped = 0, False, False
            yield CallStarted(self._calls, self._new_id(), found[1])

    def _arguments(self) -> Iterator[ToolEvent]:
        end = self._end_of_object()
        text, self._held = self._held[:end], self._held[end:]
        yield ArgumentsDelta(self._calls, text)
        if self._depth == 0:
            yield CallFinished(self._calls)
            self._calls += 1
            self._place = _Place.HEAD

    def _end_of_object(self) -> int:
        for i, char in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif char == '"':
                self._quoted = not self._quoted
            elif self._quoted:
                self._escaped = char == "\\"
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return len(self._held)


def _spaced_pattern(text: str) -> str:
    """A pattern that allows white space: some tokenizers add a space after a special token."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


def long_id() -> str:
    return "call_" + _random(24)


def short_id() -> str:
    return _random(9)


def _random(length: int) -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))
