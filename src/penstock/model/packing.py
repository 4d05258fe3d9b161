"""Packing: the layout that each weight of a model has for the native kernels, what that takes, and how it is made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ConfigError, CorruptWeights
from penstock.kernels.packed import PackedMatrix, natural_kind, packed_bytes
from penstock.kernels.structs import Kind, SourceType
from penstock.model.blocks import SIZES, Blocks
from penstock.model.shapes import Shapes, end_shapes, layer_prefix, layer_shapes
from penstock.model.spec import ModelSpec
from penstock.model.weights import WeightFiles, digest

# the precision that numbers of a type are computed in, where it is not GGUF's; bfloat16 for all others
NAMES = {"F64": "float32", "F32": "float32", "F16": "float16"}
# These read the residual stream, in which a few channels are far larger than their neighbours: their inputs keep 16 bits.
FINE_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj")
ROUTER = "mlp.gate.weight"  # never rounded: a rounded score may choose another expert
_UNKNOWN = "BF16"  # the type of a tensor that is not here yet
_SOURCES = {torch.float32: SourceType.F32, torch.float16: SourceType.F16, torch.bfloat16: SourceType.BF16}
Floats = NDArray[np.float32]


class Packing:
    """How the weights of one model folder are packed: as they are stored, or rounded to 8 or 4 bits.

    precision: the name of the result: "int8", "int4", or the type that most numbers are stored in, such as "q4_1".
    """

    def __init__(self, spec: ModelSpec, folder: Path, quant: str) -> None:
        self.quant = quant
        self._spec = spec
        self._types = _stored_types(folder)
        stored = _most_common({name: self._types.get(name, _UNKNOWN) for name in _matrices(spec)}, _matrices(spec))
        if quant != "none" and stored in SIZES:
            raise ConfigError(
                f"quant = {quant}, but the weights of this model are quantised already ({stored}).",
                hint="Leave quant out: the model runs as it was published.",
            )
        own = stored.lower() if stored in SIZES else NAMES.get(stored, "bfloat16")
        self.precision = own if quant == "none" else quant

    def kind(self, name: str) -> Kind:
        """The layout of a matrix."""
        if self.quant == "none" or name.endswith(ROUTER):
            return natural_kind(_source_type(self._types.get(name, _UNKNOWN)))
        # logits are compared with each other, so the ends keep 8 bits
        return Kind.Q4 if self.quant == "int4" and name.startswith(f"{self._spec.prefix}layers.") else Kind.Q8

    def layer_bytes(self, index: int) -> int:
        return self._bytes(layer_shapes(self._spec, index))

    def end_bytes(self) -> int:
        return self._bytes(end_shapes(self._spec))

    def _bytes(self, shapes: Shapes) -> int:
        return sum(
            packed_bytes(self.kind(name), *shape) if len(shape) == 2 else 4 * math.prod(shape) for name, shape in shapes.items()
        )

    def read(self, files: WeightFiles, shapes: Shapes, prefix: str = "") -> tuple[PackedTensors, bytes]:
        """The named tensors, to be packed, and their digest. prefix: what their names are shortened by."""
        tensors, hashed = files.read_hashed(shapes)
        hashes = {tensor.name: tensor.sha256 for tensor in hashed}
        return PackedTensors(self, prefix, tensors, hashes, Blocks(files.folder)), digest(hashed)

    def read_layer(self, files: WeightFiles, index: int) -> tuple[PackedTensors, bytes]:
        return self.read(files, layer_shapes(self._spec, index), layer_prefix(self._spec, index))


class PackedTensors:
    """Tensors of a model's files, packed one by one: nothing stays a view of a file."""

    def __init__(
        self, packing: Packing, prefix: str, tensors: Mapping[str, Tensor], hashes: Mapping[str, str], blocks: Blocks
    ) -> None:
        self._packing = packing
        self._prefix = prefix
        self._tensors = tensors
        self._hashes = hashes
        self._blocks = blocks

    def vector(self, name: str) -> Floats:
        """A copy in fp32."""
        found: Floats = self._tensors[self._prefix + name].float().numpy().copy()
        return found

    def matrix(self, name: str) -> PackedMatrix:
        """`name`.weight, with `name`.bias if there is one."""
        full = f"{self._prefix}{name}.weight"
        tensor = self._tensors[full]
        bias = self.vector(f"{name}.bias") if f"{self._prefix}{name}.bias" in self._tensors else None
        packed = PackedMatrix(self._packing.kind(full), *tensor.shape, bias=bias, fine=name.endswith(FINE_INPUTS))
        stored = self._blocks.of(full, self._hashes[full]) if self._packing.quant == "none" else None
        if stored is not None:
            packed.pack(SourceType[stored[0]], stored[1])
        else:
            source, values = _numbers(tensor)
            packed.pack(source, values)
        return packed

    def matrices(self, names: Sequence[str]) -> list[PackedMatrix]:
        return [self.matrix(name) for name in names]


def _numbers(tensor: Tensor) -> tuple[SourceType, NDArray[np.generic]]:
    """A tensor as numpy can hold it, and the type of its numbers."""
    if tensor.dtype not in _SOURCES:
        tensor = tensor.to(torch.float32 if tensor.dtype == torch.float64 else torch.bfloat16)  # which holds all of fp8
    return _SOURCES[tensor.dtype], (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _source_type(name: str) -> SourceType:
    if name in SourceType.__members__:
        return SourceType[name]
    return SourceType.F32 if name == "F64" else SourceType.BF16


def _stored_types(folder: Path) -> dict[str, str]:
    try:
        return WeightFiles(folder).types() | Blocks(folder).types()
    except CorruptWeights:
        return {}  # it says so when it is loaded, and other nodes may have the weights


def _matrices(spec: ModelSpec) -> Shapes:
    shapes = end_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= layer_shapes(spec, index)
    return {name: shape for name, shape in shapes.items() if len(shape) == 2}


def _most_common(types: Mapping[str, str], shapes: Shapes) -> str:
    """The type of most numbers."""
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        counts[types[name]] += math.prod(shape)
    return counts.most_common(1)[0][0]
