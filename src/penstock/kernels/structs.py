"""The structs of the C interface (native/penstock.h), field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_void_p
from enum import IntEnum


class Kind(IntEnum):
    """Packed layouts of weights."""

    Q4 = 1
    Q4M = 2
    Q8 = 3
    Q8M = 4
    BF16 = 5
    F16 = 6
    F32 = 7

    @property
    def coded(self) -> bool:
        """Whether weights are codes with scales, not numbers."""
        return self in (Kind.Q4, Kind.Q4M, Kind.Q8, Kind.Q8M)


class SourceType(IntEnum):
    """Types of numbers and of GGUF blocks, by GGUF's numbers."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1


class MatrixStruct(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("data", c_void_p),
        ("bias", POINTER(c_float)),
    )
    kind: int
    rows: int
    cols: int
    owner: object  # keeps the memory alive that it points to


class MlpStruct(ctypes.Structure):
    _fields_ = (("gate_up", MatrixStruct * 2), ("down", MatrixStruct))


class ExpertsStruct(ctypes.Structure):
    _fields_ = (
        ("count", c_int32),
        ("per_token", c_int32),
        ("intermediate", c_int32),
        ("normalised", c_int32),
        ("router", MatrixStruct),
        ("experts", POINTER(MlpStruct)),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", POINTER(c_float)),
        ("qk_norm", POINTER(c_float)),
        ("post_attention_norm", POINTER(c_float)),
        ("mlp_norm", POINTER(c_float)),
        ("post_mlp_norm", POINTER(c_float)),
        ("qkv", MatrixStruct * 3),
        ("output", MatrixStruct),
        ("mlp", MlpStruct),
        ("experts", POINTER(ExpertsStruct)),
        ("kv", c_void_p),
        ("window", c_int32),
        ("rope", c_int32),
        ("group", c_int32),
    )


class RopeStruct(ctypes.Structure):
    _fields_ = (("cos", POINTER(c_float)), ("sin", POINTER(c_float)), ("width", c_int32), ("positions", c_int32))


class ModelStruct(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("activation", c_int32),
        ("kv_type", c_int32),
        ("block_size", c_int32),
        ("kv_blocks", c_int32),
        ("groups", c_int32),
        ("layer_count", c_int32),
        ("rope_count", c_int32),
        ("norm_eps", c_float),
        ("layers", POINTER(LayerStruct)),
        ("ropes", POINTER(RopeStruct)),
    )
    hidden: int
    heads: int
    head_dim: int


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("spans", c_int32),
        ("tables_size", c_int32),
        ("tables", POINTER(c_int32)),
        ("table", POINTER(c_int32)),
        ("start", POINTER(c_int32)),
        ("n", POINTER(c_int32)),
    )
