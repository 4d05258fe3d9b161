"""Find the most likely tokens without sorting the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (values, ids) of the k largest of each row, best first; ties go to the lower id. [R, V] -> [R, k] each

    In two levels: the k largest lie in the k blocks with the largest maxima, and a maximum per block is far cheaper than
    sorting everything.
    """
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if vocab % BLOCK or k >= blocks:
        return _first_of_ties(*torch.topk(logits, k, dim=-1))
    tiles = logits.view(rows, blocks, BLOCK)
    best = torch.topk(tiles.amax(dim=-1), k, dim=-1).indices.sort(dim=-1).values  # [R, k]
    inside = tiles.gather(1, best.unsqueeze(-1).expand(-1, -1, BLOCK)).view(rows, k * BLOCK)
    values, places = torch.topk(inside, k, dim=-1)
    ids = best.gather(1, places // BLOCK) * BLOCK + places % BLOCK
    return _first_of_ties(values, ids)


def argmax(logits: Tensor) -> Tensor:
    """[R, V] -> [R]; ties go to the lowest id."""
    rows, vocab = logits.shape
    if vocab % BLOCK:
        return logits.argmax(dim=-1)
    tiles = logits.view(rows, -1, BLOCK)
    block = tiles.amax(dim=-1).argmax(dim=-1)  # [R]
    inside = tiles[torch.arange(rows, device=logits.device), block]
    return block * BLOCK + inside.argmax(dim=-1)


def _first_of_ties(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Order equal values by id: `topk` leaves their order open, and results must repeat."""
    order = ids.argsort(dim=-1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)
