"""PeerStore: what was fetched from other nodes, part by part. It is a model folder that may hold some layers only.

Such a folder lies in the cache under the hash of its manifest, which says what each part must be. A part that is on its way
is a file `….part` that is appended to; it gets its name once it is whole and every hash in it is right.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, ModelError
from penstock.model.sources.cache import ORIGIN, cache_dir, locked
from penstock.progress import Progress
from penstock.weights.hashing import read_range
from penstock.weights.manifest import Manifest, ModelPart

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"


class WrongBytes(Exception):
    """What came of a part is not what the manifest says; `what` names the tensor or the file. The part was thrown away."""

    def __init__(self, part: ModelPart, what: str) -> None:
        super().__init__(f"{what} is not what it should be")
        self.part, self.what = part, what


class PeerStore:
    """Making one writes what is known already: config.json, the manifest, and in which file each tensor will lie."""

    def __init__(self, manifest: Manifest, model: str) -> None:
        assert manifest.complete, "there is no telling what the parts must be"
        self.manifest = manifest
        self.folder = _stores() / manifest.hash
        self._heads: dict[ModelPart, int] = {}  # bytes before the tensors
        known = {
            ORIGIN: (json.dumps({"name": model, "source": f"peers:{manifest.hash}", "licence": ""}, indent=2) + "\n").encode(),
            "config.json": manifest.config.encode(),
            INDEX: _index(manifest),
            MANIFEST: manifest.encode(),
        }
        with _own_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, content in known.items():
                path = self.folder / name
                if not path.exists() or path.read_bytes() != content:
                    _write_whole(path, content)
        with suppress(OSError):  # of a cache that may only be read
            os.utime(self.folder / MANIFEST)

    @classmethod
    def latest(cls, model: str) -> PeerStore | None:
        """The store that was last used for the model with this name, if there is one."""
        dated = []
        for path in _stores().glob(f"*/{MANIFEST}"):
            with suppress(OSError):
                dated.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(dated, reverse=True):
            try:
                origin = json.loads((path.parent / ORIGIN).read_bytes())
                if origin["name"] != model:
                    continue
                manifest = Manifest.decode(path.read_bytes())
            except (OSError, ValueError, LookupError, TypeError, CorruptWeights):
                continue  # damaged, or not ours
            if manifest.hash == path.parent.name:
                return cls(manifest, model)
        return None

    def has(self, part: ModelPart) -> bool:
        """Whether all of it is here, by its size; its hashes were right when it came."""
        try:
            return (self.folder / _file_name(part)).stat().st_size == self._head(part) + self.manifest.size(part)
        except FileNotFoundError:
            return False

    def fetched(self, part: ModelPart) -> int:
        """Bytes of the part that are here, checked or not."""
        if self.has(part):
            return self.manifest.size(part)
        try:
            size = _draft(self.folder, part).stat().st_size
        except FileNotFoundError:
            return 0
        return max(0, size - self._head(part))

    def discard(self, part: ModelPart) -> None:
        """Throw away what is here of a part that turned out damaged, so that it is fetched again."""
        with _own_disk_errors(self.folder):
            (self.folder / _file_name(part)).unlink(missing_ok=True)
            _draft(self.folder, part).unlink(missing_ok=True)

    def incoming(self, part: ModelPart) -> Incoming:
        """For who holds the lock."""
        return Incoming(self.folder, self.manifest, part)

    def locked(self, progress: Progress) -> AbstractContextManager[None]:
        """Two processes that want the same weights fetch them once."""
        return locked(f"peers-{self.manifest.hash[:12]}", progress=progress)

    def _head(self, part: ModelPart) -> int:
        if part not in self._heads:
            self._heads[part] = len(_head(self.manifest, part))
        return self._heads[part]


class Incoming:
    """A part on its way in. It goes on at `offset`, where the last one left off."""

    def __init__(self, folder: Path, manifest: Manifest, part: ModelPart) -> None:
        self._folder, self._manifest, self._part = folder, manifest, part
        self._path, self._head = _draft(folder, part), _head(manifest, part)
        self.size = manifest.size(part)
        with _own_disk_errors(folder):
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115  # closed by `close`
            length = self._file.seek(0, os.SEEK_END)
            if not self._begins_well() or length > len(self._head) + self.size:
                self._file.truncate(0)  # of a process that died at once, or not ours
                self._append(self._head)
                length = len(self._head)
        self.offset = length - len(self._head)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """A disk that is full loses nothing of what came before."""
        with _own_disk_errors(self._folder):
            self._append(data)
        self.offset += len(data)

    def finish(self) -> None:
        """Check every hash, then let the part appear. Raises WrongBytes."""
        with _own_disk_errors(self._folder):
            wrong = self._wrong()
            if wrong:
                self._path.unlink()
                raise WrongBytes(self._part, wrong)
            os.fsync(self._file.fileno())
            self._path.rename(self._folder / _file_name(self._part))
            _flush_folder(self._folder)

    def _begins_well(self) -> bool:
        self._file.seek(0)
        return self._file.read(len(self._head)) == self._head

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _wrong(self) -> str:
        """The first tensor that is wrong, or the file; empty if none is."""
        if self._part.file:
            file = self._manifest.file(self._part)
            return "" if self._sha256(0, file.size) == file.sha256 else file.name
        start = len(self._head)
        for tensor in self._manifest.tensors(self._part):
            if self._sha256(start, start + tensor.size) != tensor.sha256:
                return tensor.name
            start += tensor.size
        return ""

    def _sha256(self, start: int, end: int) -> str:
        hasher = hashlib.sha256()
        for chunk in read_range(self._file, start, end):
            hasher.update(chunk)
        return hasher.hexdigest()


def _stores() -> Path:
    return cache_dir() / "peers"


def _index(manifest: Manifest) -> bytes:
    """Names every tensor of the model, as the index of a model in several files does, and so also how they are named in it."""
    parts = [part for part in manifest.parts([LayerRange(0, len(manifest.layers))], ends=True) if not part.file]
    where = {tensor.name: _file_name(part) for part in parts for tensor in manifest.tensors(part)}
    return json.dumps({"metadata": {}, "weight_map": where}).encode()


def _file_name(part: ModelPart) -> str:
    if part.file:
        return part.file
    return "ends.safetensors" if part.layer is None else f"layer-{part.layer:05}.safetensors"


def _draft(folder: Path, part: ModelPart) -> Path:
    return folder / f"{_file_name(part)}.part"


def _head(manifest: Manifest, part: ModelPart) -> bytes:
    """What comes before the tensors in a safetensors file: the length of a table, and the table."""
    if part.file:
        return b""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in manifest.tensors(part):
        begin, end = end, end + tensor.size
        table[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    content = json.dumps(table, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # keeps the data aligned
    return len(content).to_bytes(8, "little") + content


def _write_whole(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _own_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"Weights of other nodes cannot be stored in {folder}: {error.strerror}.",
            hint="Make room or permissions there, or set PENSTOCK_CACHE to another folder. What was fetched is kept.",
        ) from error
