"""The manifest of a model folder: hashes its weights, except for files that have not changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from penstock.errors import CorruptWeights
from penstock.model.architecture.families import FAMILIES
from penstock.model.architecture.shapes import end_shapes, layer_shapes
from penstock.model.architecture.spec import ModelSpec
from penstock.model.files.known_hashes import KnownHashes
from penstock.model.files.weight_files import HashedTensor, TensorPlace, WeightFiles, check_shape, places
from penstock.progress import Progress, silent
from penstock.weights.manifest import FILES, HashedFile, Manifest

_CHUNK_BYTES = 1 << 20


def manifest_of(folder: Path, spec: ModelSpec, progress: Progress = silent) -> Manifest:
    """Make the manifest of the model in `folder`. It is incomplete if files are missing: hub snapshots may lack some shards."""
    files = WeightFiles(folder)
    groups = [*(layer_shapes(spec, index) for index in range(spec.num_layers)), end_shapes(spec)]
    shapes = {name: shape for group in groups for name, shape in group.items()}
    hashed = _Hashing(folder, progress).tensors({name: files.where[name] for name in shapes if name in files.where})
    for name, tensor in hashed.items():
        check_shape(name, tensor.shape, shapes[name])
    *layers, ends = (_group(sorted(group), hashed) for group in groups)
    small = tuple(_small_file(folder / name) for name in FILES if (folder / name).is_file())
    prefix = "" if spec.prefix == FAMILIES[spec.family].prefixes[0] else spec.prefix
    return Manifest(_config(folder), tuple(layers), ends, small, prefix, {name: files.where[name] for name in hashed})


def _group(names: list[str], hashed: Mapping[str, HashedTensor]) -> tuple[HashedTensor, ...] | None:
    return tuple(hashed[name] for name in names) if all(name in hashed for name in names) else None


def _small_file(path: Path) -> HashedFile:
    content = path.read_bytes()
    return HashedFile(path.name, len(content), hashlib.sha256(content).hexdigest())


def _config(folder: Path) -> str:
    try:
        return (folder / "config.json").read_bytes().decode()  # read_text would change its line ends
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptWeights(f"{folder / 'config.json'} cannot be read: {error}.", hint="Download the model again.") from None


class _Hashing:
    """One pass over the weights of a folder."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self._done = 0
        self._total = 0

    def tensors(self, where: Mapping[str, str]) -> dict[str, HashedTensor]:
        """Hash the wanted tensors (name: file) whose files are here."""
        by_file: dict[Path, list[str]] = {}
        for name, file in where.items():
            by_file.setdefault(self._folder / file, []).append(name)
        tables: dict[Path, dict[str, TensorPlace]] = {}
        hashes: dict[Path, dict[str, str]] = {}
        unread: list[Path] = []
        for path, names in by_file.items():
            if not path.is_file():
                continue
            table = places(path)
            for name in names:
                if name not in table:
                    raise CorruptWeights(f"{path} lacks the tensor {name}.", hint="Fetch the model again.")
            tables[path] = {name: table[name] for name in names}
            known = hashes[path] = KnownHashes(path).get(names)
            if len(known) < len(names):
                unread.append(path)
                self._total += path.stat().st_size
        for path in unread:
            hashes[path] = self._hash(path, tables[path])
        return {
            name: HashedTensor(name, place.dtype, place.shape, hashes[path][name])
            for path, table in tables.items()
            for name, place in table.items()
        }

    def _hash(self, path: Path, table: Mapping[str, TensorPlace]) -> dict[str, str]:
        hashes = KnownHashes(path)
        # read, not mapped: a file that is cut short meanwhile would kill the process
        with path.open("rb", buffering=0) as file:
            found = {name: self._sha256(file, place.start, place.end) for name, place in table.items()}
        hashes.add(found)
        return found

    def _sha256(self, file: BinaryIO, start: int, end: int) -> str:
        hasher = hashlib.sha256()
        for chunk in read_range(file, start, end):
            hasher.update(chunk)
            self._done += len(chunk)
            self._progress("checking the weights", self._done, self._total)
        return hasher.hexdigest()


def read_range(file: BinaryIO, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a file in chunks, each valid until the next one."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, end - start)))
    file.seek(start)
    while start < end:
        count = file.readinto(buffer[: end - start])  # type: ignore[attr-defined]
        if not count:
            raise CorruptWeights(f"{file.name} was truncated while it was read.", hint="Download the model again.")
        yield buffer[:count]
        start += count
