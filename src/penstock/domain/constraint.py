"""Constraint: which tokens one output may say next. The engine obeys it; whoever knows grammars implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Constraint(Protocol):
    """The state of one output. Made anew for each output and used on the compute thread alone."""

    def mask(self) -> Any:
        """The tokens that may come now, as a numpy array of uint32 words: token t is bit t % 32 of word t // 32."""

    def accept(self, token_id: int) -> bool:
        """Take the chosen token. True: the text is complete, and nothing can follow."""

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""


ConstraintFactory = Callable[[], Constraint]
