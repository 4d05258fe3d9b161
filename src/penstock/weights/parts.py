"""PartReader: reads parts of a model folder as bytes, for other nodes."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import CorruptWeights
from penstock.model.files.weight_files import HashedTensor, TensorPlace, WeightFiles, places
from penstock.weights.manifest import Manifest, ModelPart


class PartReader:
    """Reads parts of one folder, which may hold only some of them.

    A part with tensors is the bytes of its tensors, one after the other in the manifest's order.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._files = WeightFiles(folder)
        self._tables: dict[str, tuple[tuple[int, int, int], dict[str, TensorPlace]]] = {}

    def read(self, part: ModelPart, offset: int, length: int) -> bytes:
        """Read a range of a part's bytes. Raises CorruptWeights if the folder does not hold them (any more)."""
        assert self._manifest.has(part) and 0 <= offset <= offset + length <= self._manifest.size(part), "checked by the caller"
        if part.file:
            return _read(self._folder / part.file, offset, length)
        try:
            return self._read_tensors(part, offset, length)
        except CorruptWeights:
            self._files = WeightFiles(self._folder)  # it may hold more files by now, or others
            return self._read_tensors(part, offset, length)

    def _read_tensors(self, part: ModelPart, offset: int, length: int) -> bytes:
        found, begin = [], 0
        for tensor in self._manifest.tensors(part):
            first, last = max(offset, begin), min(offset + length, begin + tensor.size)
            if first < last:
                path, start = self._find(tensor)
                found.append(_read(path, start + first - begin, last - first))
            begin += tensor.size
        return b"".join(found)

    def _find(self, tensor: HashedTensor) -> tuple[Path, int]:
        file = self._files.where.get(tensor.name)
        if file is None:
            raise CorruptWeights(f"The tensor {tensor.name} is missing in {self._folder}.")
        place = self._table(file).get(tensor.name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tensor.shape):
            raise CorruptWeights(f"The tensor {tensor.name} in {self._folder / file} has changed.")
        return self._folder / file, place.start

    def _table(self, file: str) -> dict[str, TensorPlace]:
        """Return the places of a file's tensors; read again if the file was replaced."""
        try:
            status = (self._folder / file).stat()
        except OSError as error:
            raise CorruptWeights(f"{self._folder / file} cannot be read: {error.strerror}.") from None
        version = (status.st_size, status.st_mtime_ns, status.st_ino)
        known = self._tables.get(file)
        if known is None or known[0] != version:
            known = self._tables[file] = version, places(self._folder / file)
        return known[1]


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            found = file.read(length)
    except OSError as error:
        raise CorruptWeights(f"{path} cannot be read: {error.strerror}.") from None
    if len(found) != length:
        raise CorruptWeights(f"{path} is truncated.")
    return found
