"""Read GGUF files: metadata, the table of tensors, and the raw bytes of a tensor, for any architecture.

Every length in the file is checked against the file's size before it is used, so that a damaged file raises
`CorruptWeights` and never causes a crash, a hang or a huge allocation.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptWeights, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# GGUF's metadata types, as struct codes; strings and arrays have lengths of their own.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """The position and format of a tensor in the file. `shape` has rows first, unlike in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file: the metadata is in memory, the tensors stay on disk until they are read."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """Map the stored bytes without copying: [rows, row_bytes]."""
        import numpy as np

        flat = np.frombuffer(self.data, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
        return flat.reshape(tensor.rows, tensor.row_bytes)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file of version 2 or 3 (little-endian)."""
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            raise CorruptWeights(f"{path} is empty.") from None
    cursor = _Cursor(path, data)
    if cursor.take(4, "the magic number") != b"GGUF":
        raise CorruptWeights(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")
    version = cursor.number("I", "the version")
    if version not in (2, 3):
        kind = "a big-endian file" if version >= 1 << 16 else f"version {version}"
        raise UnsupportedModel(f"{path} is GGUF, but {kind}.", hint="Supported are versions 2 and 3, little-endian.")
    tensor_count = cursor.number("Q", "the number of tensors")
    key_count = cursor.number("Q", "the number of metadata entries")
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = cursor.string(f"the name of metadata entry {index}")
        metadata[key] = cursor.value(cursor.number("I", f"the type of '{key}'"), f"'{key}'")
    table = [cursor.tensor_entry(index) for index in range(tensor_count)]
    return GgufFile(path, metadata, _place(path, table, _data_start(path, metadata, cursor.position), len(data)), data)


def _data_start(path: Path, metadata: dict[str, Any], header_end: int) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise CorruptWeights(f"{path} has an impossible 'general.alignment': {alignment!r}.")
    return -(-header_end // alignment) * alignment


def _place(path: Path, table: list[_Entry], start: int, file_size: int) -> dict[str, TensorInfo]:
    """Turn the table's entries into checked positions inside the file."""
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in table:
        type_name, block, block_bytes = storage_type(type_id, name)
        if name in tensors:
            raise CorruptWeights(f"{path} lists the tensor '{name}' twice.")
        if not shape or 0 in shape or shape[-1] % block:
            raise CorruptWeights(f"{path}: the tensor '{name}' has the impossible shape {list(shape)} for the type {type_name}.")
        info = TensorInfo(name, shape, type_name, start + offset, math.prod(shape[:-1]), shape[-1] // block * block_bytes)
        if info.offset + info.nbytes > file_size:
            missing = info.offset + info.nbytes - file_size
            raise CorruptWeights(
                f"{path} is truncated: the tensor '{name}' reaches {missing:,} bytes beyond the end of the file.",
                hint="Fetch the file again.",
            )
        tensors[name] = info
    return tensors


def storage_type(type_id: int, tensor: str) -> tuple[str, int, int]:
    """Name, elements per block and bytes per block of a tensor type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(type_id)
    except ValueError:
        raise UnsupportedModel(f"The tensor '{tensor}' has the unknown GGUF type number {type_id}.") from None
    block, block_bytes = GGML_QUANT_SIZES[known]
    return known.name, block, block_bytes


_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, type number, offset inside the data part


class _Cursor:
    """Reads forward through the header; `what` names the value to read, for error messages."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def advance(self, count: int, what: str) -> int:
        """Skip `count` bytes and return where they start."""
        start = self.position
        if count > self.size - start:
            raise CorruptWeights(
                f"{self.path} is truncated or corrupt: {what} at byte {start:,} needs {count:,} bytes, "
                f"but only {self.size - start:,} are left.",
                hint="Fetch the file again.",
            )
        self.position = start + count
        return start

    def take(self, count: int, what: str) -> bytes:
        start = self.advance(count, what)
        return self.data[start : start + count]

    def number(self, code: str, what: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self.advance(layout.size, what))[0]

    def string(self, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        return self.text(self.take(length, what), what)

    def text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise CorruptWeights(f"{self.path} is corrupt: {what} is not valid UTF-8.") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and depth < _MAX_ARRAY_DEPTH:
            return self.array(what, depth)
        raise CorruptWeights(f"{self.path} is corrupt: {what} has the unknown metadata type {kind}.")

    def array(self, what: str, depth: int) -> list[Any]:
        kind = self.number("I", f"the element type of {what}")
        count = self.number("Q", f"the length of {what}")
        if kind in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[kind])
            start = self.advance(count * width, what)
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start))
        if kind == _STRING:
            return self.strings(count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def strings(self, count: int, what: str) -> list[str]:
        # Vocabularies have hundreds of thousands of strings: this loop is most of the time to read a header.
        read_length, data, size, position = struct.Struct("<Q").unpack_from, self.data, self.size, self.position
        found: list[str] = []
        for _ in range(count):
            begin = position + 8
            end = begin + read_length(data, position)[0] if begin <= size else size + 1
            if end > size:
                self.position = position
                self.advance(end - position, f"entry {len(found)} of {what}")
            found.append(self.text(data[begin:end], what))
            position = end
        self.position = position
        return found

    def tensor_entry(self, index: int) -> _Entry:
        name = self.string(f"the name of tensor {index}")
        dimensions = self.number("I", f"the number of dimensions of '{name}'")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CorruptWeights(f"{self.path} is corrupt: the tensor '{name}' has {dimensions} dimensions.")
        shape = tuple(self.number("Q", f"the shape of '{name}'") for _ in range(dimensions))
        type_id = self.number("I", f"the type of '{name}'")
        return name, shape[::-1], type_id, self.number("Q", f"the offset of '{name}'")
