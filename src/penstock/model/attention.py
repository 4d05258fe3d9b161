"""Attention over paged KV for a ragged batch, planned once per batch and then run once per layer.

A layer's KV is one tensor [slots, 2, kv_heads, head_dim]; slot = block * block_size + offset. Decodes (one token) are
gathered and run in one padded call per length bucket; each longer Span gets its own call, because padding a chunk together
with single tokens wastes most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.domain.blocks import NULL_BLOCK

SMALL_BUCKET = 8  # blocks; below this, padding costs less than another call


class BatchPiece(NamedTuple):
    """One Span of a batch: its next `n` rows, at positions from `start_pos`, with KV in the blocks of `table`."""

    start_pos: int
    n: int
    table: Sequence[int]


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
        positions, slots = _positions_and_slots(pieces, block_size)
        self.tokens = len(positions)
        self.max_position = int(positions.max())
        self.positions = torch.from_numpy(positions).to(device)
        self.slots = torch.from_numpy(slots).to(device)
        singles: list[tuple[int, BatchPiece]] = []
        self._chunks: list[_Chunk] = []
        row = 0
        for piece in pieces:
            if piece.n == 1:
                singles.append((row, piece))
            else:
                self._chunks.append(self._chunk(row, piece))
            row += piece.n
        self._decodes = [self._bucket(members) for members in _buckets(singles, block_size)]

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

    def _chunk(self, row: int, piece: BatchPiece) -> _Chunk:
        end = piece.start_pos + piece.n
        blocks = torch.tensor(piece.table[: -(-end // self._block_size)], dtype=torch.int64, device=self._device)
        return _Chunk(slice(row, row + piece.n), blocks, piece.start_pos, end)

    def _bucket(self, members: list[tuple[int, BatchPiece]]) -> _Decodes:
        width = max(piece.start_pos // self._block_size + 1 for _, piece in members)
        blocks = np.full((len(members), width), NULL_BLOCK, dtype=np.int64)
        for i, (_, piece) in enumerate(members):
            held = piece.start_pos // self._block_size + 1
            blocks[i, :held] = piece.table[:held]
        rows = [row for row, _ in members]
        together = rows[-1] - rows[0] == len(rows) - 1
        return _Decodes(
            rows=slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=self._device),
            blocks=torch.from_numpy(blocks.reshape(-1)).to(self._device),
            lengths=torch.tensor([piece.start_pos + 1 for _, piece in members], device=self._device),
            batch=len(members),
            width=width,
        )


def _positions_and_slots(pieces: Sequence[BatchPiece], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    total = sum(piece.n for piece in pieces)
    positions, slots = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    row = 0
    for start, n, table in pieces:
        if n == 1:
            positions[row] = start
            slots[row] = table[start // block_size] * block_size + start % block_size
        else:
            where = np.arange(start, start + n)
            first = start // block_size
            held = np.asarray(table[first : (start + n - 1) // block_size + 1], dtype=np.int64)
            positions[row : row + n] = where
            slots[row : row + n] = held[where // block_size - first] * block_size + where % block_size
        row += n
    return positions, slots


def _buckets(singles: list[tuple[int, BatchPiece]], block_size: int) -> list[list[tuple[int, BatchPiece]]]:
    """Group decodes by length: within a bucket the longest is at most twice as long as the shortest."""
    if not singles:
        return []
    by_width: dict[int, list[tuple[int, BatchPiece]]] = {}
    for member in singles:
        width = max(member[1].start_pos // block_size + 1, SMALL_BUCKET)
        by_width.setdefault((width - 1).bit_length(), []).append(member)
    return list(by_width.values())
