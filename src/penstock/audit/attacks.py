"""The cheap attacks: one look at each state, with nothing but the public weights and a public text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.audit.cut_model import ROWS_PER_BATCH
from penstock.model.ends import EndModel

RIDGE = 1e-3  # of the mean variance of a state's numbers


class Dictionary:
    """The embeddings of all tokens, to look states up in by their direction (cosine): lengths grow from layer to layer."""

    def __init__(self, ends: EndModel) -> None:
        self._directions = F.normalize(ends.compute_embed(range(ends.spec.vocab)), dim=1)  # [vocab, hidden]

    def __len__(self) -> int:
        return len(self._directions)

    def directions(self, ids: Sequence[int]) -> Tensor:
        return self._directions[torch.tensor(ids, device=self._directions.device)]

    def cosines(self, states: Tensor) -> Tensor:
        """[R, vocab]"""
        return F.normalize(states, dim=1) @ self._directions.T

    def nearest(self, states: Tensor, count: int) -> Tensor:
        """[R, count] token ids, the nearest first."""
        return torch.cat([self.cosines(rows).topk(count).indices for rows in torch.split(states, ROWS_PER_BATCH)])


@dataclass(frozen=True, slots=True)
class LinearMap:
    weight: Tensor  # [hidden, hidden]
    source_mean: Tensor
    target_mean: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        return (_level(states) - self.source_mean) @ self.weight + self.target_mean


def fit(states: Tensor, targets: Tensor) -> LinearMap:
    """The ridge regression from states to targets, row by row."""
    # on the CPU, since not every GPU has the double precision that keeps the figures the same everywhere
    x, y = _level(states).cpu().double(), targets.cpu().double()
    source, target = x.mean(0), y.mean(0)
    x, y = x - source, y - target
    spread = x.T @ x
    spread.diagonal().add_(RIDGE * spread.diagonal().mean())
    weight = torch.linalg.solve(spread, x.T @ y)
    return LinearMap(*(part.to(states) for part in (weight, source, target)))


def share(guesses: Tensor, ids: Sequence[int]) -> float:
    """How many of the tokens are among their guesses: [R] or [R, count]."""
    right = guesses.view(len(ids), -1) == torch.tensor(ids, device=guesses.device).unsqueeze(1)
    return right.any(1).double().mean().item()


def _level(states: Tensor) -> Tensor:
    """Rows of equal length: the few that are a thousand times longer would otherwise decide the fit alone."""
    return F.rms_norm(states, states.shape[1:])
