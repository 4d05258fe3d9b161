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
    if k >= blocks:
        return _first_of_ties(*torch.topk(logits, k, dim=-1))
    tiles = logits[:, : blocks * BLOCK].view(rows, blocks, BLOCK)
    best = torch.topk(tiles.amax(dim=-1), k, dim=-1).indices.sort(dim=-1).values  # [R, k]
    inside = tiles.gather(1, best.unsqueeze(-1).expand(-1, -1, BLOCK)).view(rows, k * BLOCK)
    values, places = torch.topk(torch.cat([inside, logits[:, blocks * BLOCK :]], dim=1), k, dim=-1)
    first = torch.cat([best * BLOCK, torch.full_like(best[:, :1], blocks * BLOCK)], dim=1)  # ids at which the blocks begin
    block = (places // BLOCK).clamp_(max=k)
    return _first_of_ties(values, first.gather(1, block) + places - block * BLOCK)


def argmax(logits: Tensor) -> Tensor:
    """[R, V] -> [R]; ties go to the lowest id."""
    rows, vocab = logits.shape
    blocks = vocab // BLOCK
    if not blocks:
        return logits.argmax(dim=-1)
    tiles = logits[:, : blocks * BLOCK].view(rows, blocks, BLOCK)
    maxima = tiles.amax(dim=-1)
    block = maxima.argmax(dim=-1)  # [R]
    at = torch.arange(rows, device=logits.device)
    best = block * BLOCK + tiles[at, block].argmax(dim=-1)
    if vocab == blocks * BLOCK:
        return best
    rest = logits[:, blocks * BLOCK :]  # shorter than a block
    return torch.where(rest.amax(dim=-1) > maxima[at, block], blocks * BLOCK + rest.argmax(dim=-1), best)


def _first_of_ties(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Order equal values by id: `topk` leaves their order open, and results must repeat."""
    order = ids.argsort(dim=-1)
    values, ids = values.gather(1, order), ids.gather(1, order)
    order = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(1, order), ids.gather(1, order)
