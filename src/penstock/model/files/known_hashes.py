"""Hashes of weights that were read before, saved until their file changes, so that not every start reads all of it again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from penstock.model.files.cache import cache_dir

_SMALL_FILE = 32 << 20  # bytes that are hashed in a tenth of a second
_ENDING = ".json"


class KnownHashes:
    """SHA-256 of named parts of a file, valid for one version of it (size, modification time, inode)."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # snapshots of the hub are links to files that several of them share
        self._version = _version(self._path)
        self._note = cache_dir() / "manifests" / f"{hashlib.sha256(os.fsencode(self._path)).hexdigest()[:32]}{_ENDING}"

    def get(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hashes that are known."""
        known = self._read()
        return {name: known[name] for name in names if name in known}

    def add(self, hashes: Mapping[str, str]) -> None:
        """Save what was computed since this object was made. If that fails, it is computed again next time."""
        with suppress(OSError):
            if _version(self._path) != self._version:
                return  # the file changed while it was read
            new = not self._note.exists()
            self._note.parent.mkdir(parents=True, exist_ok=True)
            note = {"file": str(self._path), "version": self._version, "sha256": {**self._read(), **hashes}}
            descriptor, draft = tempfile.mkstemp(prefix=".", dir=self._note.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(note, file)
                os.replace(draft, self._note)
            finally:
                Path(draft).unlink(missing_ok=True)
            if new:
                _remove_orphans(self._note.parent)

    def _read(self) -> dict[str, str]:
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            known = note["sha256"] if note["version"] == self._version else {}
            return {name: sha256 for name, sha256 in known.items() if isinstance(sha256, str)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}  # missing or damaged


def hash_parts(path: Path, parts: Mapping[str, memoryview]) -> dict[str, str]:
    """SHA-256 of named parts of a file, which map it: what is known is not read."""
    if path.stat().st_size < _SMALL_FILE:
        return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
    hashes = KnownHashes(path)
    known = hashes.get(parts)
    if new := {name: hashlib.sha256(part).hexdigest() for name, part in parts.items() if name not in known}:
        hashes.add(new)
    return known | new


def _version(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _remove_orphans(folder: Path) -> None:
    """Remove the saved hashes of files that are gone."""
    for note in folder.glob(f"*{_ENDING}"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if not Path(json.loads(note.read_text(encoding="utf-8"))["file"]).exists():
                note.unlink()
