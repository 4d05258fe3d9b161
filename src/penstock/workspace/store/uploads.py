"""Uploads: the files that clients upload for batches, and the output files of batches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.errors import UnknownFile
from penstock.workspace.store.disk_usage import UPLOAD_RECORD, StoredItem
from penstock.workspace.store.files import Place, footprint, is_number, not_none, open_file, read_record
from penstock.workspace.store.job_id import FILE_PREFIX, order
from penstock.workspace.store.workspace import Workspace

CONTENT, RECORD = "content", UPLOAD_RECORD
CHUNK_BYTES = 1 << 20
MAX_FILE_RECORD_BYTES = 1 << 12  # of file.json: a name has up to 255 characters


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The record of a file. `owner` identifies the API key that uploaded it, None is the operator; times are Unix time."""

    file_id: str
    name: str
    purpose: str
    created: float
    bytes: int
    sha256: str
    owner: str | None = None
    expires: float | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for a record that was tampered with."""
        texts = [self.name, self.purpose, self.sha256, *not_none(self.owner)]
        numbers = [self.created, self.bytes, *not_none(self.expires)]
        if not all(isinstance(text, str) for text in texts) or not all(map(is_number, numbers)):
            raise TypeError(self.file_id)


class Uploads:
    """The files of a workspace. An owner finds only its own."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def add(
        self,
        chunks: Iterable[bytes],
        *,
        name: str,
        purpose: str,
        owner: str | None = None,
        expires_after: float | None = None,
        file_id: str | None = None,
        size: int | None = None,
    ) -> StoredFile:
        """Store a file; it survives a power cut when this returns. `expires_after` is in seconds.

        size: that of the content, to refuse (StorageLimit) what does not fit the owner's limit. Without it, it is only counted.
        """
        content = _Counted(chunks)
        now = round(time.time(), 3)
        facts: dict[str, Any] = {"name": name, "purpose": purpose, "created": now, "owner": owner}
        facts["expires"] = None if expires_after is None else now + expires_after

        def record() -> Iterator[bytes]:
            facts.update(bytes=content.bytes, sha256=content.sha256.hexdigest())
            yield json.dumps(facts).encode() + b"\n"

        usage = self._workspace.usage
        needed = None if size is None else footprint(size, MAX_FILE_RECORD_BYTES)
        with nullcontext() if needed is None else usage.reserve(owner, needed):
            # the record is written last: only then is the size known
            file_id = self._workspace.add({CONTENT: content, RECORD: record()}, Place.FILES, file_id)
            usage.record(Place.FILES, file_id, StoredItem(owner, footprint(content.bytes, MAX_FILE_RECORD_BYTES)))
        return StoredFile(file_id=file_id, **facts)

    def get(self, file_id: str, owner: str | None = None) -> StoredFile:
        found = self.find(file_id)
        if found is None or found.owner != owner:
            raise UnknownFile(
                f"There is no file {FILE_PREFIX}{file_id[:80]}.", hint="It was deleted, has expired, or never existed."
            )
        return found

    def has(self, file_id: str) -> bool:
        """Whether the id is in use, even by a file that is unreadable or has expired."""
        with self._workspace.reading_folder(file_id, Place.FILES) as folder:
            return folder is not None

    def find(self, file_id: str) -> StoredFile | None:
        """Return a file of any owner; None if there is none, or it has expired."""
        found = self._record(file_id)
        return None if found is None or (found.expires is not None and found.expires <= time.time()) else found

    def all(self, owner: str | None = None) -> Iterator[StoredFile]:
        """Yield an owner's files, newest first."""
        for file_id in sorted(self._workspace.usage.names(Place.FILES, owner), key=order, reverse=True):
            found = self.find(file_id)
            if found is not None and found.owner == owner:
                yield found

    @contextmanager
    def reading(self, file_id: str, owner: str | None = None) -> Iterator[Iterator[bytes]]:
        """Open a file and yield its content in chunks."""
        with self.opened(file_id, owner) as file:
            yield iter(lambda: os.read(file, CHUNK_BYTES), b"")

    @contextmanager
    def opened(self, file_id: str, owner: str | None = None) -> Iterator[int]:
        """Open a file's content for reading. It stays readable if the file is deleted meanwhile."""
        self.get(file_id, owner)
        with self._workspace.reading_folder(file_id, Place.FILES) as folder:
            if folder is None:
                raise UnknownFile(f"There is no file {FILE_PREFIX}{file_id}.", hint="It was deleted a moment ago.")
            file = open_file(folder, CONTENT)
        if file is None:
            raise UnknownFile(f"The content of {FILE_PREFIX}{file_id} is missing.", hint="Upload it again.")
        try:
            yield file
        finally:
            os.close(file)

    def remove(self, file_id: str, owner: str | None = None) -> None:
        self.get(file_id, owner)
        self._workspace.throw_away([file_id], Place.FILES)

    def sweep(self) -> None:
        """Delete expired files."""
        now = time.time()
        records = {file_id: self._record(file_id) for file_id in self._workspace.names(Place.FILES)}
        expired = [file_id for file_id, found in records.items() if found and found.expires and found.expires <= now]
        self._workspace.throw_away(expired, Place.FILES)

    def _record(self, file_id: str) -> StoredFile | None:
        with self._workspace.reading_folder(file_id, Place.FILES) as folder:
            record = {} if folder is None else read_record(folder, RECORD) or {}
        try:
            return StoredFile(file_id=file_id, **{name: record[name] for name in _FIELDS})
        except (KeyError, TypeError):
            return None  # missing, or made by hand


_FIELDS = tuple(field.name for field in dataclasses.fields(StoredFile) if field.name != "file_id")


class _Counted:
    """Passes chunks through, and counts and hashes them."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self.bytes = 0
        self.sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.bytes += len(chunk)
            self.sha256.update(chunk)
            yield chunk
