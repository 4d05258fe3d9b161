"""Results: how the lines of a batch ended, as its journal has it, and the files that are made of that when all have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.domain.request import new_job_id
from penstock.errors import BadJob
from penstock.workspace.batch.batches import BatchRequest, BatchStatus, Counts
from penstock.workspace.batch.journal import JOURNAL, Entry, read_entry
from penstock.workspace.store.files import open_file
from penstock.workspace.store.job_id import BATCH_PREFIX
from penstock.workspace.store.layout import HeldJob, Workspace
from penstock.workspace.store.uploads import Uploads

Fact = Mapping[str, Any]
Refusal = Callable[[Mapping[str, str]], tuple[int, Mapping[str, Any]]]
"""The status and the body with which the API answers an error, of which it is given the record."""

FILES = {"output": True, "errors": False}  # what a batch leaves: the lines that are done, and the others


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Why lines that have not ended never will."""

    status: BatchStatus
    code: str
    message: str

    def fact(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


CANCELLED = Cancellation(BatchStatus.CANCELLED, "batch_cancelled", "The batch was cancelled before this line was done.")
REVOKED = Cancellation(BatchStatus.CANCELLED, "batch_cancelled", "The key that asked for the batch is not good any more.")
EXPIRED = Cancellation(BatchStatus.EXPIRED, "batch_expired", "This line was not done within the batch's completion window.")


class _Ended(NamedTuple):
    """Where the journal tells of a line."""

    start: int
    end: int
    done: bool


class Results:
    """`lost` is True when a line ended because the batch was called off."""

    def __init__(self, workspace: Workspace, held: HeldJob, request: BatchRequest, refusal: Refusal) -> None:
        self._batch_id, self._folder, self._request, self._refusal = held.job_id, held.folder, request, refusal
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
        """Ids for the files, decided before they are written, so that each is written once. Those of an earlier decision stay,
        unless somebody else has a file of that id: containers that share a workspace count their processes alike."""
        kinds = {ended.done for ended in self._ended.values()}
        return {kind: self._free_id(before.get(kind), done) if done in kinds else None for kind, done in FILES.items()}

    def write(self, names: Fact) -> bool:
        """When this is True, the files survive a power cut. False if somebody else has a file of such an id."""
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
            file_id = new_job_id()
        return file_id

    def _is_taken(self, file_id: str, done: bool) -> bool:
        found = self._uploads.find(file_id)
        if found is None:
            return self._uploads.has(file_id)
        return (found.name, found.owner) != (self._name(done), self._request.owner)

    def _name(self, done: bool) -> str:
        return f"{BATCH_PREFIX}{self._batch_id}_{'output' if done else 'error'}.jsonl"

    def _lines(self, journal: int, done: bool) -> Iterator[bytes]:
        """Those of the lines that are done, or of the others, in the order of the input."""
        for _, ended in sorted(self._ended.items()):
            if ended.done is done:
                answer = self._answer(read_entry(journal, ended.start, ended.end))
                yield json.dumps(answer, separators=(",", ":")).encode() + b"\n"

    @contextmanager
    def _journal(self) -> Iterator[int]:
        file = open_file(self._folder, JOURNAL)
        if file is None:
            raise BadJob(f"There is no {JOURNAL} any more.")
        try:
            yield file
        finally:
            os.close(file)

    def _answer(self, fact: Fact) -> dict[str, Any]:
        request_id = fact.get("job") or f"{self._batch_id}_{fact['n']}"
        line = {"id": f"batch_req_{request_id}", "custom_id": fact["custom_id"], "response": None, "error": fact.get("off")}
        if "off" not in fact:
            status, body = (200, fact["body"]) if "body" in fact else self._refusal(fact["refused"])
            line["response"] = {"status_code": status, "request_id": request_id, "body": body}
        return line
