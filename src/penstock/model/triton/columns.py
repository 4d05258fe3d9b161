"""PassColumns: where the rows of a pass are in their texts and in memory, as the kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.transfer import upload

MAX_SPLITS = 64
ALIGNED = 4  # numbers in int32: 16 bytes


class LongChunk(NamedTuple):
    """A long Span: its first row and its tokens, the position of the first one, and the number of its row of the tables."""

    row: int
    n: int
    start: int
    table: int


class LastRows(NamedTuple):
    """The only rows that are wanted behind the model's last layer, where each Span has one at most: its last one.

    rows, lengths: as in PassColumns, of all Spans.
    picked: [wanted] in int64, the same rows without gaps.
    splits: as in PassColumns.
    """

    rows: Tensor
    lengths: Tensor
    picked: Tensor
    splits: int


class PassColumns(NamedTuple):
    """On the device, in int32.

    positions: [T]
    slots: [groups, T], for the layers of each WindowGroup; a slot of -1 is not written.
    rows, lengths: [decodes], of Spans with one token: its row, and how many positions it sees.
    tiles: [tiles, 4], pieces of longer Spans.
    tables, stride: rows of block tables, those of decodes first, and the width of such a row, [1].
    long, long_tiles: long Spans, and their pieces, which are no `tiles`.
    splits: parts of a text that decodes look at side by side.
    groups: whose blocks lie side by side in the tables.
    last: None where other rows are wanted, too.
    """

    positions: Tensor
    slots: Tensor
    rows: Tensor
    lengths: Tensor
    tiles: Tensor
    tables: Tensor
    stride: Tensor
    long_tiles: Tensor
    long: Sequence[LongChunk] = ()
    splits: int = 1
    groups: int = 1
    last: LastRows | None = None

    def of_part(self, first: int, groups: int) -> PassColumns:
        """The columns for layers whose WindowGroups are these, where several segments have their tables side by side."""
        return self._replace(slots=self.slots[first : first + groups], tables=self.tables[first:])


def side_by_side(batches: Sequence[Batch], groups: int) -> Batch:
    """The batches of several segments with the same Spans as one, whose tables have the blocks of all of them."""
    if len(batches) == 1:
        return batches[0]
    width = min(batch.tables.shape[1] for batch in batches)
    tables = [batch.tables[:, :width].reshape(len(batch), -1, groups) for batch in batches]
    return Batch(batches[0].starts, batches[0].counts, np.concatenate(tables, axis=2).reshape(len(batches[0]), -1))


def upload_columns(
    batch: Batch,
    block_size: int,
    device: torch.device,
    *,
    groups: int = 1,
    tile: int,
    kv_heads: int,
    long_from: int | None,
    anywhere: bool = False,
) -> PassColumns:
    """The columns of any batch, in one copy.

    groups: of layers that have blocks of their own.
    tile: tokens of a tile.
    long_from: tokens that a Span must have to be in `long`; None for no such Spans.
    anywhere: whether Spans in `long` may start in the middle of their text.
    """
    starts, counts = batch.starts, batch.counts
    first = np.cumsum(counts) - counts  # the first row of each Span
    positions, slots = positions_and_slots(batch, block_size, groups)
    single = counts == 1
    decodes, chunks, long = np.flatnonzero(single), np.flatnonzero(~single), np.empty(0, dtype=np.int64)
    if long_from is not None and len(chunks):
        alone = (counts[chunks] >= long_from) & (anywhere | (starts[chunks] == 0))
        chunks, long = chunks[~alone], chunks[alone]
    width = (int(((starts + counts - 1) // block_size).max()) + 1) * groups
    order = np.concatenate((decodes, chunks, long))
    first_long = len(decodes) + len(chunks)
    tables = batch.tables[:, :width] if len(decodes) == len(batch) else batch.tables[order, :width]
    lengths = starts[decodes] + 1
    tiles = cut_into_tiles(starts[chunks], counts[chunks], first[chunks], len(decodes), tile)
    long_tiles = cut_into_tiles(starts[long], counts[long], first[long], first_long, tile)
    wanted = batch.wanted[order] == 1
    last_rows, last_lengths = np.where(wanted, (first + counts - 1)[order], -1), np.where(wanted, (starts + counts)[order], 0)
    picked = last_rows[wanted]
    spare = -len(positions) % ALIGNED
    slots = np.pad(slots, ((0, 0), (0, spare)), constant_values=-1)  # each row of it is a column, too
    parts = [positions, slots, first[decodes], lengths, tiles, long_tiles, np.array([tables.shape[1]]), tables]
    on_device = _upload_aligned([*parts, last_rows, last_lengths, picked], device)
    splits = choose_splits(len(decodes), int(lengths.max()), kv_heads) if len(decodes) else 1
    last = None
    if (batch.wanted <= 1).all() and len(picked) < len(positions):
        last_splits = choose_splits(len(order), max(1, int(last_lengths.max())), kv_heads)
        last = LastRows(on_device[8], on_device[9], on_device[10].long(), last_splits)
    return PassColumns(
        positions=on_device[0],
        slots=on_device[1].view(groups, -1)[:, : len(positions)],
        rows=on_device[2],
        lengths=on_device[3],
        tiles=on_device[4].view(-1, 4),
        long_tiles=on_device[5].view(-1, 4),
        stride=on_device[6],
        tables=on_device[7],
        long=[LongChunk(int(first[i]), int(counts[i]), int(starts[i]), first_long + at) for at, i in enumerate(long)],
        splits=splits,
        groups=groups,
        last=last,
    )


def _upload_aligned(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Columns in int32, in one copy. Each is aligned as Triton's kernels expect: otherwise they would be compiled again."""
    begins = list(accumulate((-(-column.size // ALIGNED) * ALIGNED for column in columns), initial=0))
    host = np.zeros(begins[-1], dtype=np.int32)
    for begin, column in zip(begins, columns, strict=False):
        host[begin : begin + column.size] = column.ravel()
    flat = upload(host, device)
    return [flat[begin : begin + column.size] for begin, column in zip(begins, columns, strict=False)]


def positions_and_slots(batch: Batch, block_size: int, groups: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Of every row of a batch: [T], and [groups, T]."""
    starts, counts = batch.starts, batch.counts
    piece, positions = np.arange(len(starts)), starts
    if (counts != 1).any():
        piece = np.repeat(piece, counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)  # rows of earlier Spans
        positions = starts[piece] + np.arange(len(piece)) - before
    block, offset = np.divmod(positions, block_size)
    blocks = batch.tables[piece, block * groups + np.arange(groups)[:, None]]
    return positions, blocks.astype(np.int64) * block_size + offset


def choose_splits(spans: int, longest: int, kv_heads: int) -> int:
    """Into how many parts decodes cut the texts: enough to keep a GPU busy, and none so short that joining them costs more.

    One of few numbers, since a captured step has a fixed one.
    """
    busy = -(-512 // (spans * kv_heads))  # programs, some for each multiprocessor
    wanted = min(max(busy, -(-longest // 4096)), -(-longest // 256))
    return next(splits for splits in (1, 4, 16, MAX_SPLITS) if splits >= wanted or splits == MAX_SPLITS)


def cut_into_tiles(starts: np.ndarray, counts: np.ndarray, rows: np.ndarray, first_table: int, tile: int) -> np.ndarray:
    """Cut chunks into tiles: (table, first row, first position, tokens) each."""
    pieces = -(-counts // tile)
    chunk = np.repeat(np.arange(len(counts)), pieces)
    offset = (np.arange(len(chunk)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tile
    size = np.minimum(counts[chunk] - offset, tile)
    # the longest look-back first, so that the last programs to start are short
    found = np.stack((chunk + first_table, rows[chunk] + offset, starts[chunk] + offset, size), axis=1)
    return found[np.argsort(-found[:, 2], kind="stable")]
