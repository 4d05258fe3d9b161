"""Results: how the lines of a batch ended, as its journal says, and the output files made from that."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.domain.request import new_public_id
from penstock.errors import BadJob
from penstock.workspace.batch.batches import BatchRequest, BatchStatus, Counts
from penstock.workspace.batch.journal import JOURNAL, Entry, read_entry
from penstock.workspace.store.files import open_file
from penstock.workspace.store.job_id import BATCH_PREFIX
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import HeldJob, Workspace

Fact = Mapping[str, Any]
Refusal = Callable[[Mapping[str, str]], tuple[int, Mapping[str, Any]]]
"""Turns the record of an error into the status and the body that the API would answer with."""

REQUEST_ID_CHARS = 32
FILES = {"output": True, "errors": False}  # for each output file: whether it holds the lines that are done (True) or the others


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Why a batch, and its lines that have not ended, are cancelled."""

    status: BatchStatus
    code: str
    message: str

    def fact(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


CANCELLED = Cancellation(BatchStatus.CANCELLED, "batch_cancelled", "The batch was cancelled before this line was done.")
REVOKED = Cancellation(BatchStatus.CANCELLED, "batch_cancelled", "The API key that created the batch is no longer valid.")
EXPIRED = Cancellation(BatchStatus.EXPIRED, "batch_expired", "This line was not done within the batch's completion window.")


class _Ended(NamedTuple):
    """Where the journal has the end of a line."""

    start: int
    end: int
    done: bool


class Results:
    """The lines that have ended. `lost` is True once a line ended because the batch was cancelled."""

    def __init__(self, workspace: Workspace, held: HeldJob, request: BatchRequest, refusal: Refusal) -> None:
        self._batch_id = held.job_id
        self._folder = held.folder
        self._request = request
        self._refusal = refusal
        self._uploads = Uploads(workspace)
        self._ended: dict[int, _Ended] = {}
        self.lost = False

    def learn(self, entry: Entry) -> None:
        self._ended[entry.fact["n"]] = _Ended(entry.start, entry.end, "body" in entry.fact)
        self.lost |= "off" in entry.fact

    def __contains__(self, n: int) -> bool:
        return n in self._ended

    def __len__(self) -> int:
        return len(self._ended)

    def counts(self, total: int) -> Counts:
        completed = sum(ended.done for ended in self._ended.values())
        return Counts(total, completed, len(self) - completed)

    # ---- files ----

    def names(self, before: Fact) -> dict[str, str | None]:
        """Choose ids for the output files before they are written, so that each is written once. Ids chosen `before` stay,
        unless a foreign file has them: containers that share a workspace have the same process ids."""
        kinds = {ended.done for ended in self._ended.values()}
        return {kind: self._free_id(before.get(kind), done) if done in kinds else None for kind, done in FILES.items()}

    def write(self, names: Fact) -> bool:
        """Write the output files; they survive a power cut when this returns True. False if a foreign file has such an id."""
        for kind, done in FILES.items():
            file_id = names[kind]
            if file_id is None:
                continue
            if self._is_taken(file_id, done):
                return False
            if self._uploads.find(file_id) is None:
                self._add(file_id, done)
        return True

    def _add(self, file_id: str, done: bool) -> None:
        with self._journal() as journal:
            self._uploads.add(
                self._lines(journal, done),
                name=self._name(done),
                purpose="batch_output",
                owner=self._request.owner,
                expires_after=self._request.keep_output,
                file_id=file_id,
            )

    def _free_id(self, file_id: str | None, done: bool) -> str:
        while file_id is None or self._is_taken(file_id, done):
            file_id = new_public_id()
        return file_id

    def _is_taken(self, file_id: str, done: bool) -> bool:
        found = self._uploads.find(file_id)
        if found is None:
            return self._uploads.has(file_id)
        return (found.name, found.owner) != (self._name(done), self._request.owner)

    def _name(self, done: bool) -> str:
        return f"{BATCH_PREFIX}{self._batch_id}_{'output' if done else 'error'}.jsonl"

    def _lines(self, journal: int, done: bool) -> Iterator[bytes]:
        """Yield the answers of the lines that are done, or of the others, in the order of the input."""
        for _, ended in sorted(self._ended.items()):
            if ended.done is done:
                answer = self._answer(read_entry(journal, ended.start, ended.end))
                yield json.dumps(answer, separators=(",", ":")).encode() + b"\n"

    @contextmanager
    def _journal(self) -> Iterator[int]:
        file = open_file(self._folder, JOURNAL)
        if file is None:
            raise BadJob(f"{JOURNAL} was removed.")
        try:
            yield file
        finally:
            os.close(file)

    def _answer(self, fact: Fact) -> dict[str, Any]:
        request_id = hashlib.sha256(f"{self._batch_id}_{fact['n']}".encode()).hexdigest()[:REQUEST_ID_CHARS]
        line = {"id": f"batch_req_{request_id}", "custom_id": fact["custom_id"], "response": None, "error": fact.get("off")}
        if "off" not in fact:
            status, body = (200, fact["body"]) if "body" in fact else self._refusal(fact["refused"])
            line["response"] = {"status_code": status, "request_id": request_id, "body": body}
        return line
