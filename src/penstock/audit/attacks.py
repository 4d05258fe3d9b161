"""The cheap attacks, which look at each state once, with only the public weights and a public text."""

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
    """The embeddings of all tokens, searched by cosine, since the lengths of states grow from layer to layer."""

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
    """Fit a ridge regression from states to targets, row by row."""
    # on the CPU: fp64 keeps the figures the same everywhere, and not every GPU has it
    x, y = _level(states).cpu().double(), targets.cpu().double()
    source, target = x.mean(0), y.mean(0)
    x, y = x - source, y - target
    spread = x.T @ x
    spread.diagonal().add_(RIDGE * spread.diagonal().mean())
    weight = torch.linalg.solve(spread, x.T @ y)
    return LinearMap(*(part.to(states) for part in (weight, source, target)))


def share(guesses: Tensor, ids: Sequence[int]) -> float:
    """The share of tokens that are among their guesses, [R] or [R, count]."""
    right = guesses.view(len(ids), -1) == torch.tensor(ids, device=guesses.device).unsqueeze(1)
    return right.any(1).double().mean().item()


def _level(states: Tensor) -> Tensor:
    """Scale rows to equal length: a few are a thousand times longer and would dominate the fit."""
    return F.rms_norm(states, states.shape[1:])
