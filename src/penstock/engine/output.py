"""What a sequence says: text from tokens, with stop strings cut off and possible ones held back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class TextStream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


TextStreams = Callable[[bool], TextStream]  # a new stream for each sequence; whether special tokens are left out


class Piece(NamedTuple):
    text: str
    stop: str | None = None  # the stop string that was met; the text before it is in `text`


class OutputText:
    """Holds back the longest tail that could still become a stop string."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream, self._stops = stream, tuple(stops)
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> Piece:
        text = self._stream.push(token_id)
        return self._release(text) if self._stops and may_stop else Piece(text)

    def finish(self) -> Piece:
        """The rest, when nothing more will come."""
        rest = self._stream.flush()
        if not self._stops:
            return Piece(rest)
        piece = self._release(rest)
        held, self._held = self._held, ""
        return piece if piece.stop is not None else Piece(piece.text + held)

    def _release(self, text: str) -> Piece:
        pending = self._held + text
        met = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if met:
            at, stop = min(met)
            self._held = ""
            return Piece(pending[:at], stop)
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return Piece(pending[: len(pending) - keep])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest tail of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
