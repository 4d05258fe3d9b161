"""GrammarConstraint: the position of one output in a grammar that lives in another process.

The process computes the next mask while the layers run. The compute thread waits for a late one only as long as its WaitBudget
allows; then the engine goes on without it, and asks again after its next pass.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.doors.grammar.remote import RemoteGrammar, TooComplex
from penstock.doors.grammar.worker import Op, ReplyKind
from penstock.errors import PenstockError, RequestError

SIMPLIFY = "Make it smaller and less ambiguous, and combine fewer patterns for one value."
HOLD_SHARE = 0.25  # of the compute thread's time, in the long run


class WaitBudget:
    """A time budget: at most `limit` seconds at once, and a `share` of all time. The default share is that of the compute
    thread's waiting for masks."""

    def __init__(
        self,
        limit: float,
        shared: WaitBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        share: float = HOLD_SHARE,
    ) -> None:
        self._limit = limit
        self._shared = shared
        self._clock = clock
        self._share = share
        self._left = limit
        self._since = clock()

    @property
    def left(self) -> float:
        now = self._clock()
        self._left = min(self._limit, self._left + self._share * (now - self._since))
        self._since = now
        return self._left if self._shared is None else min(self._left, self._shared.left)

    def spend(self, seconds: float) -> None:
        self._left -= seconds
        if self._shared is not None:
            self._shared.spend(seconds)


class GrammarFactory:
    """Makes the Constraint of each output."""

    def __init__(self, grammar: RemoteGrammar, mask: bytes, wait_budget: WaitBudget, field: str) -> None:
        self._grammar = grammar
        self._mask = mask
        self._wait_budget = wait_budget
        self._field = field
        grammar.users.add(self)

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self._grammar, self._mask, self._wait_budget, self._field)


class GrammarConstraint:
    """End-of-text tokens are allowed where the grammar accepts."""

    def __init__(self, grammar: RemoteGrammar, mask: bytes, wait_budget: WaitBudget, field: str) -> None:
        self._grammar = grammar
        self._wait_budget = wait_budget
        self._field = field
        self._position = 0  # changes with every token that is accepted or undone
        self._requested = 0  # the position of the mask that was requested last
        self._mask = (0, mask)  # and its position
        self._unconfirmed = 0  # accepted tokens that the process has not confirmed yet
        self._complete = False
        self._error: PenstockError | None = None
        self._number = grammar.add(self)

    def mask(self) -> NDArray[np.uint32] | None:
        """The allowed tokens; None if they are not known in time."""
        self.prefetch()
        if not self._wait(lambda: self._mask[0] == self._position):
            return None
        mask = np.frombuffer(self._mask[1], dtype=np.uint32)
        if not mask.any():
            raise RequestError("No token of this model can continue the answer within its grammar.", field=self._field)
        return mask

    def prefetch(self) -> None:
        if self._requested != self._position:
            self._requested = self._position
            self._grammar.request(Op.MASK, self._number, self._position)

    @property
    def complete(self) -> bool:
        return self._unconfirmed == 0 and self._complete

    def accept(self, token_id: int) -> bool | None:
        self._position += 1
        self._unconfirmed += 1
        self._grammar.request(Op.ACCEPT, self._number, token_id)
        return self._complete if self._wait(lambda: self._unconfirmed == 0) else None

    def rollback(self, count: int) -> None:
        if count:
            self._position += 1
            self._complete = False
            self._grammar.request(Op.ROLLBACK, self._number, count)

    def on_reply(self, kind: ReplyKind, value: int, payload: bytes) -> None:
        match kind:
            case ReplyKind.ACCEPTED:
                self._unconfirmed -= 1
                self._complete = bool(value)
            case ReplyKind.MASK:
                self._mask = (value, payload)
            case ReplyKind.TOO_SLOW:
                self._error = self._too_complex(TooComplex("CPU time"))
            case _:
                reason = short_reason(payload.decode("utf-8", "replace"))
                message = f"The answer cannot follow its grammar any further: {reason}"
                self._error = RequestError(message, field=self._field, hint="Simplify the grammar.")

    def _wait(self, is_done: Callable[[], bool]) -> bool:
        """Wait for the process while the wait budget lasts. Returns whether it is done; raises if the constraint has failed."""
        grammar = self._grammar
        grammar.read()
        while not is_done() and self._error is None and grammar.failure is None and (left := self._wait_budget.left) > 0:
            self._wait_budget.spend(grammar.wait(left))
        if self._error is None and isinstance(grammar.failure, TooComplex):
            self._error = self._too_complex(grammar.failure)
        if (error := self._error or grammar.failure) is not None:
            raise error
        return is_done()

    def _too_complex(self, error: TooComplex) -> RequestError:
        message = f"The answer cannot follow its grammar any further: it takes too much {error.resource}."
        return RequestError(message, field=self._field, hint=SIMPLIFY)


def short_reason(error: Any) -> str:
    """The beginning of llguidance's message, without the dump of its state."""
    text = " ".join(re.split(r"\n\s*<|\n\s+\d+ \|", str(error)[:2000])[0].split())
    if text.startswith("panic"):
        text = "it is too large"
    text = re.sub("NoExtension(Bias)?", "no text can satisfy it", text)
    return (text if len(text) <= 240 else text[:240] + "…").rstrip(". ") + "."
