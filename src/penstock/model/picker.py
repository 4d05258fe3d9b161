"""Picker: choose tokens with the native kernels, which read each row of logits once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from penstock.kernels.library import CHOICE, KernelContext
from penstock.model.noise import noise_at
from penstock.model.sample_row import SampleRow


class Picker:
    def __init__(self, context: KernelContext) -> None:
        self._context = context

    def pick(self, logits: Tensor, rows: Sequence[SampleRow]) -> np.ndarray:
        """A token for each row of contiguous logits [R, vocab] in fp32, which stay as they are. -> [R]

        -1 where another way of rounding could choose another token: these rows are left to `model/drawing.py`.
        """
        choices = np.zeros(len(rows), CHOICE)
        drawn = [i for i, row in enumerate(rows) if not row.greedy]
        if drawn:
            some = [rows[i] for i in drawn]
            choices["noise"][drawn] = noise_at([row.noise_key for row in some], [len(row.tokens) for row in some])
            choices["temperature"][drawn] = [row.temperature for row in some]
            for name in ("top_p", "min_p"):
                choices[name][drawn] = [getattr(row.params, name) for row in some]
            choices["top_k"][drawn] = [min(row.params.top_k, logits.shape[1]) for row in some]  # clients may ask for any number
        return self._context.pick(logits.numpy(), choices).astype(np.int64)
