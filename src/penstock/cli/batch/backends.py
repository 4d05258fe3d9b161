"""BatchBackend: where a batch is worked on, a server or a workspace on this machine."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cli.batch.input import Input
from penstock.cli.client.api import UPLOAD_CHUNK_BYTES, Client, ServerRefused
from penstock.domain.duration import DAY
from penstock.errors import UnknownBatch
from penstock.workspace.store.job_id import BATCH_PREFIX
from penstock.workspace.store.root import wrap_os_errors

if TYPE_CHECKING:
    from penstock.workspace.batch.batches import BatchView
    from penstock.workspace.store.workspace import Workspace

MAX_EXPIRES_AFTER = 30 * DAY  # that OpenAI knows
OVER = ("completed", "failed", "expired", "cancelled")
INPUT_METADATA = "penstock_input"  # metadata field with the SHA-256 of the input, by which a batch is found again

Offers = Callable[[str | None], bool]
"""Whether a model is served, by any of its names; None asks whether any model is."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch as it is now.

    output_file, error_file: ids for `fetch`.
    mistakes: what is wrong with the input.
    missing_models: models that its lines wait for.
    waiting: which limit of its key it waits for.
    input: SHA-256 of the input."""

    id: str
    status: str
    endpoint: str
    created: float
    total: int
    completed: int
    failed: int
    output_file: str | None = None
    error_file: str | None = None
    mistakes: tuple[str, ...] = ()
    missing_models: tuple[str, ...] = ()
    waiting: str | None = None
    input: str | None = None

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def open(self) -> bool:
        return not self.over and self.status != "cancelling"

    @property
    def good(self) -> bool:
        return self.status == "completed" and not self.failed


class BatchBackend(Protocol):
    @property
    def flags(self) -> str:
        """The options that select this backend, for commands that we suggest."""

    def create(self, batch_input: Input) -> str: ...

    def look(self, batch_id: str) -> BatchState: ...

    def all(self) -> Iterator[BatchState]:
        """Yield all batches, newest first."""

    def cancel(self, batch_id: str) -> BatchState: ...

    def has(self, file: str) -> bool: ...

    def fetch(self, file: str) -> Iterator[bytes]: ...


def find_same(backend: BatchBackend, batch_input: Input) -> BatchState | None:
    """Find a batch with the same input that is open, or was completed and still has its files."""
    for state in backend.all():
        if (state.input, state.endpoint) == (batch_input.sha256, batch_input.endpoint):
            files = [file for file in (state.output_file, state.error_file) if file is not None]
            if state.open or (state.status == "completed" and all(map(backend.has, files))):
                return state
    return None


class RemoteBatchBackend:
    def __init__(self, client: Client, *, named: bool) -> None:
        self._client = client
        self.flags = f" --url {shlex.quote(str(client.url))}" if named else ""

    def create(self, batch_input: Input) -> str:
        from penstock.workspace.batch.batches import parse_window

        batch_input.content.seek(0)
        needed = min(math.ceil(parse_window(batch_input.window)) + DAY, MAX_EXPIRES_AFTER)
        fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": str(needed)}
        file = self._client.upload("/v1/files", fields, batch_input.name, batch_input.content, batch_input.size)
        wanted = {
            "input_file_id": file.get("id"),
            "endpoint": batch_input.endpoint,
            "completion_window": batch_input.window,
            "metadata": {INPUT_METADATA: batch_input.sha256},
        }
        return _state(self._client.send("/v1/batches", wanted)).id

    def look(self, batch_id: str) -> BatchState:
        return _state(self._client.get(f"/v1/batches/{_path(batch_id)}"))

    def all(self) -> Iterator[BatchState]:
        after = ""
        while True:
            page = self._client.get(f"/v1/batches?limit=100{after}")
            for one in page.get("data") or ():
                yield _state(one)
            if not page.get("has_more"):
                return
            after = f"&after={_path(page['last_id'])}"

    def cancel(self, batch_id: str) -> BatchState:
        return _state(self._client.send(f"/v1/batches/{_path(batch_id)}/cancel"))

    def has(self, file: str) -> bool:
        try:
            self._client.get(f"/v1/files/{_path(file)}")
        except ServerRefused as error:
            if error.status != 404:
                raise
            return False
        return True

    def fetch(self, file: str) -> Iterator[bytes]:
        return self._client.download(f"/v1/files/{_path(file)}/content")


class LocalBatchBackend:
    """A workspace on this machine. `offers` is None if the models are unknown."""

    def __init__(self, workspace: Workspace, offers: Offers | None, *, named: bool) -> None:
        from penstock.workspace.batch.batches import Batches
        from penstock.workspace.store.uploads import Uploads

        self.workspace = workspace
        self.flags = f" --workspace {shlex.quote(str(workspace.path))}" if named else ""
        self._batches = Batches(workspace)
        self._uploads = Uploads(workspace)
        self._offered = offers

    @property
    def _offers(self) -> Offers | None:
        """None while another process serves the folder: its models are unknown here."""
        return None if self.workspace.is_served() else self._offered

    def create(self, batch_input: Input) -> str:
        from penstock.workspace.batch.batches import parse_window

        window = parse_window(batch_input.window)
        batch_input.content.seek(0)
        chunks = iter(lambda: batch_input.content.read(UPLOAD_CHUNK_BYTES), b"")
        with wrap_os_errors(self.workspace.path):
            file = self._uploads.add(chunks, name=batch_input.name, purpose="batch").file_id
            try:
                view = self._batches.create(
                    file, endpoint=batch_input.endpoint, window=window, completion_window=batch_input.window, offers=self._offers
                )
            finally:
                self._uploads.remove(file)  # the batch has a copy
        return self._state(view).id

    def validate(self, batch_id: str) -> None:
        """Check the input of a new batch before a model is loaded for it."""
        from penstock.workspace.worker.batch_supervisor import validate

        with wrap_os_errors(self.workspace.path):
            validate(self.workspace, _own_id(batch_id))

    def look(self, batch_id: str) -> BatchState:
        with wrap_os_errors(self.workspace.path):
            return self._state(self._batches.get(_own_id(batch_id)))

    def all(self) -> Iterator[BatchState]:
        with wrap_os_errors(self.workspace.path):
            yield from map(self._state, self._batches.all())

    def cancel(self, batch_id: str) -> BatchState:
        with wrap_os_errors(self.workspace.path):
            return self._state(self._batches.cancel(_own_id(batch_id)))

    def has(self, file: str) -> bool:
        return self._uploads.find(file) is not None

    def fetch(self, file: str) -> Iterator[bytes]:
        with wrap_os_errors(self.workspace.path), self._uploads.reading(file) as chunks:
            yield from chunks

    def _state(self, view: BatchView) -> BatchState:
        end, offers = view.end, self._offers
        return BatchState(
            id=f"{BATCH_PREFIX}{view.batch_id}",
            status=str(view.status),
            endpoint=view.request.endpoint,
            created=view.request.created,
            total=view.counts.total,
            completed=view.counts.completed,
            failed=view.counts.failed,
            output_file=None if end is None else end.output_file,
            error_file=None if end is None else end.error_file,
            mistakes=() if end is None else tuple(_mistake(one.get) for one in end.mistakes),
            missing_models=() if offers is None else tuple(view.missing_models(offers)),
            input=view.request.sha256,
        )


def _state(record: Any) -> BatchState:
    """Parse a batch object of the API."""
    try:
        counts, errors = record.get("request_counts") or {}, (record.get("errors") or {}).get("data") or ()
        return BatchState(
            id=str(record["id"]),
            status=str(record["status"]),
            endpoint=str(record.get("endpoint")),
            created=float(record.get("created_at") or 0),
            total=int(counts.get("total") or 0),
            completed=int(counts.get("completed") or 0),
            failed=int(counts.get("failed") or 0),
            output_file=record.get("output_file_id"),
            error_file=record.get("error_file_id"),
            mistakes=tuple(_mistake(error.get) for error in errors),
            missing_models=tuple(map(str, record.get("missing_models") or ())),
            waiting=str(record["waiting"]) if record.get("waiting") else None,
            input=(record.get("metadata") or {}).get(INPUT_METADATA),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ServerRefused("The server sent a batch object that is not in OpenAI's format.") from None


def _mistake(get: Callable[[str], Any]) -> str:
    where = f"line {get('line')}: " if get("line") else ""
    return f"{where}{get('message')}"


def _own_id(batch_id: str) -> str:
    if not batch_id.startswith(BATCH_PREFIX):
        raise UnknownBatch(f"There is no batch {batch_id[:80]}.", hint=f"Their names begin with {BATCH_PREFIX}")
    return batch_id.removeprefix(BATCH_PREFIX)


def _path(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
