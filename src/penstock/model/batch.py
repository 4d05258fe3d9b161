"""Batch: the Spans of one pass as columns, as the layers take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from penstock.domain.blocks import NULL_BLOCK


class BatchPiece(NamedTuple):
    """One Span of a batch: its next `n` rows, at positions from `start_pos`, with KV in the blocks of `table`.

    wanted: how many of its last rows matter behind the model's last layer, which may leave the others as they are; None for all.
    """

    start_pos: int
    n: int
    table: Sequence[int]
    wanted: int | None = None


class Batch(Sequence[BatchPiece]):
    """A ragged batch, with an entry of each column for each Span. It can be read as BatchPieces, too.

    starts, counts: the position of a Span's first row, and how many rows it has.
    tables: [spans, width], a Span's blocks: for every `block_size` tokens one of each WindowGroup of the model's layers. They are
        NULL_BLOCK behind its end, and where the layers of the group do not look any more.
    wanted: as in BatchPiece.
    """

    __slots__ = ("counts", "starts", "tables", "wanted")

    def __init__(self, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, wanted: np.ndarray | None = None) -> None:
        self.starts = starts
        self.counts = counts
        self.tables = tables
        self.wanted = counts if wanted is None else wanted

    @classmethod
    def of(cls, pieces: Sequence[BatchPiece]) -> Batch:
        if isinstance(pieces, Batch):
            return pieces
        starts = np.array([piece.start_pos for piece in pieces], dtype=np.int64)
        counts = np.array([piece.n for piece in pieces], dtype=np.int64)
        wanted = np.array([piece.n if piece.wanted is None else piece.wanted for piece in pieces], dtype=np.int64)
        return cls(starts, counts, padded([piece.table for piece in pieces]), wanted)

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> BatchPiece: ...

    @overload
    def __getitem__(self, at: slice) -> Batch: ...

    def __getitem__(self, at: int | slice) -> BatchPiece | Batch:
        if isinstance(at, slice):
            return Batch(self.starts[at], self.counts[at], self.tables[at], self.wanted[at])
        table = np.trim_zeros(self.tables[at], "b").tolist()
        return BatchPiece(int(self.starts[at]), int(self.counts[at]), table, int(self.wanted[at]))

    def __iter__(self) -> Iterator[BatchPiece]:
        return (self[i] for i in range(len(self)))


def padded(tables: Sequence[Sequence[int]], spare: int = 0) -> np.ndarray:
    """Block tables as one array, a row each. spare: columns behind the longest."""
    rows = np.full((len(tables), max(map(len, tables), default=0) + spare), NULL_BLOCK, dtype=np.int32)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return rows
