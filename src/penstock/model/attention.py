"""Attention over paged KV for a ragged batch, planned once per batch and then run once per layer.

A layer's KV is one tensor [slots, 2, kv_heads, head_dim]; slot = block * block_size + offset. Decodes (one token) are
gathered and run in one padded call per length bucket, and what was gathered is kept for the next step; each longer Span
has a call of its own, because padding a chunk together with single tokens wastes most of the work.
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
SLACK = 64  # tokens by which what was gathered may grow before it is gathered again


class Piece(NamedTuple):
    """One Span as the tensors see it: `n` rows of the batch, at these positions, over these blocks."""

    start_pos: int
    n: int
    table: Sequence[int]


@dataclass(slots=True)
class Gathered:
    """The KV of a bucket of decodes laid out densely, one tensor per layer [batch, capacity, 2, kv_heads, head_dim].

    Kept from one step to the next: while the same sequences go on, a step adds one token to each instead of gathering all.
    """

    tables: list[Sequence[int]]  # whose KV it is: the very lists, not lists like them
    lengths: list[int]  # how many tokens of each are in here
    capacity: int
    layers: list[Tensor]

    def continues(self, members: list[tuple[int, Piece]]) -> bool:
        return (
            len(members) == len(self.tables)
            and all(piece.table is table for (_, piece), table in zip(members, self.tables, strict=True))
            and all(piece.start_pos == length for (_, piece), length in zip(members, self.lengths, strict=True))
            and max(self.lengths) < self.capacity
        )


@dataclass(slots=True)
class _Decodes:
    rows: Tensor | slice
    lengths: Tensor  # [batch]
    batch: int
    length: int  # of the longest, in whole blocks
    blocks: Tensor | None  # [batch * capacity in blocks]: what to gather
    gathered: Gathered | None  # where to keep it, or where it was kept
    places: Tensor | None  # [batch]: where the new tokens go in what was kept


@dataclass(slots=True)
class _Chunk:
    rows: slice
    blocks: Tensor
    start: int
    end: int


class PagedAttention:
    """The attention of one segment: makes a plan for each batch, and keeps what the last one gathered."""

    def __init__(self, block_size: int, max_kept: int, dtype: torch.dtype, device: torch.device) -> None:
        self.block_size, self.dtype, self.device = block_size, dtype, device
        self._max_kept = max_kept  # tokens; larger batches are gathered at each step
        self._kept: list[Gathered] = []

    def plan(self, pieces: Sequence[Piece]) -> AttentionPlan:
        kept, self._kept = self._kept, []  # a pass that fails in the middle leaves nothing behind
        return AttentionPlan(self, pieces, kept)

    def keep(self, plan: AttentionPlan) -> None:
        """The plan's pass is over: what it gathered is whole."""
        self._kept = [decodes.gathered for decodes in plan.decodes if decodes.gathered is not None]

    def worth_keeping(self, tokens: int) -> bool:
        return tokens <= self._max_kept


class AttentionPlan:
    """Where a batch's tokens are written and what each of them sees; the same for all layers of a segment."""

    def __init__(self, attention: PagedAttention, pieces: Sequence[Piece], kept: list[Gathered]) -> None:
        self._attention, self._kept = attention, kept
        self._block_size, self._dtype, self._device = attention.block_size, attention.dtype, attention.device
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        positions, slots = _positions_and_slots(pieces, self._block_size)
        self.up_to = int(positions.max()) + 1
        self.positions = torch.from_numpy(positions).to(self._device)
        self.slots = torch.from_numpy(slots).to(self._device)
        singles: list[tuple[int, Piece]] = []
        self._chunks: list[_Chunk] = []
        row = 0
        for piece in pieces:
            if piece.n == 1:
                singles.append((row, piece))
            else:
                self._chunks.append(self._chunk(row, piece))
            row += piece.n
        self.decodes = [self._bucket(members) for members in _buckets(singles, self._block_size)]

    def attend(self, layer: int, q: Tensor, new: Tensor, kv: Tensor, window: int | None) -> Tensor:
        """q [T, heads, head_dim] over kv [slots, 2, kv_heads, head_dim] -> [T, heads * head_dim]

        `new` [T, 2 * kv_heads * head_dim] are the keys and values of these tokens, already in kv; `layer` counts from 0 in
        the segment.
        """
        tokens, heads, head_dim = q.shape
        if len(self.decodes) == 1 and not self._chunks:
            return self._decode(layer, 0, q, new, kv, window).reshape(tokens, heads * head_dim)
        out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
        for number, decodes in enumerate(self.decodes):
            out[decodes.rows] = self._decode(layer, number, q[decodes.rows], new[decodes.rows], kv, window)
        for number, chunk in enumerate(self._chunks):
            out[chunk.rows] = self._prefill(-1 - number, chunk, q[chunk.rows], kv, window)
        return out.view(tokens, heads * head_dim)

    def _decode(self, layer: int, number: int, q: Tensor, new: Tensor, kv: Tensor, window: int | None) -> Tensor:
        batch, heads, head_dim = q.shape
        decodes = self.decodes[number]
        dense = self._dense(layer, decodes, new, kv)[:, : decodes.length]
        keys, values = dense[:, :, 0].transpose(1, 2), dense[:, :, 1].transpose(1, 2)  # [B, kv_heads, L, head_dim]
        group = q.view(batch, keys.shape[1], -1, head_dim)  # grouped heads become query positions: no copy of keys
        if (number, window) not in self._masks:
            self._masks[number, window] = self._decode_mask(decodes, window)
        mask = self._masks[number, window]
        return F.scaled_dot_product_attention(group, keys, values, attn_mask=mask).reshape(batch, heads, head_dim)

    def _dense(self, layer: int, decodes: _Decodes, new: Tensor, kv: Tensor) -> Tensor:
        """The bucket's KV in this layer: what was kept with the new tokens added, or gathered now."""
        if decodes.blocks is None:
            assert decodes.gathered is not None and decodes.places is not None
            dense = decodes.gathered.layers[layer]
            dense.view(-1, new.shape[1]).index_copy_(0, decodes.places, new)
            return dense
        dense = self._gather(kv, decodes.blocks, decodes.batch)
        if decodes.gathered is not None:
            decodes.gathered.layers.append(dense)
        return dense

    def _prefill(self, number: int, chunk: _Chunk, q: Tensor, kv: Tensor, window: int | None) -> Tensor:
        found = self._gather(kv, chunk.blocks, 1)[:, : chunk.end]
        keys, values = found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)
        query = q.transpose(0, 1).unsqueeze(0)  # [1, heads, n, head_dim]
        if chunk.start == 0 and (window is None or window >= chunk.end):
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            if (number, window) not in self._masks:
                self._masks[number, window] = self._chunk_mask(chunk, window)
            mask = self._masks[number, window]
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def _gather(self, kv: Tensor, blocks: Tensor, batch: int) -> Tensor:
        """[slots, 2, kv_heads, head_dim] -> [batch, tokens, 2, kv_heads, head_dim]"""
        _, _, heads, head_dim = kv.shape
        found = kv.view(-1, self._block_size * 2 * heads * head_dim).index_select(0, blocks)
        return found.view(batch, -1, 2, heads, head_dim)

    def _decode_mask(self, decodes: _Decodes, window: int | None) -> Tensor:
        seen = torch.arange(decodes.length, device=self._device).unsqueeze(0)
        hidden = seen >= decodes.lengths.unsqueeze(1)
        if window is not None:
            hidden |= seen < decodes.lengths.unsqueeze(1) - window
        return self._additive(hidden).view(decodes.batch, 1, 1, decodes.length)

    def _chunk_mask(self, chunk: _Chunk, window: int | None) -> Tensor:
        rows = torch.arange(chunk.start, chunk.end, device=self._device).unsqueeze(1)
        seen = torch.arange(chunk.end, device=self._device).unsqueeze(0)
        hidden = seen > rows
        if window is not None:
            hidden |= seen <= rows - window
        return self._additive(hidden)

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))

    def _chunk(self, row: int, piece: Piece) -> _Chunk:
        end = piece.start_pos + piece.n
        blocks = torch.tensor(piece.table[: -(-end // self._block_size)], dtype=torch.int64, device=self._device)
        return _Chunk(slice(row, row + piece.n), blocks, piece.start_pos, end)

    def _bucket(self, members: list[tuple[int, Piece]]) -> _Decodes:
        rows = [row for row, _ in members]
        lengths = [piece.start_pos + 1 for _, piece in members]
        width = -(-max(lengths) // self._block_size)
        together = rows[-1] - rows[0] == len(rows) - 1
        decodes = _Decodes(
            rows=slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=self._device),
            lengths=torch.tensor(lengths, device=self._device),
            batch=len(members),
            length=width * self._block_size,
            blocks=None,
            gathered=next((found for found in self._kept if found.continues(members)), None),
            places=None,
        )
        if decodes.gathered is not None:
            capacity = decodes.gathered.capacity
            places = [i * capacity + piece.start_pos for i, (_, piece) in enumerate(members)]
            decodes.places = torch.tensor(places, device=self._device)
            decodes.length = min(decodes.length, capacity)
            decodes.gathered.lengths = lengths
            return decodes
        capacity = width * self._block_size + SLACK
        if self._attention.worth_keeping(len(members) * capacity):
            decodes.gathered = Gathered([piece.table for _, piece in members], lengths, capacity, [])
            width = -(-capacity // self._block_size)
            decodes.gathered.capacity = width * self._block_size
        decodes.blocks = self._padded_blocks(members, width)
        return decodes

    def _padded_blocks(self, members: list[tuple[int, Piece]], width: int) -> Tensor:
        blocks = np.full((len(members), width), NULL_BLOCK, dtype=np.int64)
        for i, (_, piece) in enumerate(members):
            held = piece.start_pos // self._block_size + 1
            blocks[i, :held] = piece.table[:held]
        return torch.from_numpy(blocks.reshape(-1)).to(self._device)


def _positions_and_slots(pieces: Sequence[Piece], block_size: int) -> tuple[np.ndarray, np.ndarray]:
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


def _buckets(singles: list[tuple[int, Piece]], block_size: int) -> list[list[tuple[int, Piece]]]:
    """Decodes of similar length together: within a bucket the longest is at most twice the shortest."""
    if not singles:
        return []
    by_width: dict[int, list[tuple[int, Piece]]] = {}
    for member in singles:
        width = max(member[1].start_pos // block_size + 1, SMALL_BUCKET)
        by_width.setdefault((width - 1).bit_length(), []).append(member)
    return list(by_width.values())
