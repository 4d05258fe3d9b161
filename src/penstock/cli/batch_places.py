"""Where a batch is worked on: at a server, or in a workspace of this machine. Both are asked in the same way."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from penstock.cli.client import CHUNK, Client, Refused
from penstock.errors import UnknownBatch
from penstock.workspace.job_id import BATCH

if TYPE_CHECKING:
    from penstock.workspace.batches import BatchView
    from penstock.workspace.layout import Workspace

OVER = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Input:
    """What is asked: the lines, and what the command line says about all of them."""

    content: BinaryIO
    name: str
    size: int
    sha256: str
    endpoint: str
    window: str


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch as it is now. The files are what `fetch` takes, `mistakes` what is wrong with the input."""

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

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def good(self) -> bool:
        return self.status == "completed" and not self.failed


class BatchPlace(Protocol):
    @property
    def flags(self) -> str:
        """How the command line names this place, so that a person comes back to it."""

    def create(self, asked: Input) -> str: ...

    def look(self, batch_id: str) -> BatchState: ...

    def all(self) -> Iterator[BatchState]:
        """The newest first."""

    def cancel(self, batch_id: str) -> BatchState: ...

    def fetch(self, file: str) -> Iterator[bytes]: ...


class ServerPlace:
    def __init__(self, client: Client, *, named: bool) -> None:
        self._client = client
        self.flags = f" --url {shlex.quote(str(client.url))}" if named else ""

    def create(self, asked: Input) -> str:
        asked.content.seek(0)
        file = self._client.upload("/v1/files", {"purpose": "batch"}, asked.name, asked.content, asked.size)
        wanted = {"input_file_id": file.get("id"), "endpoint": asked.endpoint, "completion_window": asked.window}
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

    def fetch(self, file: str) -> Iterator[bytes]:
        return self._client.download(f"/v1/files/{_path(file)}/content")


class LocalPlace:
    def __init__(self, workspace: Workspace, *, named: bool) -> None:
        from penstock.workspace.batches import Batches
        from penstock.workspace.uploads import Uploads

        self.workspace = workspace
        self.flags = f" --workspace {shlex.quote(str(workspace.path))}" if named else ""
        self._batches, self._uploads = Batches(workspace), Uploads(workspace)

    def same(self, asked: Input) -> BatchState | None:
        """One that asks the same, and is open, or was completed and has its files."""
        for view in self._batches.all():
            fits = (view.asked.sha256, view.asked.endpoint) == (asked.sha256, asked.endpoint)
            state = _local_state(view)
            files = [file for file in (state.output_file, state.error_file) if file is not None]
            there = state.status == "completed" and all(self._uploads.find(file) for file in files)
            if fits and (not state.over or there):
                return state
        return None

    def create(self, asked: Input) -> str:
        from penstock.workspace.batches import parse_window

        window = parse_window(asked.window)
        asked.content.seek(0)
        chunks = iter(lambda: asked.content.read(CHUNK), b"")
        file = self._uploads.add(chunks, name=asked.name, purpose="batch").file_id
        try:
            view = self._batches.create(file, endpoint=asked.endpoint, window=window, completion_window=asked.window)
        finally:
            self._uploads.remove(file)  # the batch has a copy
        return _local_state(view).id

    def validate(self, batch_id: str) -> None:
        """Before a model is loaded for it."""
        from penstock.workspace.batch_driver import validate

        validate(self.workspace, _own_id(batch_id))

    def look(self, batch_id: str) -> BatchState:
        return _local_state(self._batches.get(_own_id(batch_id)))

    def all(self) -> Iterator[BatchState]:
        return map(_local_state, self._batches.all())

    def cancel(self, batch_id: str) -> BatchState:
        return _local_state(self._batches.cancel(_own_id(batch_id)))

    def fetch(self, file: str) -> Iterator[bytes]:
        with self._uploads.reading(file) as chunks:
            yield from chunks


def _state(told: Any) -> BatchState:
    """What a server tells."""
    try:
        counts, errors = told.get("request_counts") or {}, (told.get("errors") or {}).get("data") or ()
        return BatchState(
            id=str(told["id"]),
            status=str(told["status"]),
            endpoint=str(told.get("endpoint")),
            created=float(told.get("created_at") or 0),
            total=int(counts.get("total") or 0),
            completed=int(counts.get("completed") or 0),
            failed=int(counts.get("failed") or 0),
            output_file=told.get("output_file_id"),
            error_file=told.get("error_file_id"),
            mistakes=tuple(_mistake(error.get) for error in errors),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Refused("The server sent a batch that is not of OpenAI's shape.") from None


def _local_state(view: BatchView) -> BatchState:
    end = view.end
    return BatchState(
        id=f"{BATCH}{view.batch_id}",
        status=str(view.status),
        endpoint=view.asked.endpoint,
        created=view.asked.created,
        total=view.counts.total,
        completed=view.counts.completed,
        failed=view.counts.failed,
        output_file=None if end is None else end.output_file,
        error_file=None if end is None else end.error_file,
        mistakes=() if end is None else tuple(_mistake(one.get) for one in end.mistakes),
    )


def _mistake(get: Callable[[str], Any]) -> str:
    where = f"line {get('line')}: " if get("line") else ""
    return f"{where}{get('message')}"


def _own_id(batch_id: str) -> str:
    if not batch_id.startswith(BATCH):
        raise UnknownBatch(f"There is no batch {batch_id[:80]}.", hint=f"Their names begin with {BATCH}")
    return batch_id.removeprefix(BATCH)


def _path(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
