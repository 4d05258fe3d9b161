"""Packing: the layout that each weight of a model has for the native kernels, what that takes, and how it is made."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ConfigError, CorruptWeights
from penstock.kernels.build import library_path
from penstock.kernels.packed import PackedMatrix, natural_kind, packed_bytes
from penstock.kernels.structs import Kind, SourceType
from penstock.kernels.weight_memory import WeightMemory
from penstock.model.architecture.shapes import Shapes, end_params, end_shapes, layer_prefix, layer_shapes
from penstock.model.architecture.spec import ModelSpec
from penstock.model.files.cache import cache_dir
from penstock.model.files.gguf_blocks import SIZES, Blocks
from penstock.model.files.weight_files import WeightFiles, digest
from penstock.model.packed.packed_file import SOURCE, Bytes, PackedFile, remove_orphans

logger = logging.getLogger(__name__)

# the precision that numbers of a type are computed in, where it is not GGUF's; bfloat16 for all others
NAMES = {"F64": "float32", "F32": "float32", "F16": "float16"}
ROUTER = "mlp.gate.weight"  # never rounded: a rounded score may choose another expert
_DECLARED = {"float32": "F32", "float16": "F16"}  # types by their names in config.json; BF16 for all others
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
        self._unknown = _declared_type(folder)  # of a tensor that is not here yet
        stored = _stored_type(spec, self._types, self._unknown)
        _check_not_quantised(quant, stored)
        self.coded = quant != "none" or stored in SIZES  # most weights are codes
        own = stored.lower() if stored in SIZES else NAMES.get(stored, "bfloat16")
        self.precision = own if quant == "none" else quant

    def kind(self, name: str) -> Kind:
        """The layout of a matrix."""
        if self.quant == "none" or name.endswith(ROUTER):
            return natural_kind(_source_type(self._types.get(name, self._unknown)))
        # logits are compared with each other, so the ends keep 8 bits
        return Kind.Q4 if self.quant == "int4" and name.startswith(f"{self._spec.prefix}layers.") else Kind.Q8

    def layer_bytes(self, index: int) -> int:
        return self._bytes(layer_shapes(self._spec, index))

    def end_bytes(self) -> int:
        return self._bytes(end_shapes(self._spec))

    def _bytes(self, shapes: Shapes) -> int:
        return sum(self.tensor_bytes(name, shape) for name, shape in shapes.items())

    def tensor_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        return packed_bytes(self.kind(name), *shape) if len(shape) == 2 else 4 * math.prod(shape)

    def read(
        self, files: WeightFiles, shapes: Shapes, prefix: str = "", memory: WeightMemory | None = None
    ) -> tuple[PackedTensors, bytes]:
        """The named tensors, to be packed, and their digest.

        prefix: what their names are shortened by.
        memory: where to pack them; None for memory of their own.
        Weights that are rounded are kept on disk and mapped from there the next time.
        """
        if not self._types.keys() >= shapes.keys():
            self._types |= _stored_types(files.folder)  # they may have come since, from other nodes or from the model's makers
        if self.quant == "none":
            return self._read_stored(files, shapes, prefix, memory)
        path, identity = self._path(files, prefix), self._identity(files, shapes)
        found = PackedFile.open(path, identity)
        if found is None:
            stored, digest = self._read_stored(files, shapes, prefix, memory)
            sizes = {name: self.tensor_bytes(name, shape) for name, shape in shapes.items()}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                (path.parent / SOURCE).write_text(str(files.folder.absolute()), encoding="utf-8")
                found = PackedFile.create(path, identity, digest, sizes, stored.write)
                remove_orphans(path.parent.parent)
            except OSError as error:
                logger.warning("Rounded weights cannot be kept in %s: %s.", path.parent, error.strerror)
                return stored, digest
        return MappedTensors(self, prefix, shapes, found), found.digest

    def read_layer(self, files: WeightFiles, index: int, memory: WeightMemory | None = None) -> tuple[PackedTensors, bytes]:
        return self.read(files, layer_shapes(self._spec, index), layer_prefix(self._spec, index), memory)

    def is_ready(self, files: WeightFiles, index: int) -> bool:
        """Whether a layer need not be rounded first, as far as can be told without reading it."""
        return self.quant == "none" or self._path(files, layer_prefix(self._spec, index)).exists()

    def _read_stored(
        self, files: WeightFiles, shapes: Shapes, prefix: str, memory: WeightMemory | None
    ) -> tuple[StoredTensors, bytes]:
        tensors, hashed = files.read_hashed(shapes)
        hashes = {tensor.name: tensor.sha256 for tensor in hashed}
        return StoredTensors(self, prefix, tensors, hashes, files.blocks, memory or WeightMemory()), digest(hashed)

    def _path(self, files: WeightFiles, prefix: str) -> Path:
        folder = hashlib.sha256(os.fsencode(files.folder.absolute())).hexdigest()[:16]
        return cache_dir() / "packed" / f"{files.folder.name}-{folder}" / f"{prefix or 'ends.'}{self.quant}"

    def _identity(self, files: WeightFiles, shapes: Shapes) -> str:
        """What packed weights depend on, hashed: the kernels, the files that they were read from, and their layouts."""
        known = library_path().name, self.quant, [(name, shape, self.kind(name)) for name, shape in sorted(shapes.items())]
        return hashlib.sha256(repr((known, files.stamps(shapes))).encode()).hexdigest()


class Fp8Packing:
    """Layers in e4m3 with a scale for each output, rounded as they are loaded; routers and the ends keep 16 bits."""

    quant = precision = "fp8"

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        self._spec = spec
        _check_not_quantised(self.quant, _stored_type(spec, _stored_types(folder), _declared_type(folder)))

    def layer_bytes(self, index: int) -> int:
        def size(name: str, shape: tuple[int, ...]) -> int:
            rounded = len(shape) == 2 and not name.endswith(ROUTER)
            return math.prod(shape) + 4 * shape[0] if rounded else 4 * math.prod(shape)

        return sum(size(name, shape) for name, shape in layer_shapes(self._spec, index).items())

    def end_bytes(self) -> int:
        return 2 * end_params(self._spec)


class PackedTensors(ABC):
    """Tensors of a model's files, as the kernels read them. Names are without the prefix."""

    def __init__(self, packing: Packing, prefix: str, shapes: Shapes) -> None:
        self._packing = packing
        self._prefix = prefix
        self._shapes = shapes

    @abstractmethod
    def vector(self, name: str) -> Floats:
        """A copy in fp32."""

    @abstractmethod
    def _packed(self, name: str) -> Bytes:
        """A packed matrix, by its full name."""

    def matrix(self, name: str) -> PackedMatrix:
        """`name`.weight, with `name`.bias if there is one."""
        full = f"{self._prefix}{name}.weight"
        bias = self.vector(f"{name}.bias") if f"{self._prefix}{name}.bias" in self._shapes else None
        return PackedMatrix(self._packing.kind(full), *self._shapes[full], data=self._packed(full), bias=bias)

    def matrices(self, names: Sequence[str]) -> list[PackedMatrix]:
        return [self.matrix(name) for name in names]


class StoredTensors(PackedTensors):
    """Packed one by one out of the model's files: nothing stays a view of a file."""

    def __init__(
        self,
        packing: Packing,
        prefix: str,
        tensors: Mapping[str, Tensor],
        hashes: Mapping[str, str],
        blocks: Blocks,
        memory: WeightMemory,
    ) -> None:
        super().__init__(packing, prefix, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self._tensors = tensors
        self._hashes = hashes
        self._blocks = blocks
        self._memory = memory

    def vector(self, name: str) -> Floats:
        found: Floats = self._tensors[self._prefix + name].float().numpy().copy()
        return found

    def _packed(self, name: str) -> Bytes:
        data = self._memory.take(self._packing.tensor_bytes(name, self._shapes[name]))
        self.write(name, data)
        return data

    def write(self, name: str, data: Bytes) -> None:
        """Pack a tensor, by its full name, into this memory."""
        tensor = self._tensors[name]
        if tensor.dim() != 2:
            data[:] = tensor.float().contiguous().view(torch.uint8).numpy()
            return
        packed = PackedMatrix(self._packing.kind(name), *tensor.shape, data=data)
        stored = self._blocks.of(name, self._hashes[name]) if self._packing.quant == "none" else None
        if stored is not None:
            packed.pack(SourceType[stored[0]], stored[1])
        else:
            packed.pack(*_numbers(tensor))


class MappedTensors(PackedTensors):
    """Packed before, and mapped from the file that keeps them."""

    def __init__(self, packing: Packing, prefix: str, shapes: Shapes, file: PackedFile) -> None:
        super().__init__(packing, prefix, shapes)
        self._file = file

    def vector(self, name: str) -> Floats:
        return self._file[self._prefix + name].view(np.float32).copy()

    def _packed(self, name: str) -> Bytes:
        return self._file[name]


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
        files = WeightFiles(folder)
        return files.types() | files.blocks.types()
    except CorruptWeights:
        return {}  # it says so when it is loaded, and other nodes may have the weights


def _declared_type(folder: Path) -> str:
    """The type that a model's own configuration says its weights have."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        named = [part.get(key) for part in (config, config.get("text_config", {})) for key in ("torch_dtype", "dtype")]
    except (OSError, ValueError, AttributeError, RecursionError):
        named = []
    return _DECLARED.get(next((str(name) for name in named if name), ""), "BF16")


def _matrices(spec: ModelSpec) -> Shapes:
    shapes = end_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= layer_shapes(spec, index)
    return {name: shape for name, shape in shapes.items() if len(shape) == 2}


def _stored_type(spec: ModelSpec, types: Mapping[str, str], unknown: str) -> str:
    """The type that most numbers of a model are stored in. unknown: of tensors that are not here."""
    counts: Counter[str] = Counter()
    for name, shape in _matrices(spec).items():
        counts[types.get(name, unknown)] += math.prod(shape)
    return counts.most_common(1)[0][0]


def _check_not_quantised(quant: str, stored: str) -> None:
    if quant != "none" and stored in SIZES:
        raise ConfigError(
            f"quant = {quant}, but the weights of this model are quantised already ({stored}).",
            hint="Leave quant out: the model runs as it was published.",
        )
