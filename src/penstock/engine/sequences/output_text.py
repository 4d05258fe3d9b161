"""OutputText: turns the tokens of a sequence into text, cuts off stop strings and holds back possible ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.domain.constraint import Constraint
from penstock.domain.job import Sequence as Output
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason
from penstock.errors import PenstockError, RequestError


class TokenDecoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


TextStreams = Callable[[bool], TokenDecoder]  # skip_special -> a decoder for one sequence


class TextPiece(NamedTuple):
    text: str
    stop: str | None = None  # the stop string found; `text` is what comes before it


class OutputText:
    """Decodes tokens, and holds back the longest tail that could still become a stop string."""

    def __init__(self, stream: TokenDecoder, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        text = self._stream.push(token_id)
        return self._release(text) if self._stops and may_stop else TextPiece(text)

    def finish(self) -> TextPiece:
        """Return the rest of the text after the last token."""
        rest = self._stream.flush()
        if not self._stops:
            return TextPiece(rest)
        piece = self._release(rest)
        held, self._held = self._held, ""
        return piece if piece.stop is not None else TextPiece(piece.text + held)

    def _release(self, text: str) -> TextPiece:
        pending = self._held + text
        met = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if met:
            at, stop = min(met)
            self._held = ""
            return TextPiece(pending[:at], stop)
        keep = max(_overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - keep :]
        return TextPiece(pending[: len(pending) - keep])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class AcceptedToken(NamedTuple):
    """The text that a token adds, and why it was the last one, if it was.

    unseen: its constraint was not consulted, since a stop token or a stop string ends the output.
    """

    text: str
    reason: FinishReason | None = None
    stop_reason: str | int | None = None
    unseen: bool = False


def accept_token(seq: Output, text: OutputText, eos_ids: Collection[int]) -> AcceptedToken:
    """Process the newest token of a sequence. Its constraint sees the token unless that is a stop token."""
    job, token_id, generated = seq.job, seq.tokens[-1], seq.generated
    sampling = job.sampling
    if _is_end(sampling, token_id, eos_ids):
        piece = text.finish()
        by_itself = None if token_id in eos_ids and not sampling.ignore_eos else token_id
        return AcceptedToken(piece.text, FinishReason.STOP, by_itself if piece.stop is None else piece.stop, unseen=True)
    piece = text.push(token_id, may_stop=generated >= sampling.min_tokens)
    if piece.stop is not None:
        return AcceptedToken(piece.text, FinishReason.STOP, piece.stop, unseen=True)
    complete = seq.constraint.accept(token_id) if seq.constraint is not None else False
    if complete:
        reason = FinishReason.STOP
    elif complete is not None and generated >= job.max_tokens:  # else it is decided with the next mask
        reason = FinishReason.LENGTH
    else:
        return AcceptedToken(piece.text)
    rest = text.finish()
    return AcceptedToken(piece.text + rest.text, reason if rest.stop is None else FinishReason.STOP, rest.stop)


def replay_token(seq: Output, text: OutputText, eos_ids: Collection[int]) -> AcceptedToken:
    """Process a token that another server generated before: it was not chosen under our constraint, so it may be refused."""
    try:
        return accept_token(seq, text, eos_ids)
    except Exception as error:
        raise _token_refused(seq, error) from error


def mask_of_end(seq: Output, constraint: Constraint) -> np.ndarray | None:
    """The tokens that a constraint allows where a resumed output has ended unseen; None if that is not known in time."""
    try:
        mask: np.ndarray | None = constraint.mask()
    except Exception as error:
        raise _token_refused(seq, error) from error
    return mask


def check_end(seq: Output, constraint: Constraint, mask: np.ndarray) -> None:
    """Refuse the newest token, which ended a resumed output unseen by its constraint, unless that allows it."""
    token_id = seq.tokens[-1]
    if not constraint.complete and not int(mask[token_id // 32]) >> token_id % 32 & 1:
        raise _token_refused(seq, RequestError("The grammar does not allow it here."))


def _token_refused(seq: Output, error: Exception) -> RequestError:
    return resume_refused(f"its token {seq.generated} (id {seq.tokens[-1]})", error)


def resume_refused(what: str, error: Exception) -> RequestError:
    why = error.message if isinstance(error, PenstockError) else str(error)
    message = f"The answer cannot be resumed: {what} was refused: {why}"
    return RequestError(message, field="resume", hint="Start from the beginning.")


def _is_end(sampling: SamplingParams, token_id: int, eos_ids: Collection[int]) -> bool:
    return (token_id in eos_ids and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
