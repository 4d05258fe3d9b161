"""StepGraphs: steps as CUDA graphs, of decodes and of short chunks beside them, captured for padded sizes as they are needed."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.domain.blocks import NULL_BLOCK
from penstock.model.batch import Batch
from penstock.model.triton.columns import PassColumns, choose_splits, cut_into_tiles, positions_and_slots

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_DECODES = SIZES[-1]
# Steps with chunks of prompts have few sizes: padding costs next to nothing in attention.
MAX_ROWS = 1024  # for more, the card takes longer than the host
ROWS_APART = 64
DECODES = (0, 16, 64, 256, MAX_DECODES)
MAX_CHUNKS = 16
MAX_ENTRIES = 1 << 20  # of the block tables of a step; longer ones are computed without a graph
MAX_GRAPHS = 40  # that are kept: each takes some megabytes on the card

logger = logging.getLogger("penstock.memory")
_CAPTURING = threading.Lock()  # one thread at a time: waiting for a card breaks off another thread's capture there

Body = Callable[["StepInputs", PassColumns, int], Tensor]


class StepSize(NamedTuple):
    """What a graph is captured for: padded numbers of rows, of Spans with one token and of tiles, and splits."""

    rows: int
    decodes: int
    tiles: int
    splits: int


class StepInputs:
    """The inputs of captured steps, always at the same place on the card: filled by one copy for each step.

    tile: tokens of a tile; 0 for steps of decodes only.
    ids: [rows], the tokens to embed; those that a step has chosen are written here for the next one.
    hidden: [rows, hidden] in fp32, of a segment that is not the first.
    """

    def __init__(
        self, device: torch.device, kv_heads: int, block_size: int, *, groups: int = 1, hidden: int = 0, tile: int = 0
    ) -> None:
        self._device = device
        self._groups = groups
        self._kv_heads = kv_heads
        self._block_size = block_size
        self._hidden_size = hidden
        self._tile = tile
        self._rows = MAX_ROWS if tile else MAX_DECODES
        tiles = MAX_ROWS // tile + MAX_CHUNKS if tile else 0
        # before the tables: ids, positions, slots, rows and lengths of decodes, tiles, the tables' width
        self._sizes = [self._rows, self._rows, groups * self._rows, MAX_DECODES, MAX_DECODES, 4 * tiles, 1]
        *self._begins, self._fixed = accumulate(self._sizes, initial=0)
        self._flat: Tensor | None = None

    def _allocate(self) -> Tensor:
        """At the first step: a segment may never need them."""
        flat = torch.zeros(self._fixed + MAX_ENTRIES, dtype=torch.int32, device=self._device)
        self.ids = flat[: self._rows]
        self.hidden = torch.zeros(self._rows if self._hidden_size else 0, self._hidden_size, device=self._device)
        return flat

    def fits(self, batch: Batch) -> bool:
        """Whether this is a step of decodes, or one with a few short chunks, and not too large."""
        rows, chunks = len(batch), int(np.count_nonzero(batch.counts != 1))
        if chunks:
            rows = int(batch.counts.sum())
            if not self._tile or rows >= MAX_ROWS or chunks > MAX_CHUNKS:
                return False
        decodes = len(batch) - chunks
        if decodes > MAX_DECODES:
            return False
        width = (int((batch.starts + batch.counts).max() - 1) // self._block_size + 1) * self._groups
        return (self._padded(rows, decodes, chunks)[1] + chunks) * width <= MAX_ENTRIES

    def fill(self, batch: Batch, ids: Sequence[int] | None) -> StepSize:
        """Upload a step's columns.

        ids: None to leave those that are there.
        """
        if self._flat is None:
            self._flat = self._allocate()
        size, groups, counts = self._block_size, self._groups, batch.counts
        chunks = np.flatnonzero(counts != 1)
        decodes = np.flatnonzero(counts == 1) if len(chunks) else slice(None)
        singles = len(batch) - len(chunks)
        positions, slots = positions_and_slots(batch, size, groups)
        count = len(positions)
        rows, padded, tiles = self._padded(count, singles, len(chunks))
        width = -(-int((batch.starts + counts).max()) // size) * groups
        host = torch.empty(
            self._fixed + (padded + len(chunks)) * width, dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        flat = host.numpy()
        at_ids, at_positions, at_slots, at_rows, at_lengths, at_tiles, at_width = self._begins
        if ids is not None:
            _put(flat[at_ids:], ids, 0, rows)
        _put(flat[at_positions:], positions, 0, rows)
        by_group = flat[at_slots:at_rows].reshape(groups, -1)
        by_group[:, :count], by_group[:, count:rows] = slots, -1
        first = np.cumsum(counts) - counts
        # those that are added look at nothing; beside chunks, they have no row
        _put(flat[at_rows:], first[decodes], -1 if tiles else np.arange(count, rows), padded)
        lengths = batch.starts[decodes] + 1
        _put(flat[at_lengths:], lengths, 0, padded)
        if tiles:
            made = cut_into_tiles(batch.starts[chunks], counts[chunks], first[chunks], padded, self._tile)
            _put(flat[at_tiles:], made.ravel(), 0, 4 * tiles)
        flat[at_width] = width
        tables = flat[self._fixed :].reshape(-1, width)
        tables[:singles], tables[singles:padded] = batch.tables[decodes, :width], NULL_BLOCK
        if tiles:
            tables[padded:] = batch.tables[chunks, :width]
        begin = self._rows if ids is None else 0
        self._flat[begin : len(host)].copy_(host[begin:], non_blocking=True)
        splits = choose_splits(padded, int(lengths.max()), self._kv_heads) if singles else 1
        return StepSize(rows, padded, tiles, splits)

    def columns(self, step: StepSize) -> PassColumns:
        assert self._flat is not None
        sizes = [*self._sizes, len(self._flat) - self._fixed]
        _, positions, slots, rows, lengths, tiles, stride, tables = torch.split(self._flat, sizes)
        return PassColumns(
            positions=positions[: step.rows],
            slots=slots.view(self._groups, -1)[:, : step.rows],
            rows=rows[: step.decodes],
            lengths=lengths[: step.decodes],
            tiles=tiles[: 4 * step.tiles].view(-1, 4),
            long_tiles=tiles[:0].view(0, 4),
            tables=tables,
            stride=stride,
            splits=step.splits,
            groups=self._groups,
        )

    def _padded(self, rows: int, decodes: int, chunks: int) -> tuple[int, int, int]:
        """The numbers of rows, decodes and tiles of the graph for a step with so many."""
        if not chunks:
            rows = next(size for size in SIZES if size >= rows)
            return rows, rows, 0
        rows = -(-rows // ROWS_APART) * ROWS_APART
        return rows, next(size for size in DECODES if size >= decodes), rows // self._tile + MAX_CHUNKS


def _put(column: np.ndarray, values: Any, padding: Any, size: int) -> None:
    """Write values, and what is to follow them up to this size."""
    column[: len(values)], column[len(values) : size] = values, padding


class StepGraphs:
    """Computes steps by replaying them. It does not keep what it computes them with: that would keep its memory on the card."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self._graphs: OrderedDict[StepSize, tuple[torch.cuda.CUDAGraph, Tensor]] = OrderedDict()
        self._seen: set[StepSize] = set()
        self._pool: Any = None
        self.capturing = True  # False computes every step without a graph

    def run(self, body: Body, batch: Batch, *, ids: Sequence[int] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Compute a step, and return the rows of the batch: they lie where the next step will write.

        body: computes a step from its inputs, always the same way; what it returns lies at the same place after every step of
            that size.
        """
        step = self.inputs.fill(batch, ids)
        count = int(batch.counts.sum())
        if hidden is not None:
            self.inputs.hidden[:count].copy_(hidden)
        return self._step(body, step)[:count]

    def _step(self, body: Body, step: StepSize) -> Tensor:
        found = self._graphs.get(step)
        if found is None:
            if step not in self._seen or not self.capturing:
                self._seen.add(step)  # its first step is computed without a graph, which compiles what the graph will need
                return body(self.inputs, self.inputs.columns(step), step.rows)
            try:
                found = self._graphs[step] = self._capture(body, step)
            except RuntimeError as error:  # what torch raises for a lack of memory, and for what a card cannot capture
                logger.warning("steps of %d rows could not be captured, and are computed without a graph: %s", step.rows, error)
                self.capturing = False  # what is captured stays; other sizes are slower, but need less
            if found is None:
                torch.cuda.empty_cache()
                return self._step(body, step)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(step)
        graph, out = found
        graph.replay()
        return out

    def _capture(self, body: Body, step: StepSize) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # not `torch.cuda.graph`, which gives the memory of passes without a graph back to the card each time
        with _CAPTURING, torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may use the card meanwhile
            try:
                out = body(self.inputs, self.inputs.columns(step), step.rows)
            finally:
                graph.capture_end()
        return graph, out


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all models: cuBLAS keeps memory for every stream that it has been used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
