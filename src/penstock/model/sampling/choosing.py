"""Choose a token for each row of adjusted logits, with torch: greedy rows take their best one, the others draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.model.sampling.candidates import argmax
from penstock.model.sampling.drawing import draw
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.transfer import upload


def choose(logits: Tensor, rows: Sequence[SampleRow], ahead: int = 0) -> Tensor:
    """[R, vocab] -> [R]; contiguous logits in fp32, which are overwritten.

    ahead: tokens of each row that the host does not know yet.
    """
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return argmax(logits)
    if len(drawn) == len(rows):
        return draw(logits, rows, ahead)
    greedy = [i for i, row in enumerate(rows) if row.greedy]
    best = argmax(select(logits, greedy))
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    tokens.index_copy_(0, upload(np.array(greedy), logits.device), best)
    chosen = draw(select(logits, drawn), [rows[i] for i in drawn], ahead)
    return tokens.index_copy_(0, upload(np.array(drawn), logits.device), chosen)


def select(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of a tensor, without waiting for a GPU; the tensor itself if these are all."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(np.array(rows), tensor.device))
