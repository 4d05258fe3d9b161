"""Responses: stored answers of the API, so that a conversation can continue from any of them.

    responses/ID/owner.json      whose it is
    responses/ID/items.json      the whole conversation before it: no chain breaks when an older answer is removed
    responses/ID/response.json   the answer as the client got it

The API decides what the last two hold. An answer is written once, whole, and never changed. Its id contains its time, so
expiry is checked without opening it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.workspace.store.disk_usage import RESPONSE_OWNER, StoredItem
from penstock.workspace.store.files import MAX_RESULT_BYTES, Place, footprint, read_file
from penstock.workspace.store.job_id import order
from penstock.workspace.store.workspace import Workspace

OWNER, ITEMS, RESPONSE = RESPONSE_OWNER, "items.json", "response.json"


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A stored answer and the conversation before it, both as JSON."""

    response: bytes
    items: bytes


class Responses:
    """Stores answers for `keep` seconds. An owner (identifies an API key; None is the operator) finds only its own."""

    def __init__(self, workspace: Workspace, *, keep: float, clock: Callable[[], float] = time.time) -> None:
        self._workspace = workspace
        self._keep = keep
        self._clock = clock

    def put(self, job_id: str, record: ResponseRecord, *, owner: str | None) -> None:
        """Store an answer; it survives a power cut when this returns. Raises StorageLimit if the owner has no room for it."""
        files = {OWNER: json.dumps(owner).encode(), ITEMS: record.items, RESPONSE: record.response}
        usage, size = self._workspace.usage, footprint(*map(len, files.values()))
        with usage.reserve(owner, size):
            self._workspace.add(files, Place.RESPONSES, job_id)
            usage.record(Place.RESPONSES, job_id, StoredItem(owner, size))

    def check_room(self, items: int, *, owner: str | None) -> None:
        """Raise StorageLimit if an answer to a conversation of so many bytes could not be stored, however short it is."""
        with self._workspace.usage.reserve(owner, footprint(0, items, items)):
            pass

    def get(self, job_id: str, *, owner: str | None) -> ResponseRecord | None:
        """Return an answer; None if there is none, it has expired, or it has another owner."""
        if self._has_expired(job_id):
            return None
        with self._workspace.reading_folder(job_id, Place.RESPONSES) as folder:
            if folder is None:
                return None
            stored_owner, items, response = (read_file(folder, name, MAX_RESULT_BYTES) for name in (OWNER, ITEMS, RESPONSE))
        if stored_owner is None or items is None or response is None:
            return None  # it is being removed
        try:
            is_owned = json.loads(stored_owner) == owner
        except (ValueError, RecursionError):  # a damaged record belongs to nobody
            return None
        return ResponseRecord(response, items) if is_owned else None

    def remove(self, job_id: str, *, owner: str | None) -> bool:
        """Delete an answer, and return whether it existed."""
        return self.get(job_id, owner=owner) is not None and bool(self._workspace.throw_away([job_id], Place.RESPONSES))

    def sweep(self) -> int:
        """Delete expired answers, and return how many."""
        expired = [job_id for job_id in self._workspace.names(Place.RESPONSES) if self._has_expired(job_id)]
        return len(self._workspace.throw_away(expired, Place.RESPONSES))

    def _has_expired(self, job_id: str) -> bool:
        return order(job_id)[0] + self._keep <= self._clock()
