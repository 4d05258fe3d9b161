"""PackedFile: packed weights on disk, mapped into memory, so that what was rounded once is not rounded at every start.

A file holds one layer, or the ends: the length of a header, the header as JSON, then the tensors, each at a multiple of 64 bytes.
It is written whole or not at all, and checked when it is opened.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.packed import ALIGNMENT
from penstock.model.files.known_hashes import hash_parts

SOURCE = "source"
Bytes = NDArray[np.uint8]
_LENGTH = 8  # bytes of the header's length
_UNKNOWN = "0" * 64  # as long as a checksum


class PackedFile:
    """digest: of the tensors that these were packed from."""

    def __init__(self, data: Bytes, places: Mapping[str, tuple[int, int]], digest: bytes) -> None:
        self.digest = digest
        self._data = data
        self._places = places

    def __getitem__(self, name: str) -> Bytes:
        start, size = self._places[name]
        return self._data[start : start + size]

    @classmethod
    def open(cls, path: Path, identity: str) -> PackedFile | None:
        """The file, or None if it is missing, damaged, or of another identity."""
        try:
            with path.open("rb") as file:
                mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            length = int.from_bytes(mapped[:_LENGTH].tobytes(), "little")
            header = json.loads(mapped[_LENGTH : _LENGTH + length].tobytes())
            if header["identity"] != identity:
                return None
            data = mapped[_LENGTH + length :]
            places = {name: (int(start), int(size)) for name, (start, size) in header["places"].items()}
            digest = bytes.fromhex(header["digest"])
            if len(data) != _end(places) or hash_parts(path, {"data": data.data})["data"] != header["sha256"]:
                return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return cls(data, places, digest)

    @classmethod
    def create(
        cls, path: Path, identity: str, digest: bytes, sizes: Mapping[str, int], fill: Callable[[str, Bytes], None]
    ) -> PackedFile:
        """Write the file with `fill(name, where)` for each tensor, and open it. Raises OSError where it cannot be written."""
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            places[name] = end, size
            end += size + -size % ALIGNMENT
        about = {"identity": identity, "digest": digest.hex(), "places": places, "sha256": _UNKNOWN}
        start = len(_header(about))
        descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "r+b") as file:
                os.fchmod(file.fileno(), 0o644)
                _reserve(file.fileno(), start + end)
                mapped = mmap.mmap(file.fileno(), start + end)
                whole = np.frombuffer(mapped, np.uint8)
                for name, (at, size) in places.items():
                    fill(name, whole[start + at : start + at + size])
                about["sha256"] = hashlib.sha256(whole[start:].data).hexdigest()
                whole[:start] = np.frombuffer(_header(about), np.uint8)
                mapped.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
        found = cls.open(path, identity)
        if found is None:
            raise OSError(errno.EIO, "what was written cannot be read again")
        return found


def remove_orphans(folder: Path) -> None:
    """Remove the packed weights of models that are gone. folder: has one folder for each model, with its path in `source`."""
    for source in folder.glob(f"*/{SOURCE}"):
        with suppress(OSError):
            if not Path(source.read_text(encoding="utf-8")).exists():
                shutil.rmtree(source.parent, ignore_errors=True)


def _reserve(descriptor: int, size: int) -> None:
    """Make a file so large. On a full disk this fails now, and not when its memory is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _end(places: Mapping[str, tuple[int, int]]) -> int:
    return max((start + size + -size % ALIGNMENT for start, size in places.values()), default=0)


def _header(about: Mapping[str, Any]) -> bytes:
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH + len(text)) % ALIGNMENT)
    return len(text).to_bytes(_LENGTH, "little") + text
