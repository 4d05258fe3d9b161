"""The manifest of a model folder: hashes what lies in it, and remembers that for files that did not change since."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from penstock.errors import CorruptWeights
from penstock.model.families import FAMILIES
from penstock.model.shapes import end_shapes, layer_shapes
from penstock.model.sources.cache import cache_dir
from penstock.model.spec import ModelSpec
from penstock.model.weights import HashedTensor, WeightFiles, check_shape, places
from penstock.progress import Progress, silent
from penstock.weights.manifest import FILES, HashedFile, Manifest

_CHUNK = 1 << 20


def manifest_of(folder: Path, spec: ModelSpec, progress: Progress = silent) -> Manifest:
    """What the model in `folder` is. It is incomplete where files are missing: snapshots of the hub may hold some shards only."""
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
        return (folder / "config.json").read_bytes().decode()  # as it is: read_text would change its line ends
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptWeights(f"{folder / 'config.json'} cannot be read: {error}.", hint="Fetch the model again.") from None


class _Hashing:
    """One look at a folder's weights."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder, self._progress = folder, progress
        self._done = self._total = 0

    def tensors(self, where: Mapping[str, str]) -> dict[str, HashedTensor]:
        """Those of the wanted tensors (name: file) whose file is here."""
        by_file: dict[Path, list[str]] = {}
        for name, file in where.items():
            by_file.setdefault(self._folder / file, []).append(name)
        found: dict[str, HashedTensor] = {}
        unread: dict[Path, list[str]] = {}
        for path, names in by_file.items():
            if not path.is_file():
                continue
            if (known := _Remembered(path).get(names)) is not None:
                found |= known
            else:
                unread[path] = names
                self._total += path.stat().st_size
        for path, names in unread.items():
            found |= self._hash(path, names)
        return found

    def _hash(self, path: Path, names: list[str]) -> dict[str, HashedTensor]:
        remembered, table = _Remembered(path), places(path)
        found = {}
        # read, not mapped: a file that is cut short meanwhile would kill the process
        with path.open("rb", buffering=0) as file:
            for name in names:
                if name not in table:
                    raise CorruptWeights(f"{path} lacks the tensor {name}.", hint="Fetch the model again.")
                place = table[name]
                found[name] = HashedTensor(name, place.dtype, place.shape, self._sha256(file, place.start, place.end))
        remembered.put(found)
        return found

    def _sha256(self, file: BinaryIO, start: int, end: int) -> str:
        hasher = hashlib.sha256()
        for chunk in read_range(file, start, end):
            hasher.update(chunk)
            self._done += len(chunk)
            self._progress("checking the weights", self._done, self._total)
        return hasher.hexdigest()


def read_range(file: BinaryIO, start: int, end: int) -> Iterator[memoryview]:
    """The bytes of a file in chunks, each good until the next one."""
    buffer = memoryview(bytearray(min(_CHUNK, end - start)))
    file.seek(start)
    while start < end:
        count = file.readinto(buffer[: end - start])  # type: ignore[attr-defined]
        if not count:
            raise CorruptWeights(f"The weights file {file.name} was cut short while it was read.", hint="Fetch the model again.")
        yield buffer[:count]
        start += count


class _Remembered:
    """The hashes of one file, kept in the cache under what tells its versions apart."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # snapshots of the hub are links to files that several of them share
        status = path.stat()
        self._path, self._version = path, [status.st_size, status.st_mtime_ns, status.st_ino]
        self._note = cache_dir() / "manifests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"

    def get(self, names: list[str]) -> dict[str, HashedTensor] | None:
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            if note["version"] != self._version:
                return None
            known = note["tensors"]
            return {name: HashedTensor(name, known[name][0], tuple(known[name][1]), known[name][2]) for name in names}
        except (OSError, ValueError, LookupError, TypeError):
            return None  # not there, or not ours: the file is read again

    def put(self, tensors: Mapping[str, HashedTensor]) -> None:
        if _Remembered(self._path)._version != self._version:
            return  # it changed while it was read
        content = {
            "file": str(self._path),
            "version": self._version,
            "tensors": {name: [tensor.dtype, tensor.shape, tensor.sha256] for name, tensor in tensors.items()},
        }
        try:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            draft = self._note.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(content), encoding="utf-8")
            draft.replace(self._note)
        except OSError:
            pass  # a cache that cannot be written costs time, nothing else
