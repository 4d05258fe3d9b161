"""Responses: answers of the API that are kept, so that a conversation can go on from any of them.

    responses/ID/owner.json      whose it is
    responses/ID/items.json      all that was said before it: no chain breaks when an older answer is gone
    responses/ID/response.json   the answer as its client has it

What the last two hold is the API's business. An answer is written once, whole, and never changed. Its id tells when it was
given, so whether its time is over is known without a look inside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.workspace.store.files import MAX_RESULT_BYTES, Place, read_file
from penstock.workspace.store.job_id import order
from penstock.workspace.store.layout import Workspace

OWNER, ITEMS, RESPONSE = "owner.json", "items.json", "response.json"


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """Both are JSON."""

    response: bytes
    items: bytes


class Responses:
    """`keep` is for how many seconds. An `owner` (what tells a key from all others, None for whoever runs the server) finds only
    its own."""

    def __init__(self, workspace: Workspace, *, keep: float, clock: Callable[[], float] = time.time) -> None:
        self._workspace, self._keep, self._clock = workspace, keep, clock

    def put(self, job_id: str, record: ResponseRecord, *, owner: str | None) -> None:
        """When this returns, it survives a power cut."""
        files = {OWNER: json.dumps(owner).encode(), ITEMS: record.items, RESPONSE: record.response}
        self._workspace.add(files, Place.RESPONSES, job_id)

    def get(self, job_id: str, *, owner: str | None) -> ResponseRecord | None:
        """None also where it is somebody else's, or its time is over."""
        if self._has_expired(job_id):
            return None
        with self._workspace.reading_folder(job_id, Place.RESPONSES) as folder:
            if folder is None:
                return None
            stored_owner, items, response = (read_file(folder, name, MAX_RESULT_BYTES) for name in (OWNER, ITEMS, RESPONSE))
        if stored_owner is None or items is None or response is None:
            return None  # it is being removed
        return ResponseRecord(response, items) if json.loads(stored_owner) == owner else None

    def remove(self, job_id: str, *, owner: str | None) -> bool:
        """Whether it was there."""
        return self.get(job_id, owner=owner) is not None and bool(self._workspace.throw_away([job_id], Place.RESPONSES))

    def sweep(self) -> int:
        """Remove those whose time is over, each whole."""
        expired = [job_id for job_id in self._workspace.names(Place.RESPONSES) if self._has_expired(job_id)]
        return len(self._workspace.throw_away(expired, Place.RESPONSES))

    def _has_expired(self, job_id: str) -> bool:
        return order(job_id)[0] + self._keep <= self._clock()
