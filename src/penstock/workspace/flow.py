"""Flow: the reading side of a workspace. Finds jobs, returns results, waits for jobs, and removes old ones."""

from __future__ import annotations

import hashlib
import heapq
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

from penstock.errors import BadJob, NotFinished, RequestError, UnknownJob, WorkspaceError
from penstock.workspace.batch.batches import end_of, is_open, open_batches
from penstock.workspace.store.files import (
    ERROR,
    FINISHED,
    MAX_RESULT_BYTES,
    PARTIAL,
    RESULT,
    SUSPECT,
    USAGE,
    Place,
    has_file,
    key_file,
    not_none,
    read_file,
    read_record,
)
from penstock.workspace.store.job_id import is_job_id, order
from penstock.workspace.store.parents import open_parents
from penstock.workspace.store.request import WorkRequest, read_request
from penstock.workspace.store.root import wrap_os_errors
from penstock.workspace.store.tokens import count_saved_tokens
from penstock.workspace.store.workspace import Workspace

MIN_POLL_S, MAX_POLL_S = 0.01, 0.1  # the polling interval grows
SERVER_CHECK_S = 1.0  # how often a wait checks that a server still works on the queue


class Status(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    MISSING = "missing"


PLACES = {
    Status.QUEUED: Place.READY,
    Status.RUNNING: Place.PROCESSING,
    Status.DONE: Place.OUTPUT,
    Status.FAILED: Place.FAILED,
}
STATUS = {place: status for status, place in PLACES.items()}


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job that has ended. `data` is the exact content of result.txt or error.txt, `usage` that of usage.json."""

    job_id: str
    status: Status
    data: bytes
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")

    @property
    def done(self) -> bool:
        return self.status is Status.DONE


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as it is now.

    request: None if request.json cannot be read.
    suspect: its server died, so it runs in isolation.
    waits_for: its parents that have not ended.
    will_fail: why it will not run, though it waits; empty if it will."""

    job_id: str
    status: Status
    request: WorkRequest | None
    usage: Mapping[str, Any] = field(default_factory=dict)
    suspect: bool = False
    waits_for: tuple[str, ...] = ()
    will_fail: str = ""

    @property
    def submitted(self) -> float:
        """Unix time; taken from the id where the request has none."""
        return (self.request or WorkRequest()).with_submit_time(self.job_id).submitted


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What `gc` removed. The files are the output files of batches."""

    jobs: int
    batches: int
    files: int


class Flow:
    """A workspace to read from.

    flow = Flow("nightly")
    print(flow.wait(job).text)
    """

    def __init__(self, workspace: str | Path | Workspace, on_unserved: Callable[[], None] | None = None) -> None:
        """on_unserved: called during a wait when the last server of the queue is gone."""
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self.on_unserved = on_unserved

    @property
    def path(self) -> Path:
        return self._workspace.path

    def status(self, job_id: object) -> Status:
        """Return a job's status. Anything that cannot be an id, of any type, is MISSING rather than an error."""
        place = self._workspace.find(job_id) if isinstance(job_id, str) and is_job_id(job_id) else None
        return Status.MISSING if place is None else STATUS[place]

    def get(self, job_id: str) -> JobResult:
        """Return how a job ended. Raises NotFinished if it has not, and UnknownJob if there is no such job."""
        with self._workspace.reading_job(job_id) as (place, folder):
            if place not in FINISHED:
                raise NotFinished(f"The job {job_id} is {STATUS[place]}.", hint="Wait for it.")
            name, usage = RESULT if place is Place.OUTPUT else ERROR, read_record(folder, USAGE) or {}
            data = read_file(folder, name, MAX_RESULT_BYTES)
        if data is None and self._workspace.find(job_id) is None:
            raise self._workspace.unknown_job(job_id)  # it is being removed
        if data is None or usage.get("sha256") not in (None, hashlib.sha256(data).hexdigest()):
            what = "is missing" if data is None else "was changed after the job ended"
            raise BadJob(f"{name} of the job {job_id} {what}.", hint="`penstock flow --retry` runs the job again.")
        return JobResult(job_id, STATUS[place], data, usage)

    def last(self, *, tag: str | None = None) -> str | None:
        """Return the id of the job that ended last, of all or of those with a tag; None if none has ended."""
        ended: dict[str, float] = {}
        for place in FINISHED:
            for job_id in self._workspace.names(place):
                with suppress(FileNotFoundError):  # removed meanwhile
                    ended[job_id] = self._workspace.changed_at(job_id, place)
        for job_id in sorted(ended, key=lambda job_id: (ended[job_id], order(job_id)), reverse=True):
            with suppress(UnknownJob):
                request = self.describe(job_id).request
                if tag is None or (request is not None and tag in request.tags):
                    return job_id
        return None

    def wait(self, job_id: str, timeout: float | None = None) -> JobResult:
        """Wait until a job has ended, and return how. Raises NotFinished after `timeout` seconds."""
        for _ in self._polls(timeout):
            with suppress(NotFinished):
                return self.get(job_id)
        raise self._not_finished(f"The job {job_id} {self._state(job_id)} after {timeout:g} s.")

    def follow(self, job_id: str, timeout: float | None = None) -> Iterator[bytes]:
        """Yield the text as it is generated, until the job ends; all pieces together are the content of result.txt.

        For a job that fails, that is only what it generated; `get` returns why. Raises WorkspaceError if the job was restarted
        and its text differs."""
        yielded = b""
        for _ in self._polls(timeout):
            with self._workspace.reading_job(job_id) as (place, folder):
                name = RESULT if place is Place.OUTPUT else PARTIAL
                text = read_file(folder, name, MAX_RESULT_BYTES) or b""
            shorter = place is not Place.OUTPUT and yielded.startswith(text)  # it may become the same again
            if not (text.startswith(yielded) or shorter):
                raise WorkspaceError(
                    f"The job {job_id} was restarted, and its text differs now.", hint="`penstock flow --wait` prints its result."
                )
            if len(text) > len(yielded):
                yield text[len(yielded) :]
                yielded = text
            if place in FINISHED:
                return
        raise self._not_finished(f"The job {job_id} {self._state(job_id)} after {timeout:g} s.")

    def counts(self) -> dict[Status, int]:
        return {status: len(self._workspace.names(place)) for status, place in PLACES.items()}

    def open_batches(self) -> int:
        """Number of batches that have not ended. Only some of their lines are jobs."""
        return len(open_batches(self._workspace))

    def wait_until_idle(self, timeout: float | None = None, *, tag: str | None = None) -> None:
        """Wait until no job waits or runs and all batches have ended. With a tag, only jobs with that tag count."""
        tagged: dict[str, bool] = {}  # each request is read once
        over: set[str] = set()
        for _ in self._polls(timeout):
            open_jobs = self._workspace.open_jobs()
            if tag is not None:
                for job_id in open_jobs - tagged.keys():
                    with suppress(UnknownJob):
                        request = self.describe(job_id).request
                        tagged[job_id] = request is not None and tag in request.tags
                open_jobs = {job_id for job_id in open_jobs if tagged.get(job_id)}
            if not open_jobs and (tag is not None or not open_batches(self._workspace, over)):
                return
        raise self._not_finished(f"{self.path} is not idle after {timeout:g} s.")

    def jobs(self, *, tag: str | None = None, limit: int | None = None) -> Iterator[JobView]:
        """Yield jobs, newest first. A job that moves meanwhile is yielded once."""
        known = self._workspace.open_jobs().union(*map(self._workspace.names, FINISHED))
        newest = sorted(known, key=order, reverse=True) if limit is None or tag else heapq.nlargest(limit, known, key=order)
        count = 0
        for job_id in newest:
            if limit is not None and count >= limit:
                return
            with suppress(UnknownJob):  # removed meanwhile
                view = self.describe(job_id)
                if tag is None or (view.request is not None and tag in view.request.tags):
                    count += 1
                    yield view

    def describe(self, job_id: str) -> JobView:
        with self._workspace.reading_job(job_id) as (place, folder):
            usage = (read_record(folder, USAGE) or {}) if place in FINISHED else count_saved_tokens(folder)
            suspect = place not in FINISHED and has_file(folder, SUSPECT)
            request = _request_of(folder)
        view = JobView(job_id, STATUS[place], request, usage, suspect)
        if place is not Place.READY or request is None:
            return view
        try:
            return replace(view, waits_for=tuple(sorted(open_parents(self._workspace, job_id, request.after), key=order)))
        except WorkspaceError as error:
            return replace(view, will_fail=error.message)

    def _state(self, job_id: str) -> str:
        status = self.status(job_id)
        return "is interrupted" if status is Status.RUNNING and not self._workspace.is_served() else f"is {status}"

    def why_it_will_fail(self, job_id: str) -> str:
        """Why a waiting job will not run, because of itself or any of its ancestors; empty if it will."""
        ahead, seen = [job_id], {job_id}
        while ahead:
            with suppress(UnknownJob):  # removed meanwhile
                view = self.describe(ahead.pop())
                if view.will_fail:
                    return view.will_fail
                ahead += set(view.waits_for) - seen
                seen.update(view.waits_for)
        return ""

    def children(self, job_id: str) -> list[JobView]:
        """The jobs that come after this one, newest first. Reads all jobs that are newer than it."""
        if self._workspace.find(job_id) is None:
            raise self._workspace.unknown_job(job_id)
        younger = takewhile(lambda view: order(view.job_id) > order(job_id), self.jobs())
        return [view for view in younger if view.request is not None and job_id in view.request.after.values()]

    def strays(self) -> list[str]:
        """Names in the queue's folder that are not jobs."""
        return self._workspace.scan(Place.READY)[1]

    def is_served(self) -> bool:
        """Whether a server works on the queue."""
        return self._workspace.is_served()

    def gc(self, older_than: float) -> Cleaned:
        """Remove jobs that ended more than `older_than` seconds ago, unless an open job or batch still needs their results, and
        batches that ended as long ago, with their output files. Each disappears in one step."""
        workspace = self._workspace
        removed: dict[str, WorkRequest | None] = {}
        with wrap_os_errors(self.path):
            with workspace.gc_locked():
                wanted = self._wanted()
                for place in FINISHED:
                    old = self._old_jobs(place, older_than, wanted)
                    removed |= {job_id: old[job_id] for job_id in workspace.throw_away(old, place)}
            for request in removed.values():
                self._free_key(request)
            batches, files = self._remove_batches(older_than)
            workspace.empty_trash()
            workspace.sweep()
        return Cleaned(len(removed), batches, files)

    def _old_jobs(self, place: Place, older_than: float, wanted: set[str]) -> dict[str, WorkRequest | None]:
        workspace, old = self._workspace, {}
        for job_id in set(workspace.names(place)) - wanted:
            with suppress(FileNotFoundError, UnknownJob):
                if workspace.age_of(job_id, place) > older_than:
                    with workspace.reading_job(job_id) as (_, folder):
                        request = _request_of(folder)
                    if request is None or request.batch is None or not is_open(workspace, request.batch):
                        old[job_id] = request
        return old

    def _remove_batches(self, older_than: float) -> tuple[int, int]:
        """Return the numbers of batches and files removed. Files go first: after a crash the next call finds the batch."""
        workspace, old = self._workspace, {}
        for batch_id in workspace.names(Place.BATCHES):
            with suppress(FileNotFoundError):
                end = end_of(workspace, batch_id)
                if end is not None and workspace.age_of(batch_id, Place.BATCHES) > older_than:
                    old[batch_id] = end
        files = [file for end in old.values() for file in not_none(end.output_file, end.error_file)]
        removed = workspace.throw_away(files, Place.FILES)
        return len(workspace.throw_away(old, Place.BATCHES)), len(removed)

    def _wanted(self) -> set[str]:
        """Parents of open jobs."""
        found: set[str] = set()
        for job_id in self._workspace.open_jobs():
            with suppress(UnknownJob), self._workspace.reading_job(job_id) as (_, folder):
                request = _request_of(folder)
                found.update(request.after.values() if request is not None else ())
        return found

    def _free_key(self, request: WorkRequest | None) -> None:
        if request is None or request.key is None:
            return
        name = key_file(request.key)
        with self._workspace.keys_locked():
            if self._workspace.job_of_key(name) is None:  # or it belongs to a newer job
                self._workspace.forget_key(name)

    def _not_finished(self, what: str) -> NotFinished:
        name = shlex.quote(str(self.path))
        unserved = f"No server is working on this queue: run `penstock drain {name}`."
        return NotFinished(what, hint="Wait longer." if self.is_served() else unserved)

    def _polls(self, timeout: float | None) -> Iterator[None]:
        until, pause = None if timeout is None else time.monotonic() + timeout, MIN_POLL_S
        served, looked = self.is_served(), time.monotonic()
        while True:
            yield
            if until is not None and time.monotonic() >= until:
                return
            time.sleep(pause)
            pause = min(MAX_POLL_S, pause * 1.2)
            if self.on_unserved is not None and time.monotonic() - looked > SERVER_CHECK_S:
                before, served, looked = served, self.is_served(), time.monotonic()
                if before and not served:
                    self.on_unserved()


def _request_of(folder: int) -> WorkRequest | None:
    try:
        return read_request(folder)
    except (BadJob, RequestError):
        return None
