"""Answers without a model: any tokens that a Constraint allows, until it is content."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from penstock.domain.constraint import ConstraintFactory
from penstock.doors.grammar.grammars import Grammars


@dataclass(frozen=True)
class Answer:
    text: str
    finished: bool


def allowed_tokens(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def any_answer(
    grammars: Grammars, factory: ConstraintFactory, rng: random.Random, eos_ids: frozenset[int], *, limit: int = 400
) -> Answer:
    """A random walk through the grammar. It ends where it can, more often than not."""
    constraint, ids = factory(), []
    for _ in range(limit):
        tokens = allowed_tokens(constraint.mask())
        ends = eos_ids.intersection(map(int, tokens[:64])) | eos_ids.intersection(map(int, tokens[-64:]))
        if ends and (rng.random() < 0.5 or len(ends) == len(tokens)):
            return Answer(_text(grammars, ids), True)
        token = int(tokens[rng.randrange(len(tokens))])
        if token in eos_ids:
            return Answer(_text(grammars, ids), True)
        ids.append(token)
        if constraint.accept(token):
            return Answer(_text(grammars, ids), True)
    return Answer(_text(grammars, ids), False)


def accepts(grammars: Grammars, factory: ConstraintFactory, ids: list[int], eos: int) -> bool:
    """Whether exactly these tokens are a whole answer."""
    constraint = factory()
    for i, token in enumerate(ids):
        if token not in allowed_tokens(constraint.mask()):
            return False
        if constraint.accept(token):
            return i == len(ids) - 1
    return eos in allowed_tokens(constraint.mask())


def _text(grammars: Grammars, ids: list[int]) -> str:
    return b"".join(grammars.token_bytes(ids)).decode("utf-8", "replace")
