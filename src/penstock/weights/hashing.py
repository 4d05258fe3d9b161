"""The manifest of a model folder: hashes its weights, and caches the hashes of files that have not changed."""

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
        found: dict[str, HashedTensor] = {}
        unread: dict[Path, list[str]] = {}
        for path, names in by_file.items():
            if not path.is_file():
                continue
            if (known := _HashCache(path).get(names)) is not None:
                found |= known
            else:
                unread[path] = names
                self._total += path.stat().st_size
        for path, names in unread.items():
            found |= self._hash(path, names)
        return found

    def _hash(self, path: Path, names: list[str]) -> dict[str, HashedTensor]:
        cache, table = _HashCache(path), places(path)
        found = {}
        # read, not mapped: a file that is cut short meanwhile would kill the process
        with path.open("rb", buffering=0) as file:
            for name in names:
                if name not in table:
                    raise CorruptWeights(f"{path} lacks the tensor {name}.", hint="Fetch the model again.")
                place = table[name]
                found[name] = HashedTensor(name, place.dtype, place.shape, self._sha256(file, place.start, place.end))
        cache.put(found)
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


class _HashCache:
    """The cached hashes of one file, valid for one version of it (size, modification time, inode)."""

    def __init__(self, path: Path) -> None:
        path = path.resolve()  # snapshots of the hub are links to files that several of them share
        status = path.stat()
        self._path = path
        self._version = [status.st_size, status.st_mtime_ns, status.st_ino]
        self._file = cache_dir() / "manifests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"

    def get(self, names: list[str]) -> dict[str, HashedTensor] | None:
        try:
            entry = json.loads(self._file.read_text(encoding="utf-8"))
            if entry["version"] != self._version:
                return None
            known = entry["tensors"]
            return {name: HashedTensor(name, known[name][0], tuple(known[name][1]), known[name][2]) for name in names}
        except (OSError, ValueError, LookupError, TypeError):
            return None  # missing or damaged: the file is hashed again

    def put(self, tensors: Mapping[str, HashedTensor]) -> None:
        if _HashCache(self._path)._version != self._version:
            return  # the file changed while it was read
        content = {
            "file": str(self._path),
            "version": self._version,
            "tensors": {name: [tensor.dtype, tensor.shape, tensor.sha256] for name, tensor in tensors.items()},
        }
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(content), encoding="utf-8")
            draft.replace(self._file)
        except OSError:
            pass  # without the cache it only takes longer
