"""PeerStore: a model folder of parts that were fetched from other nodes. It may hold only some layers.

The folder lies in the cache under the hash of its manifest, which says what each part must be. A part that is being fetched is a
file `….part` that is appended to; it gets its name once it is complete and all its hashes match.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, ModelError
from penstock.model.files.cache import ORIGIN, cache_dir, locked
from penstock.progress import Progress
from penstock.weights.hashing import read_range
from penstock.weights.manifest import Manifest, ModelPart

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"


class WrongBytes(Exception):
    """A fetched part does not match the manifest, and was deleted. `what` names the tensor or the file."""

    def __init__(self, part: ModelPart, what: str) -> None:
        super().__init__(f"the hash of {what} does not match")
        self.part = part
        self.what = what


class PeerStore:
    """The store of one manifest. Creating it writes config.json, the manifest, and the index of which tensor is in which file."""

    def __init__(self, manifest: Manifest, model: str) -> None:
        assert manifest.complete, "parts are checked against it"
        self.manifest = manifest
        self.folder = _stores() / manifest.hash
        self._header_sizes: dict[ModelPart, int] = {}  # bytes before the tensors
        known = {
            ORIGIN: (json.dumps({"name": model, "source": f"peers:{manifest.hash}", "licence": ""}, indent=2) + "\n").encode(),
            "config.json": manifest.config.encode(),
            INDEX: _index(manifest),
            MANIFEST: manifest.encode(),
        }
        with _disk_errors_as_model_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, content in known.items():
                path = self.folder / name
                if not path.exists() or path.read_bytes() != content:
                    _write_whole(path, content)
        with suppress(OSError):  # the cache may be read-only
            os.utime(self.folder / MANIFEST)

    @classmethod
    def latest(cls, model: str, accepts: Callable[[str], bool]) -> PeerStore | None:
        """Return the store that was last used for the model of this name, among those whose manifest hash is accepted."""
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
            if manifest.hash == path.parent.name and accepts(manifest.hash):
                return cls(manifest, model)
        return None

    def has(self, part: ModelPart) -> bool:
        """Whether the whole part is here. Only its size is checked: its hashes were checked when it was fetched."""
        try:
            return (self.folder / _file_name(part)).stat().st_size == self._header(part) + self.manifest.size(part)
        except FileNotFoundError:
            return False

    def fetched(self, part: ModelPart) -> int:
        """Count the bytes of the part that are here, checked or not."""
        if self.has(part):
            return self.manifest.size(part)
        try:
            size = _draft(self.folder, part).stat().st_size
        except FileNotFoundError:
            return 0
        return max(0, size - self._header(part))

    def discard(self, part: ModelPart) -> None:
        """Delete a damaged part, so that it is fetched again."""
        with _disk_errors_as_model_errors(self.folder):
            (self.folder / _file_name(part)).unlink(missing_ok=True)
            _draft(self.folder, part).unlink(missing_ok=True)

    def incoming(self, part: ModelPart) -> Incoming:
        """Open a part for writing. The caller must hold the lock."""
        return Incoming(self.folder, self.manifest, part)

    def locked(self, progress: Progress) -> AbstractContextManager[None]:
        """Lock the store, so that two processes do not fetch the same weights."""
        return locked(f"peers-{self.manifest.hash[:12]}", progress=progress)

    def _header(self, part: ModelPart) -> int:
        if part not in self._header_sizes:
            self._header_sizes[part] = len(_header(self.manifest, part))
        return self._header_sizes[part]


class Incoming:
    """A part that is being fetched. It continues at `offset`, where the last attempt stopped."""

    def __init__(self, folder: Path, manifest: Manifest, part: ModelPart) -> None:
        self._folder = folder
        self._manifest = manifest
        self._part = part
        self._path = _draft(folder, part)
        self._header = _header(manifest, part)
        self.size = manifest.size(part)
        with _disk_errors_as_model_errors(folder):
            self._file = open(self._path, "a+b", buffering=0)  # noqa: SIM115  # closed by `close`
            length = self._file.seek(0, os.SEEK_END)
            if not self._has_header() or length > len(self._header) + self.size:
                self._file.truncate(0)  # left by a process that died at once, or damaged
                self._append(self._header)
                length = len(self._header)
        self.offset = length - len(self._header)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data. If the disk is full, what was written before is kept."""
        with _disk_errors_as_model_errors(self._folder):
            self._append(data)
        self.offset += len(data)

    def finish(self) -> None:
        """Check every hash, then move the part to its place. Raises WrongBytes."""
        with _disk_errors_as_model_errors(self._folder):
            wrong = self._first_mismatch()
            if wrong:
                self._path.unlink()
                raise WrongBytes(self._part, wrong)
            os.fsync(self._file.fileno())
            self._path.rename(self._folder / _file_name(self._part))
            _flush_folder(self._folder)

    def _has_header(self) -> bool:
        self._file.seek(0)
        return self._file.read(len(self._header)) == self._header

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _first_mismatch(self) -> str:
        """Return the name of the first tensor or file whose hash is wrong; empty if all match."""
        if self._part.file:
            file = self._manifest.file(self._part)
            return "" if self._sha256(0, file.size) == file.sha256 else file.name
        start = len(self._header)
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
    """Write the index of a model in several files: the file of every tensor."""
    parts = [part for part in manifest.parts([LayerRange(0, len(manifest.layers))], ends=True) if not part.file]
    where = {tensor.name: _file_name(part) for part in parts for tensor in manifest.tensors(part)}
    return json.dumps({"metadata": {}, "weight_map": where}).encode()


def _file_name(part: ModelPart) -> str:
    if part.file:
        return part.file
    return "ends.safetensors" if part.layer is None else f"layer-{part.layer:05}.safetensors"


def _draft(folder: Path, part: ModelPart) -> Path:
    return folder / f"{_file_name(part)}.part"


def _header(manifest: Manifest, part: ModelPart) -> bytes:
    """Make the start of a safetensors file: the length of its table, and the table."""
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
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors_as_model_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"Weights from other nodes cannot be stored in {folder}: {error.strerror}.",
            hint="Free space or fix the permissions there, or set PENSTOCK_CACHE to another folder. What was fetched is kept.",
        ) from error
