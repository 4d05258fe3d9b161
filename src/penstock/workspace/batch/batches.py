"""Batches: files of many requests. Creates, lists and cancels them; BatchRun works on them.

batches/ID/
  input.jsonl    the requests, one on each line       } never changed
  batch.json     the settings of the batch            }
  results.jsonl  the journal: how each line ended
  cancel         an empty file: cancellation was requested
  end.json       how it ended; once it is whole, the batch is over
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from penstock.domain.duration import DAY, parse_duration
from penstock.errors import RequestError, UnknownBatch
from penstock.workspace.batch.journal import read_entries
from penstock.workspace.batch.lines import Lines, Mistake
from penstock.workspace.store.disk import touch
from penstock.workspace.store.disk_usage import BATCH_END, BATCH_REQUEST, StoredItem
from penstock.workspace.store.files import Place, footprint, has_file, is_number, not_none, read_record
from penstock.workspace.store.job_id import BATCH_PREFIX, is_job_id, order
from penstock.workspace.store.root import wrap_os_errors
from penstock.workspace.store.uploads import StoredFile, Uploads
from penstock.workspace.store.workspace import Workspace

INPUT_FILE, REQUEST_FILE, CANCEL_FILE, END_FILE = "input.jsonl", BATCH_REQUEST, "cancel", BATCH_END
MAX_WINDOW_S = 30 * DAY
MAX_REQUEST_BYTES = 1 << 14  # of batch.json: its metadata has up to 9 kB
MAX_CACHED_JOURNALS = 1000  # others are reread from the start


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The contents of batch.json.

    window: seconds after `created`; `completion_window` is the same as the client wrote it.
    sha256: of the input.
    keep_output: seconds to keep the output files; None keeps them.
    models: those of the models in its lines that were served when it was created; None in the list stands for lines
        without a model. Without a list, that was unknown."""

    input_file: str
    endpoint: str
    window: float
    completion_window: str
    created: float
    sha256: str
    owner: str | None = None
    metadata: Mapping[str, str] | None = None
    keep_output: float | None = None
    models: Sequence[str | None] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for a record that was tampered with."""
        about = {} if self.metadata is None else self.metadata
        texts = [self.input_file, self.endpoint, self.completion_window, self.sha256, *not_none(self.owner), *about.values()]
        texts += not_none(*(() if self.models is None else self.models))
        numbers = [self.window, self.created, *not_none(self.keep_output)]
        if not all(isinstance(text, str) for text in texts) or not all(map(is_number, numbers)):
            raise TypeError(REQUEST_FILE)

    @property
    def due(self) -> float:
        return self.created + self.window

    def offers(self, model: str | None) -> bool:
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Counts:
    total: int = 0
    completed: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if not all(map(is_number, (self.total, self.completed, self.failed))):
            raise TypeError(END_FILE)

    @property
    def ended(self) -> int:
        return self.completed + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEnd:
    """The contents of end.json. `mistakes` say why the input was refused; the files are ids."""

    status: BatchStatus
    ended: float
    begun: float | None = None
    finalizing: float | None = None
    counts: Counts = Counts()
    output_file: str | None = None
    error_file: str | None = None
    mistakes: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        files = not_none(self.output_file, self.error_file)
        numbers = [self.ended, *not_none(self.begun, self.finalizing)]
        if not all(isinstance(file, str) and is_job_id(file) for file in files) or not all(map(is_number, numbers)):
            raise TypeError(END_FILE)
        for mistake in self.mistakes:
            Mistake(**mistake)

    def record(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch as it is now. `end` is None while it is open."""

    batch_id: str
    request: BatchRequest
    status: BatchStatus
    counts: Counts
    begun: float | None = None
    cancelling: float | None = None
    end: BatchEnd | None = None

    def missing_models(self, accepts: Callable[[str | None], bool]) -> list[str]:
        """Models that lines of an open batch ask for and that are not served now."""
        models = self.request.models or () if self.end is None else ()
        return [model for model in models if model is not None and not accepts(model)]


@dataclass(slots=True)
class _JournalSummary:
    """What the journal says up to `offset`."""

    offset: int = 0
    begun: float | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    def read_on(self, folder: int) -> None:
        for entry in read_entries(folder, self.offset):
            self.offset = entry.end
            match entry.fact:
                case {"lines": total, "at": at} if is_number(total) and is_number(at):
                    self.total, self.begun = total, at
                case {"body": _}:
                    self.completed += 1
                case {"n": _}:
                    self.failed += 1


class Batches:
    """The batches of a workspace. An owner finds only its own. Journals are cached, so a second look reads only what is new."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._uploads = Uploads(workspace)
        self._summaries: dict[str, _JournalSummary] = {}
        self._lock = threading.Lock()

    def create(
        self,
        input_file: str,
        *,
        endpoint: str,
        window: float,
        completion_window: str,
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
        keep_output: float | None = None,
        offers: Callable[[str | None], bool] | None = None,
    ) -> BatchView:
        """Create a batch with its own copy of the input; it survives a power cut when this returns. Raises StorageLimit or
        KeyLimit if the owner has too much stored, or too many batches open.

        offers: whether a model is served now; lines that ask for other models will fail. None if that is unknown."""
        found, usage = self._uploads.get(input_file, owner), self._workspace.usage
        with usage.reserve(owner, footprint(found.bytes, MAX_REQUEST_BYTES), batches=1):
            request = self._request(found, endpoint, window, completion_window, metadata, keep_output, offers)
            record = json.dumps(dataclasses.asdict(request)).encode() + b"\n"
            with self._uploads.reading(input_file, owner) as chunks:
                batch_id = self._workspace.add({INPUT_FILE: chunks, REQUEST_FILE: record}, Place.BATCHES)
            usage.record(Place.BATCHES, batch_id, StoredItem(owner, footprint(found.bytes, len(record)), open=True))
        return self.get(batch_id, owner)

    def _request(
        self,
        found: StoredFile,
        endpoint: str,
        window: float,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        keep_output: float | None,
        offers: Callable[[str | None], bool] | None,
    ) -> BatchRequest:
        input_file, owner = found.file_id, found.owner
        models = None if offers is None else [*filter(offers, self._models(input_file, owner))]
        return BatchRequest(
            input_file=input_file,
            endpoint=endpoint,
            window=window,
            completion_window=completion_window,
            created=round(time.time(), 3),
            sha256=found.sha256,
            owner=owner,
            metadata=metadata,
            keep_output=keep_output,
            models=models,
        )

    def get(self, batch_id: str, owner: str | None = None) -> BatchView:
        view = self._find(batch_id, owner)
        if view is None:
            raise UnknownBatch(f"There is no batch {BATCH_PREFIX}{batch_id[:80]}.", hint="It was removed, or never existed.")
        return view

    def all(self, owner: str | None = None) -> Iterator[BatchView]:
        """Yield an owner's batches, newest first."""
        for batch_id in sorted(self._workspace.usage.names(Place.BATCHES, owner), key=order, reverse=True):
            if (view := self._find(batch_id, owner)) is not None:
                yield view

    def cancel(self, batch_id: str, owner: str | None = None) -> BatchView:
        """Request cancellation; the supervisor sees it within a second. A batch that has ended stays as it is."""
        view = self.get(batch_id, owner)
        if view.end is None:
            with wrap_os_errors(self._workspace.path), self._workspace.reading_folder(batch_id, Place.BATCHES) as folder:
                if folder is not None:
                    touch(self._workspace.disk, folder, CANCEL_FILE)
                    self._workspace.disk.sync(folder)
        return self.get(batch_id, owner)

    def remove(self, batch_id: str, owner: str | None = None) -> None:
        """Delete a batch that has ended, with its copy of the input and its journal. Its output files stay."""
        if self.get(batch_id, owner).end is None:
            raise RequestError(f"The batch {BATCH_PREFIX}{batch_id} has not ended.", hint="Cancel it first.")
        self._workspace.throw_away([batch_id], Place.BATCHES)

    def _find(self, batch_id: str, owner: str | None) -> BatchView | None:
        with self._workspace.reading_folder(batch_id, Place.BATCHES) as folder:
            request = None if folder is None else read_batch_request(folder)
            if folder is None or request is None or request.owner != owner:
                return None
            return self._view(batch_id, folder, request)

    def _models(self, input_file: str, owner: str | None) -> list[str | None]:
        with self._uploads.opened(input_file, owner) as file:
            return sorted(Lines(file).models(), key=lambda model: model or "")

    def _view(self, batch_id: str, folder: int, request: BatchRequest) -> BatchView:
        cancelling = _modified_at(folder, CANCEL_FILE)
        end = read_end(folder)
        if end is not None:
            with self._lock:
                self._summaries.pop(batch_id, None)
            return BatchView(batch_id, request, end.status, end.counts, end.begun, cancelling, end)
        with self._lock:
            summary = self._summaries[batch_id] = self._summaries.pop(batch_id, _JournalSummary())
            if len(self._summaries) > MAX_CACHED_JOURNALS:
                del self._summaries[next(iter(self._summaries))]
            summary.read_on(folder)
            counts = Counts(summary.total, summary.completed, summary.failed)
        if cancelling is not None:
            status = BatchStatus.CANCELLING
        elif summary.begun is None:
            status = BatchStatus.VALIDATING
        else:
            status = BatchStatus.FINALIZING if counts.ended >= counts.total else BatchStatus.IN_PROGRESS
        return BatchView(batch_id, request, status, counts, summary.begun, cancelling)


def parse_window(text: str) -> float:
    """Parse a completion window into seconds."""
    found = parse_duration(text)
    if found is None or not 0 < found <= MAX_WINDOW_S:
        raise RequestError(
            f"completion_window = '{text[:40]}' cannot be used.",
            field="completion_window",
            hint="Write it as 24h, 90m or 7d; 30d is the longest.",
        )
    return found


def is_open(workspace: Workspace, batch_id: str) -> bool:
    """Whether the batch exists and has not ended."""
    with workspace.reading_folder(batch_id, Place.BATCHES) as folder:
        return folder is not None and read_end(folder) is None and read_batch_request(folder) is not None


def end_of(workspace: Workspace, batch_id: str) -> BatchEnd | None:
    """How a batch ended; None if it has not, or does not exist."""
    with workspace.reading_folder(batch_id, Place.BATCHES) as folder:
        return None if folder is None else read_end(folder)


def open_batches(workspace: Workspace, over: set[str] | None = None) -> list[str]:
    """Ids of the batches that have not ended. Pass the same set `over` again to skip those known to have ended."""
    over = set() if over is None else over
    found = [batch_id for batch_id in workspace.names(Place.BATCHES) if batch_id not in over]
    over.update(batch_id for batch_id in found if not is_open(workspace, batch_id))
    return [batch_id for batch_id in found if batch_id not in over]


def read_batch_request(folder: int) -> BatchRequest | None:
    record = read_record(folder, REQUEST_FILE)
    try:
        return None if record is None else BatchRequest(**record)
    except (AttributeError, TypeError):
        return None  # made by hand, or by another version


def read_end(folder: int) -> BatchEnd | None:
    record = read_record(folder, END_FILE)
    if record is None:
        return None
    try:
        counts = Counts(**record.pop("counts"))
        return BatchEnd(
            **record | {"status": BatchStatus(record["status"]), "counts": counts, "mistakes": tuple(record["mistakes"])}
        )
    except (KeyError, TypeError, ValueError):  # made by hand, or by another version
        return None


def is_cancel_requested(folder: int) -> bool:
    return has_file(folder, CANCEL_FILE)


def _modified_at(folder: int, name: str) -> float | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return None
