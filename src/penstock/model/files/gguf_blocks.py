"""GGUF blocks: the quantised tensors of a model that was converted from a GGUF file, as that file stores them.

`model.safetensors` has the values of all tensors in 16 or 32 bits, which every tool reads and which are hashed. `model.blocks`
beside it has the blocks that they were computed from, for back-ends that compute with those: it is a safetensors file of bytes,
[rows, bytes of a row], with the rows in the order of `model.safetensors`.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CorruptWeights
from penstock.model.files.known_hashes import hash_parts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILE = "model.blocks"
# types that the kernels read: bytes of a block, and the numbers in it
SIZES = {
    "Q4_0": (18, 32),
    "Q4_1": (20, 32),
    "Q5_0": (22, 32),
    "Q5_1": (24, 32),
    "Q8_0": (34, 32),
    "Q4_K": (144, 256),
    "Q5_K": (176, 256),
    "Q6_K": (210, 256),
}
_FETCH_AGAIN = "Remove the folder and fetch the model again."


class BlocksOf(NamedTuple):
    """The blocks of a tensor. `sha256` is theirs, `values` that of the tensor in `model.safetensors`."""

    type_name: str
    rows: Iterable[NDArray[np.uint8]]  # pieces of [rows, bytes of a row]
    shape: tuple[int, int]  # of all pieces together
    sha256: str
    values: str


def write_blocks(folder: Path, tensors: Mapping[str, BlocksOf]) -> None:
    """Write the file, or none where there are no such tensors."""
    if not tensors:
        return
    about = {name: f"{one.type_name} {one.sha256} {one.values}" for name, one in tensors.items()}
    table: dict[str, object] = {"__metadata__": about}
    end = 0
    for name, one in tensors.items():
        begin, end = end, end + one.shape[0] * one.shape[1]
        table[name] = {"dtype": "U8", "shape": list(one.shape), "data_offsets": [begin, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with (folder / FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for one in tensors.values():
            for piece in one.rows:
                file.write(piece.tobytes())


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    type_name: str
    sha256: str
    values: str
    shape: tuple[int, int]
    start: int


class Blocks:
    """The blocks of a model folder; none where it has no such file. Opening reads the header only."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._entries = self._read() if self._path.is_file() else {}

    def types(self) -> dict[str, str]:
        """The GGUF type of each tensor."""
        return {name: entry.type_name for name, entry in self._entries.items()}

    def of(self, name: str, values: str) -> tuple[str, NDArray[np.uint8]] | None:
        """The type and the blocks [rows, bytes of a row] of a tensor whose values have this hash, or None if there are none.

        They map the file. Raises CorruptWeights where they have changed.
        """
        import numpy as np

        entry = self._entries.get(name)
        if entry is None or entry.values != values:
            return None
        with self._path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        rows, width = entry.shape
        found = np.frombuffer(data, np.uint8, rows * width, entry.start).reshape(rows, width)
        if hash_parts(self._path, {name: found.data})[name] != entry.sha256:
            raise CorruptWeights(f"{name} in {self._path} is damaged.", hint=_FETCH_AGAIN)
        return entry.type_name, found

    def _read(self) -> dict[str, _StoredTensor]:
        try:
            size = self._path.stat().st_size
            with self._path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= size - 8:
                    raise ValueError("it has no table")
                table = json.loads(file.read(length))
            about = table.pop("__metadata__")
            return {name: _entry(about[name], one, 8 + length, size) for name, one in table.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptWeights(f"{self._path} cannot be read: {error!r}.", hint=_FETCH_AGAIN) from None


def _entry(about: str, place: Mapping[str, list[int]], start: int, size: int) -> _StoredTensor:
    type_name, sha256, values = about.split(" ")
    (rows, width), (begin, end) = place["shape"], place["data_offsets"]
    block, _ = SIZES[type_name]
    if min(rows, width, begin) < 0 or width % block or end - begin != rows * width or start + end > size:
        raise ValueError("a tensor is not where its table says")
    return _StoredTensor(type_name, sha256, values, (rows, width), start + begin)
