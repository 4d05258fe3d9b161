"""StepGraphs: decode steps as CUDA graphs, one for each padded number of rows, captured when they are needed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.domain.blocks import NULL_BLOCK
from penstock.model.batch import Batch
from penstock.model.triton.columns import PassColumns, choose_splits, positions_and_slots

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MAX_ROWS = SIZES[-1]
MAX_ENTRIES = 1 << 20  # of the block tables of a step; longer ones are computed without a graph
MAX_GRAPHS = 40  # that are kept: each takes some megabytes on the card

logger = logging.getLogger("penstock.memory")

Body = Callable[["StepInputs", PassColumns, int], Tensor]


class StepInputs:
    """The inputs of captured steps, always at the same place on the card: filled by one copy for each step.

    ids: [rows], the tokens to embed; those that a step has chosen are written here for the next one.
    hidden: [rows, hidden] in fp32, of a segment that is not the first.
    """

    def __init__(self, device: torch.device, kv_heads: int, block_size: int, *, groups: int = 1, hidden: int = 0) -> None:
        self._device = device
        self._groups = groups
        self._kv_heads = kv_heads
        self._block_size = block_size
        self._hidden_size = hidden
        self._ready = False

    def _allocate(self) -> None:
        """At the first step: a segment may never need them."""
        sizes = [MAX_ROWS, MAX_ROWS, MAX_ROWS, self._groups * MAX_ROWS, 1, MAX_ENTRIES]
        self._flat = torch.zeros(sum(sizes), dtype=torch.int32, device=self._device)
        self.ids, self._positions, self._lengths, slots, self._stride, self._tables = torch.split(self._flat, sizes)
        self._slots = slots.view(self._groups, MAX_ROWS)
        self._rows = torch.arange(MAX_ROWS, dtype=torch.int32, device=self._device)
        self.hidden = torch.zeros(MAX_ROWS, self._hidden_size, device=self._device) if self._hidden_size else torch.empty(0)
        self._ready = True

    def fits(self, batch: Batch) -> bool:
        """Whether this is a step of decodes, and not too large."""
        if len(batch) > MAX_ROWS or (batch.counts != 1).any():
            return False
        return _padded(len(batch)) * (int(batch.starts.max()) // self._block_size + 1) * self._groups <= MAX_ENTRIES

    def fill(self, batch: Batch, ids: Sequence[int] | None) -> tuple[int, int]:
        """Upload a step's columns; returns its padded number of rows, and its splits.

        ids: None to leave those that are there.
        """
        if not self._ready:
            self._allocate()
        count, size, groups = len(batch), self._block_size, self._groups
        rows = _padded(count)
        longest = int(batch.starts.max()) + 1
        width = -(-longest // size) * groups
        fixed = (3 + groups) * MAX_ROWS
        host = torch.empty(fixed + 1 + rows * width, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        flat = host.numpy()
        columns = flat[:fixed].reshape(3 + groups, MAX_ROWS)
        if ids is not None:
            columns[0, :count], columns[0, count:rows] = ids, 0
        columns[1, :count], columns[1, count:rows] = batch.starts, 0
        columns[2, :count], columns[2, count:rows] = batch.starts + 1, 0
        columns[3:, :count], columns[3:, count:rows] = positions_and_slots(batch, size, groups)[1], -1
        flat[fixed] = width
        tables = flat[fixed + 1 :].reshape(rows, width)
        tables[:count], tables[count:] = batch.tables[:, :width], NULL_BLOCK
        begin = MAX_ROWS if ids is None else 0
        self._flat[begin : len(host)].copy_(host[begin:], non_blocking=True)
        return rows, choose_splits(rows, longest, self._kv_heads)

    def columns(self, rows: int, splits: int) -> PassColumns:
        return PassColumns(
            positions=self._positions[:rows],
            slots=self._slots[:, :rows],
            rows=self._rows[:rows],
            lengths=self._lengths[:rows],
            tiles=self._rows[:0].view(0, 4),
            whole_tiles=self._rows[:0].view(0, 4),
            tables=self._tables,
            stride=self._stride,
            splits=splits,
            groups=self._groups,
        )


class StepGraphs:
    """Computes steps by replaying them. It does not keep what it computes them with: that would keep its memory on the card."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self._graphs: OrderedDict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self.capturing = True  # False computes every step without a graph

    def run(self, body: Body, batch: Batch, *, ids: Sequence[int] | None = None, hidden: Tensor | None = None) -> Tensor:
        """Compute a step, and return the rows of the batch: they lie where the next step will write.

        body: computes a step from its inputs, always the same way; what it returns lies at the same place after every step of
            that size.
        """
        count = len(batch)
        key = self.inputs.fill(batch, ids)
        if hidden is not None:
            self.inputs.hidden[:count].copy_(hidden)
        return self._step(body, *key)[:count]

    def _step(self, body: Body, rows: int, splits: int) -> Tensor:
        key = rows, splits
        found = self._graphs.get(key)
        if found is None:
            if key not in self._seen or not self.capturing:
                self._seen.add(key)  # its first step is computed without a graph, which compiles what the graph will need
                return body(self.inputs, self.inputs.columns(rows, splits), rows)
            try:
                found = self._graphs[key] = self._capture(body, rows, splits)
            except RuntimeError as error:  # as torch calls a lack of memory, and what a card cannot capture
                logger.warning("steps of %d rows could not be captured, and are computed without a graph: %s", rows, error)
                self.capturing = False  # what is captured stays; other sizes are slower, but need less
            if found is None:
                torch.cuda.empty_cache()
                return self._step(body, rows, splits)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, out = found
        graph.replay()
        return out

    def _capture(self, body: Body, rows: int, splits: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # not `torch.cuda.graph`, which gives the memory of passes without a graph back to the card each time
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may use the card meanwhile
            try:
                out = body(self.inputs, self.inputs.columns(rows, splits), rows)
            finally:
                graph.capture_end()
        return graph, out


def _padded(rows: int) -> int:
    return min(size for size in SIZES if size >= rows)
