"""Constraint: the tokens that may come next in one output. The engine obeys it; doors/grammar implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Constraint(Protocol):
    """The state of one output. Created for each output, and used only on the compute thread."""

    @property
    def complete(self) -> bool:
        """Whether the text is complete and nothing can follow; known for certain with the mask."""

    def mask(self) -> Any:
        """The tokens allowed now, as a numpy array of uint32 words: token t is bit t % 32 of word t // 32. None if they are not
        known in time: the engine then computes the position again and calls this once more."""

    def prefetch(self) -> None:
        """Begin to compute the next mask in the background, where that is possible."""

    def accept(self, token_id: int) -> bool | None:
        """Advance by the chosen token. Returns whether the text is complete; None if that is not known in time."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""


ConstraintFactory = Callable[[], Constraint]
