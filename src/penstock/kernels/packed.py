"""Packed weights: matrices in the layouts that the native kernels read, and a model made of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.library import Floats, Ints, KernelsError, check, floats, ints, require
from penstock.kernels.structs import (
    Activation,
    ExpertsStruct,
    Kind,
    LayerStruct,
    MatrixStruct,
    MlpStruct,
    ModelStruct,
    RopeStruct,
    SourceType,
)

ALIGNMENT = 64


def natural_kind(source: SourceType) -> Kind:
    """The layout that keeps the values of a source: GGUF's codes as they are, other numbers in their own precision."""
    return Kind(require().ps_natural_kind(source))


def packed_bytes(kind: Kind, rows: int, cols: int) -> int:
    return int(require().ps_packed_bytes(kind, rows, cols))


def aligned_empty(size: int) -> NDArray[np.uint8]:
    whole = np.zeros(size + ALIGNMENT, np.uint8)
    skip = -whole.ctypes.data % ALIGNMENT
    return whole[skip : skip + size]


class PackedMatrix:
    """A weight matrix [rows, cols] in a packed layout. `data` may be memory that is mapped from a file."""

    def __init__(
        self,
        kind: Kind,
        rows: int,
        cols: int,
        *,
        data: NDArray[np.uint8] | None = None,
        bias: Floats | None = None,
    ) -> None:
        size = packed_bytes(kind, rows, cols)
        if size == 0:
            raise KernelsError(f"A matrix of {rows} x {cols} cannot be packed.")
        self.data = aligned_empty(size) if data is None else data
        if self.data.nbytes != size or self.data.ctypes.data % ALIGNMENT:
            raise KernelsError(f"Packed weights of {rows} x {cols} take {size} aligned bytes; there are {self.data.nbytes}.")
        self.bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self.struct = MatrixStruct(kind, rows, cols, self.data.ctypes.data, None if self.bias is None else floats(self.bias))
        self.struct.owner = (self.data, self.bias)

    def pack(self, source: SourceType, values: NDArray[Any], row: int = 0, order: Ints | None = None) -> None:
        """Write source rows from `row` on. `values` has one source row in each row: numbers, or GGUF blocks as bytes.

        order: the source row for each row that is written.
        """
        values = np.ascontiguousarray(values)
        if order is not None and (order.min() < 0 or order.max() >= len(values)):
            raise KernelsError(f"The order of rows names row {order.max()} of {len(values)}.")
        count = len(values) if order is None else len(order)
        expected = self._row_bytes(source)
        if values.nbytes != expected * len(values):
            raise KernelsError(
                f"A row of {source.name} takes {expected} bytes; there are {values.nbytes // max(len(values), 1)}."
            )
        where = None if order is None else ints(order)
        check(require().ps_pack(self.struct, self.data.ctypes.data, row, count, source, values.ctypes.data, where))

    def _row_bytes(self, source: SourceType) -> int:
        size, numbers = _BLOCKS[source]
        if self.struct.cols % numbers:
            raise KernelsError(f"{source.name} has blocks of {numbers}, which do not divide {self.struct.cols} columns.")
        return self.struct.cols // numbers * size

    def unpack(self) -> Floats:
        out = np.empty((self.struct.rows, self.struct.cols), np.float32)
        check(require().ps_unpack(self.struct, 0, self.struct.rows, floats(out)))
        return out


# bytes of a block, and the numbers in it
_BLOCKS = {
    SourceType.F32: (4, 1),
    SourceType.F16: (2, 1),
    SourceType.BF16: (2, 1),
    SourceType.Q4_0: (18, 32),
    SourceType.Q4_1: (20, 32),
    SourceType.Q5_0: (22, 32),
    SourceType.Q5_1: (24, 32),
    SourceType.Q8_0: (34, 32),
    SourceType.Q4_K: (144, 256),
    SourceType.Q5_K: (176, 256),
    SourceType.Q6_K: (210, 256),
}


@dataclass(slots=True)
class PackedMlp:
    """gate_up is one matrix, or two that are stacked."""

    gate_up: Sequence[PackedMatrix]
    down: PackedMatrix

    def struct(self) -> MlpStruct:
        return MlpStruct((MatrixStruct * 2)(*(part.struct for part in self.gate_up)), self.down.struct)


@dataclass(slots=True)
class PackedExperts:
    """A mixture of experts. normalised: the shares of a row's experts add up to one."""

    router: PackedMatrix  # [experts, hidden]
    experts: Sequence[PackedMlp]
    per_token: int
    normalised: bool

    def struct(self) -> ExpertsStruct:
        experts = (MlpStruct * len(self.experts))(*(expert.struct() for expert in self.experts))
        inner = self.experts[0].down.struct.cols
        where = ctypes.cast(experts, ctypes.POINTER(MlpStruct))
        return ExpertsStruct(len(experts), self.per_token, inner, self.normalised, self.router.struct, where)


@dataclass(slots=True)
class PackedLayer:
    """The weights of a layer. qkv is one matrix, or several that are stacked."""

    input_norm: Floats
    qkv: Sequence[PackedMatrix]
    output: PackedMatrix
    mlp_norm: Floats
    mlp: PackedMlp | PackedExperts
    kv: NDArray[Any]  # [slots, 2, kv_heads, head_dim]
    qk_norm: Floats | None = None  # [heads + kv_heads, head_dim]
    post_attention_norm: Floats | None = None
    post_mlp_norm: Floats | None = None
    window: int | None = None
    rope: int = 0
    group: int = 0  # of layers with the same block tables

    def struct(self) -> LayerStruct:
        def optional(norm: Floats | None) -> Any:
            return None if norm is None else floats(norm)

        return LayerStruct(
            floats(self.input_norm),
            optional(self.qk_norm),
            optional(self.post_attention_norm),
            floats(self.mlp_norm),
            optional(self.post_mlp_norm),
            (MatrixStruct * 3)(*(part.struct for part in self.qkv)),
            self.output.struct,
            self.mlp.struct() if isinstance(self.mlp, PackedMlp) else MlpStruct(),
            ctypes.pointer(self.mlp.struct()) if isinstance(self.mlp, PackedExperts) else None,
            self.kv.ctypes.data,
            self.window or 0,
            self.rope,
            self.group,
        )


@dataclass(slots=True)
class PackedModel:
    """Layers and what they share; `struct` is what the calls of a KernelContext take."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    block_size: int
    kv_blocks: int
    kv_type: SourceType
    norm_eps: float
    layers: Sequence[PackedLayer]
    ropes: Sequence[tuple[Floats, Floats]]  # cos and sin, [positions, width / 2] each
    activation: Activation = Activation.SILU
    groups: int = 1  # of layers: a table has a block of each for every block_size tokens
    struct: ModelStruct = field(init=False)

    def __post_init__(self) -> None:
        size = 4 if self.kv_type is SourceType.F32 else 2
        for layer in self.layers:
            assert layer.kv.nbytes == self.kv_blocks * self.block_size * 2 * self.kv_heads * self.head_dim * size
        ropes = [RopeStruct(floats(cos), floats(sin), 2 * cos.shape[1], len(cos)) for cos, sin in self.ropes]
        self.struct = ModelStruct(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.intermediate,
            self.activation,
            self.kv_type,
            self.block_size,
            self.kv_blocks,
            self.groups,
            len(self.layers),
            len(ropes),
            self.norm_eps,
            ctypes.cast(
                (LayerStruct * len(self.layers))(*(layer.struct() for layer in self.layers)), ctypes.POINTER(LayerStruct)
            ),
            ctypes.cast((RopeStruct * len(ropes))(*ropes), ctypes.POINTER(RopeStruct)),
        )
