"""PeerStore: what was fetched from other nodes, part by part. It is a model folder that may hold some layers only.

Such a folder lies in the cache under the hash of its manifest, which says what each part must be. A part that is on its way
is a file `….part` that is appended to; it gets its name once it is whole and every hash in it is right.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import CorruptWeights, ModelError
from penstock.model.hashing import read_range
from penstock.model.manifest import Manifest, Part
from penstock.model.sources.cache import ORIGIN, cache_dir, locked
from penstock.progress import Progress

MANIFEST = "manifest.json"


class WrongBytes(Exception):
    """What came of a part is not what the manifest says; `what` names the tensor or the file. The part was thrown away."""

    def __init__(self, part: Part, what: str) -> None:
        super().__init__(f"{what} is not what it should be")
        self.part, self.what = part, what


class PeerStore:
    """Making one writes what is known already: config.json, and the manifest."""

    def __init__(self, manifest: Manifest, model: str) -> None:
        assert manifest.complete, "there is no telling what the parts must be"
        self.manifest = manifest
        self.folder = cache_dir() / "peers" / manifest.hash
        origin = json.dumps({"name": model, "source": f"peers:{manifest.hash}", "licence": ""}, indent=2) + "\n"
        with _own_disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / ORIGIN).exists():
                _write_whole(self.folder / ORIGIN, origin.encode())
            for name, content in (("config.json", manifest.config.encode()), (MANIFEST, manifest.encode())):
                path = self.folder / name
                if not path.exists() or path.read_bytes() != content:
                    _write_whole(path, content)

    @classmethod
    def find(cls, weights: str, model: str) -> PeerStore | None:
        """The store of the manifest with this hash, if there is one."""
        if not re.fullmatch(r"[0-9a-f]{64}", weights):
            return None
        try:
            manifest = Manifest.decode((cache_dir() / "peers" / weights / MANIFEST).read_bytes())
        except (OSError, CorruptWeights):
            return None
        return cls(manifest, model) if manifest.hash == weights else None

    def has(self, part: Part) -> bool:
        return (self.folder / _file_name(part)).is_file()

    def fetched(self, part: Part) -> int:
        """Bytes of the part that are here, checked or not."""
        if self.has(part):
            return self.manifest.size(part)
        try:
            size = _draft(self.folder, part).stat().st_size
        except FileNotFoundError:
            return 0
        return max(0, size - len(_head(self.manifest, part)))

    def incoming(self, part: Part) -> Incoming:
        """For who holds the lock."""
        return Incoming(self.folder, self.manifest, part)

    def locked(self, progress: Progress) -> AbstractContextManager[None]:
        """Two processes that want the same weights fetch them once."""
        return locked(f"peers-{self.manifest.hash[:12]}", progress=progress)


class Incoming:
    """A part on its way in. It goes on at `offset`, where the last one left off."""

    def __init__(self, folder: Path, manifest: Manifest, part: Part) -> None:
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


def _file_name(part: Part) -> str:
    if part.file:
        return part.file
    return "ends.safetensors" if part.layer is None else f"layer-{part.layer:05}.safetensors"


def _draft(folder: Path, part: Part) -> Path:
    return folder / f"{_file_name(part)}.part"


def _head(manifest: Manifest, part: Part) -> bytes:
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
