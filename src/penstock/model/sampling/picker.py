"""Picker: the interface of kernels that choose tokens, and NativePicker, whose kernels read each row of logits once on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.library import CHOICE, KernelContext
from penstock.model.sampling.choosing import choose, select
from penstock.model.sampling.noise import noise_at
from penstock.model.sampling.sample_row import SampleRow


class Picker(Protocol):
    """adjusts: whether it applies penalties, biases, bans and masks; otherwise it needs logits with these applied."""

    adjusts: bool

    def pick(self, logits: Tensor, rows: Sequence[SampleRow], ahead: int) -> Tensor:
        """Choose the token that the reference would for each row of contiguous logits [R, vocab] in fp32. -> [R]

        ahead: tokens of each row that the host does not know yet.
        """


class NativePicker:
    adjusts = False

    def __init__(self, context: KernelContext) -> None:
        self._context = context

    def pick(self, logits: Tensor, rows: Sequence[SampleRow], ahead: int) -> Tensor:
        tokens = torch.from_numpy(self.certain(logits, rows, ahead))
        left = (tokens < 0).nonzero().squeeze(1).tolist()
        if left:
            tokens[left] = choose(select(logits, left), [rows[i] for i in left], ahead)
        return tokens

    def certain(self, logits: Tensor, rows: Sequence[SampleRow], ahead: int = 0) -> np.ndarray:
        """The tokens of rows, which stay as they are; -1 where another way of rounding could choose another token."""
        choices = np.zeros(len(rows), CHOICE)
        drawn = [i for i, row in enumerate(rows) if not row.greedy]
        if drawn:
            some = [rows[i] for i in drawn]
            choices["noise"][drawn] = noise_at([row.noise_key for row in some], [len(row.tokens) + ahead for row in some])
            choices["temperature"][drawn] = [row.temperature for row in some]
            for name in ("top_p", "min_p"):
                choices[name][drawn] = [getattr(row.params, name) for row in some]
            choices["top_k"][drawn] = [min(row.params.top_k, logits.shape[1]) for row in some]  # clients may ask for any number
        return self._context.pick(logits.numpy(), choices).astype(np.int64)
