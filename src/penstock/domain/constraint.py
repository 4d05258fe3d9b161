"""Constraint: the tokens that may come next in one output. The engine obeys it; doors/grammar implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Constraint(Protocol):
    """The state of one output. Created for each output, and used only on the compute thread."""

    def mask(self) -> Any:
        """The tokens allowed now, as a numpy array of uint32 words: token t is bit t % 32 of word t // 32."""

    def accept(self, token_id: int) -> bool:
        """Advance by the chosen token. True if the text is complete and nothing can follow."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""


ConstraintFactory = Callable[[], Constraint]
