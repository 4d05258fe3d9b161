"""A model that only takes time: layers and ends without weights, and hidden states without numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.domain.hidden_format import HiddenFormat, row_bytes
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.model.batch import BatchPiece
from penstock.model.sampling.picker import Picker
from penstock.model.sampling.sample_row import SampleRow
from penstock.pipes.pipe import Pipe

TOKEN = 1  # the only token that such a model generates
VOCABULARY = 2


class HollowHidden:
    """Rows of hidden states that have a size but no numbers; stands for the tensor and for its bytes on the wire."""

    __slots__ = ("dtype", "rows", "width")

    def __init__(self, rows: int, width: int, dtype: HiddenFormat) -> None:
        self.rows = rows
        self.width = width
        self.dtype = dtype  # the format on the wire

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.width

    @property
    def packed_bytes(self) -> int:
        return self.rows * row_bytes(self.dtype, self.width)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, rows: slice | Sequence[int]) -> HollowHidden:
        count = len(range(self.rows)[rows]) if isinstance(rows, slice) else len(rows)
        return self if count == self.rows else HollowHidden(count, self.width, self.dtype)

    def sum(self) -> HollowHidden:
        return self

    def item(self) -> float:
        """Stands for `sum().item()`: a finite value."""
        return 0.0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> HollowHidden:
        assert function is torch.cat, function
        parts = args[0]
        return cls(sum(part.rows for part in parts), parts[0].width, parts[0].dtype)


class HollowSegment:
    """A segment without weights. `spend` is called with the number of tokens and layers of each pass."""

    device = torch.device("cpu")

    def __init__(self, layers: LayerRange, kv_blocks: int, spend: Callable[[int, int], None]) -> None:
        self.layers = layers
        self.kv_blocks = kv_blocks
        self.weight_hash = ""
        self._spend = spend

    def process(self, hidden: Any, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Any:
        self._spend(len(hidden), (layers or self.layers).size)
        return hidden

    def wipe(self, piece: BatchPiece) -> None: ...


class HollowEnds:
    """Ends without weights. `spend` is called with the number of rows that get a token."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, width: int, dtype: HiddenFormat, spend: Callable[[int], None]) -> None:
        self._width = width
        self._dtype = dtype
        self._spend = spend
        self._logits: dict[int, Tensor] = {}  # by number of rows
        self.picker: Picker | None = HollowPicker()

    def decoder(self, segments: object) -> None:
        return None

    def compute_embed(self, token_ids: Sequence[int]) -> Any:
        return HollowHidden(len(token_ids), self._width, self._dtype)

    def compute_norm(self, hidden: Any) -> Any:
        return hidden

    def compute_head(self, normed: Any) -> Tensor:
        rows = len(normed)
        self._spend(rows)
        found = self._logits.get(rows)
        if found is None:
            found = self._logits[rows] = torch.empty(rows, VOCABULARY)
        return found


class HollowPicker:
    """Chooses the only token there is, without reading the logits."""

    adjusts = True

    def __init__(self) -> None:
        self._tokens: dict[int, Tensor] = {}  # by number of rows

    def pick(self, logits: Tensor, rows: Sequence[SampleRow], ahead: int) -> Tensor:
        found = self._tokens.get(len(rows))
        if found is None:
            found = self._tokens[len(rows)] = torch.full((len(rows),), TOKEN)
        return found


class HollowText:
    """A text stream whose tokens have no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class HollowPipe(Pipe):
    """A pipe that sends hollow hidden states without packing them."""

    def send_job(self, node: str, job: NetworkJob) -> None:
        if isinstance(job.hidden, HollowHidden):
            self._send(node, job)
        else:
            super().send_job(node, job)
