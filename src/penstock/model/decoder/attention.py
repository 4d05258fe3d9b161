"""Attention over paged KV for a ragged batch, planned once per batch and then run once per layer.

A layer's KV is one tensor [slots, 2, kv_heads, head_dim]; slot = block * block_size + offset. Decodes (one token) are
gathered and run in one padded call per length bucket; each longer Span gets its own call, because padding a chunk together
with single tokens wastes most of the work. Layers with a sliding window gather only the blocks that it touches, and those of
different groups (WindowGroups) find them in different columns of a Span's table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.batch import Batch, BatchPiece
from penstock.model.transfer import upload

SMALL_BUCKET = 8  # blocks; below this, padding costs less than another call


@dataclass(slots=True)
class _Decodes:
    """lengths: tokens from the start of the first gathered block on."""

    rows: Tensor | slice
    blocks: Mapping[int, Tensor]  # of each group, [batch * width]
    lengths: Tensor  # [batch]
    batch: int
    width: int  # blocks of the longest
    mask: Tensor | None = None


@dataclass(slots=True)
class _Chunk:
    """first: position of the first token that is gathered."""

    rows: slice
    blocks: Mapping[int, Tensor]  # of each group
    first: int
    start: int
    end: int
    mask: Tensor | None = None


class AttentionPlan:
    """Where the KV of a batch's tokens is written and what each token sees, for all layers of a segment.

    windows: of each group of the model's layers; None for layers that see all of a text.
    groups: those of the layers that are run; all by default.
    slots: of each of these groups, where the tokens are written.
    """

    def __init__(
        self,
        pieces: Sequence[BatchPiece],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] = (None,),
        groups: Collection[int] | None = None,
    ) -> None:
        batch = Batch.of(pieces)
        piece, positions = _pieces_and_positions(batch)
        self.tokens = len(positions)
        self.max_position = int(positions.max())
        self.positions = upload(positions, device)
        row, offset = np.divmod(positions, block_size)
        self.slots: dict[int, Tensor] = {}
        seen: dict[int | None, dict[int, np.ndarray]] = {}  # by window: the tables of its groups
        for group in range(len(windows)) if groups is None else groups:
            table = batch.tables[:, group :: len(windows)]
            self.slots[group] = upload(table[piece, row].astype(np.int64) * block_size + offset, device)
            seen.setdefault(self._effective(windows[group]), {})[group] = table
        self._views: dict[int, _WindowView] = {}
        for window, tables in seen.items():
            view = _WindowView(batch, tables, window, block_size, dtype, device)
            self._views |= dict.fromkeys(tables, view)

    def attend(self, q: Tensor, kv: Tensor, group: int = 0) -> Tensor:
        """q [T, heads, head_dim] over kv [slots, 2, kv_heads, head_dim] -> [T, heads * head_dim]"""
        return self._views[group].attend(q, kv, group)

    def _effective(self, window: int | None) -> int | None:
        return None if window is None or window > self.max_position else window


class _WindowView:
    """What each token of a batch sees in layers with one window."""

    def __init__(
        self,
        batch: Batch,
        tables: Mapping[int, np.ndarray],
        window: int | None,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """tables: of each group that has this window."""
        self._tables = tables
        self._window = window
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        rows = np.cumsum(batch.counts) - batch.counts  # the first one of each Span
        first = np.zeros_like(batch.starts)  # block that a Span sees
        if window is not None:
            first = np.maximum(batch.starts + 1 - window, 0) // block_size
        widths = (batch.starts + batch.counts - 1) // block_size + 1 - first
        self._chunks = [self._chunk(rows, first, batch, i) for i in np.flatnonzero(batch.counts > 1).tolist()]
        self._decodes = [self._bucket(members, rows, first, widths, batch) for members in _buckets(batch, widths)]

    def attend(self, q: Tensor, kv: Tensor, group: int) -> Tensor:
        tokens, heads, head_dim = q.shape
        if len(self._decodes) == 1 and not self._chunks:
            return self._decode(self._decodes[0], q, kv, group).reshape(tokens, heads * head_dim)
        out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
        for decodes in self._decodes:
            out[decodes.rows] = self._decode(decodes, q[decodes.rows], kv, group)
        for chunk in self._chunks:
            out[chunk.rows] = self._prefill(chunk, q[chunk.rows], kv, group)
        return out.view(tokens, heads * head_dim)

    def _decode(self, decodes: _Decodes, q: Tensor, kv: Tensor, group: int) -> Tensor:
        batch, heads, head_dim = q.shape
        keys, values = self._gather(kv, decodes.blocks[group], batch)  # [B, kv_heads, L, head_dim]
        grouped = q.view(batch, keys.shape[1], -1, head_dim)  # grouped heads become query positions: no copy of keys
        if decodes.mask is None:
            decodes.mask = self._decode_mask(decodes)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=decodes.mask).reshape(batch, heads, head_dim)

    def _prefill(self, chunk: _Chunk, q: Tensor, kv: Tensor, group: int) -> Tensor:
        keys, values = self._gather(kv, chunk.blocks[group], 1)
        seen = chunk.end - chunk.first
        keys, values = keys[:, :, :seen], values[:, :, :seen]
        query = q.transpose(0, 1).unsqueeze(0)  # [1, heads, n, head_dim]
        if chunk.start == 0 and (self._window is None or self._window >= chunk.end):
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
        else:
            if chunk.mask is None:
                chunk.mask = self._chunk_mask(chunk)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=chunk.mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    def _gather(self, kv: Tensor, blocks: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        _, _, heads, head_dim = kv.shape
        found = kv.view(-1, self._block_size * 2 * heads * head_dim).index_select(0, blocks)
        found = found.view(batch, -1, 2, heads, head_dim)
        return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)

    def _decode_mask(self, decodes: _Decodes) -> Tensor:
        length = decodes.width * self._block_size
        seen = torch.arange(length, device=self._device).unsqueeze(0)
        hidden = seen >= decodes.lengths.unsqueeze(1)
        if self._window is not None:
            hidden |= seen < decodes.lengths.unsqueeze(1) - self._window
        return self._additive(hidden).view(decodes.batch, 1, 1, length)

    def _chunk_mask(self, chunk: _Chunk) -> Tensor:
        rows = torch.arange(chunk.start, chunk.end, device=self._device).unsqueeze(1)
        seen = torch.arange(chunk.first, chunk.end, device=self._device).unsqueeze(0)
        hidden = seen > rows
        if self._window is not None:
            hidden |= seen <= rows - self._window
        return self._additive(hidden)

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))

    def _chunk(self, rows: np.ndarray, first: np.ndarray, batch: Batch, number: int) -> _Chunk:
        row, begin = int(rows[number]), int(first[number])
        start, n = int(batch.starts[number]), int(batch.counts[number])
        held = -(-(start + n) // self._block_size)
        blocks = {group: upload(table[number, begin:held], self._device) for group, table in self._tables.items()}
        return _Chunk(slice(row, row + n), blocks, begin * self._block_size, start, start + n)

    def _bucket(
        self, members: np.ndarray, first_rows: np.ndarray, first: np.ndarray, widths: np.ndarray, batch: Batch
    ) -> _Decodes:
        rows, begin, width = first_rows[members], first[members], int(widths[members].max())
        together = rows[-1] - rows[0] == len(rows) - 1

        def seen(table: np.ndarray) -> np.ndarray:
            if begin.any():
                columns = np.minimum(begin[:, None] + np.arange(width), table.shape[1] - 1)  # what is too much is masked
                return np.take_along_axis(table[members], columns, 1)
            if len(members) == len(batch):
                return table[:, :width].copy()  # the next step changes the tables in place
            return table[members, :width]

        return _Decodes(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if together else upload(rows, self._device),
            blocks={group: upload(seen(table).reshape(-1), self._device) for group, table in self._tables.items()},
            lengths=upload(batch.starts[members] + 1 - begin * self._block_size, self._device),
            batch=len(members),
            width=width,
        )


def _pieces_and_positions(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Of each token: the number of its Span, and its position."""
    starts, counts = batch.starts, batch.counts
    piece = np.arange(len(starts))
    positions = starts
    if (counts != 1).any():
        piece = np.repeat(piece, counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)  # rows of earlier Spans
        positions = starts[piece] + np.arange(len(piece)) - before
    return piece, positions.copy()


def _buckets(batch: Batch, widths: np.ndarray) -> list[np.ndarray]:
    """Group decodes by the blocks that they see: within a bucket the most are at most twice the least."""
    singles = np.flatnonzero(batch.counts == 1)
    doublings = np.searchsorted(_POWERS_OF_TWO, np.maximum(widths[singles], SMALL_BUCKET))
    return [singles[doublings == size] for size in np.unique(doublings)]


_POWERS_OF_TWO = 1 << np.arange(40)
