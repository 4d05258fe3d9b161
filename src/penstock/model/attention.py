"""Attention over paged KV for a ragged batch, planned once per batch and then run once per layer.

A layer's KV is one tensor [slots, 2, kv_heads, head_dim]; slot = block * block_size + offset. Decodes (one token) are
gathered and run in one padded call per length bucket; each longer Span gets its own call, because padding a chunk together
with single tokens wastes most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.batch import Batch, BatchPiece
from penstock.model.upload import upload

SMALL_BUCKET = 8  # blocks; below this, padding costs less than another call


@dataclass(slots=True)
class _Decodes:
    rows: Tensor | slice
    blocks: Tensor  # [batch * width]
    lengths: Tensor  # [batch]
    batch: int
    width: int  # blocks of the longest


@dataclass(slots=True)
class _Chunk:
    rows: slice
    blocks: Tensor
    start: int
    end: int


class AttentionPlan:
    """Where the KV of a batch's tokens is written and what each token sees; the same for all layers of a segment."""

    def __init__(self, pieces: Sequence[BatchPiece], block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        batch = Batch.of(pieces)
        positions, slots = _positions_and_slots(batch, block_size)
        self.tokens = len(positions)
        self.max_position = int(positions.max())
        self.positions = upload(positions, device)
        self.slots = upload(slots, device)
        rows = np.cumsum(batch.counts) - batch.counts  # the first one of each Span
        self._chunks = [self._chunk(int(rows[i]), batch, i) for i in np.flatnonzero(batch.counts > 1).tolist()]
        self._decodes = [self._bucket(members, rows, batch) for members in _buckets(batch, block_size)]

    def attend(self, q: Tensor, kv: Tensor, window: int | None) -> Tensor:
        """q [T, heads, head_dim] over kv [slots, 2, kv_heads, head_dim] -> [T, heads * head_dim]"""
        tokens, heads, head_dim = q.shape
        if len(self._decodes) == 1 and not self._chunks:
            return self._decode(0, self._decodes[0], q, kv, window).reshape(tokens, heads * head_dim)
        out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
        for number, decodes in enumerate(self._decodes):
            out[decodes.rows] = self._decode(number, decodes, q[decodes.rows], kv, window)
        for number, chunk in enumerate(self._chunks):
            out[chunk.rows] = self._prefill(-1 - number, chunk, q[chunk.rows], kv, window)
        return out.view(tokens, heads * head_dim)

    def _decode(self, number: int, decodes: _Decodes, q: Tensor, kv: Tensor, window: int | None) -> Tensor:
        batch, heads, head_dim = q.shape
        keys, values = self._gather(kv, decodes.blocks, batch)  # [B, kv_heads, L, head_dim]
        group = q.view(batch, keys.shape[1], -1, head_dim)  # grouped heads become query positions: no copy of keys
        if (number, window) not in self._masks:
            self._masks[number, window] = self._decode_mask(decodes, window)
        mask = self._masks[number, window]
        return F.scaled_dot_product_attention(group, keys, values, attn_mask=mask).reshape(batch, heads, head_dim)

    def _prefill(self, number: int, chunk: _Chunk, q: Tensor, kv: Tensor, window: int | None) -> Tensor:
        keys, values = self._gather(kv, chunk.blocks, 1)
        keys, values = keys[:, :, : chunk.end], values[:, :, : chunk.end]
        query = q.transpose(0, 1).unsqueeze(0)  # [1, heads, n, head_dim]
        if chunk.start == 0 and (window is None or window >= chunk.end):
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            if (number, window) not in self._masks:
                self._masks[number, window] = self._chunk_mask(chunk, window)
            mask = self._masks[number, window]
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def _gather(self, kv: Tensor, blocks: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        _, _, heads, head_dim = kv.shape
        found = kv.view(-1, self._block_size * 2 * heads * head_dim).index_select(0, blocks)
        found = found.view(batch, -1, 2, heads, head_dim)
        return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)

    def _decode_mask(self, decodes: _Decodes, window: int | None) -> Tensor | None:
        length = decodes.width * self._block_size
        seen = torch.arange(length, device=self._device).unsqueeze(0)
        hidden = seen >= decodes.lengths.unsqueeze(1)
        if window is not None:
            hidden |= seen < decodes.lengths.unsqueeze(1) - window
        return self._additive(hidden).view(decodes.batch, 1, 1, length)

    def _chunk_mask(self, chunk: _Chunk, window: int | None) -> Tensor:
        rows = torch.arange(chunk.start, chunk.end, device=self._device).unsqueeze(1)
        seen = torch.arange(chunk.end, device=self._device).unsqueeze(0)
        hidden = seen > rows
        if window is not None:
            hidden |= seen <= rows - window
        return self._additive(hidden)

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))

    def _chunk(self, row: int, batch: Batch, number: int) -> _Chunk:
        start, n = int(batch.starts[number]), int(batch.counts[number])
        held = -(-(start + n) // self._block_size)
        blocks = upload(batch.tables[number, :held], self._device)
        return _Chunk(slice(row, row + n), blocks, start, start + n)

    def _bucket(self, members: np.ndarray, first_rows: np.ndarray, batch: Batch) -> _Decodes:
        starts, rows = batch.starts[members], first_rows[members]
        width = int(starts.max()) // self._block_size + 1
        together = rows[-1] - rows[0] == len(rows) - 1
        return _Decodes(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if together else upload(rows, self._device),
            blocks=upload(batch.tables[members, :width].reshape(-1), self._device),
            lengths=upload(starts + 1, self._device),
            batch=len(members),
            width=width,
        )


def _positions_and_slots(batch: Batch, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    starts, counts = batch.starts, batch.counts
    piece = np.arange(len(starts))
    positions = starts
    if (counts != 1).any():
        piece = np.repeat(piece, counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)  # rows of earlier Spans
        positions = starts[piece] + np.arange(len(piece)) - before
    block, offset = np.divmod(positions, block_size)
    return positions.copy(), batch.tables[piece, block] * block_size + offset


def _buckets(batch: Batch, block_size: int) -> list[np.ndarray]:
    """Group decodes by length: within a bucket the longest is at most twice as long as the shortest."""
    singles = np.flatnonzero(batch.counts == 1)
    widths = np.maximum(batch.starts[singles] // block_size + 1, SMALL_BUCKET)
    doublings = np.searchsorted(_POWERS_OF_TWO, widths)
    return [singles[doublings == size] for size in np.unique(doublings)]


_POWERS_OF_TWO = 1 << np.arange(40)
