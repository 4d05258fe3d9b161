"""Scanner: the jobs that wait, in the order in which they should be taken.

The kernel reports new jobs (inotify and the like); the whole folder is scanned every few seconds too, since events can be lost.
A job's request is read once, when it is first seen. A job with parents is held back until they have ended, and is read again
when one of them has.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import WorkspaceError
from penstock.workspace.store.files import FINISHED, SUSPECT, Place, has_file
from penstock.workspace.store.job_id import is_job_id, order
from penstock.workspace.store.parents import open_parents
from penstock.workspace.store.request import WorkRequest, read_request
from penstock.workspace.store.workspace import Workspace

logger = logging.getLogger(__name__)

WATCH_STEP_MS, WATCH_DEBOUNCE_MS = 10, 20  # a burst of new jobs is reported together, soon after its first
READ_BUDGET_S = 0.05  # for one call of `read_new_jobs`
SUSPECT_DELAY_S = 60.0  # a suspect lets others go first for this long: it runs in isolation, which delays all

Urgency = tuple[int, bool, float, tuple[int, int, int]]
_QueueKey = tuple[str | None, str | None]  # model and owner


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job in the queue.

    due: its deadline, in Unix time.
    seen: when we first saw it, by the monotonic clock.
    waits_for: parents that have not ended; the job is held back until they have."""

    job_id: str
    model: str | None
    priority: int
    due: float
    suspect: bool
    seen: float
    waits_for: frozenset[str] = frozenset()
    owner: str | None = None

    @property
    def urgency(self) -> Urgency:
        """Sort key, lowest first: priority, then whether it can run beside others, then deadline and age."""
        patient = self.suspect and time.monotonic() - self.seen < SUSPECT_DELAY_S
        return -self.priority, patient, self.due, order(self.job_id)


class Scanner:
    """For use on one thread; its watcher thread calls `wake` when something may have changed."""

    def __init__(self, workspace: Workspace, wake: Callable[[], None]) -> None:
        self._workspace = workspace
        self._wake = wake
        self._ready = workspace.path / Place.READY
        self._waiting: dict[str, Waiting] = {}
        self._queues: dict[_QueueKey, list[tuple[Urgency, str]]] = {}  # heaps, with stale entries
        self._entered: dict[str, Urgency] = {}  # the entry of a job that is not stale
        self._children: dict[str, set[str]] = {}  # jobs that are held back, by parent
        self._new_jobs: set[str] = set()  # reported by the watcher
        self._unread: set[str] = set()
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._logged_strays: set[str] = set()
        self.unreadable: set[str] = set()  # jobs whose folder we may not open
        self._watcher = threading.Thread(target=self._watch, name="penstock-scanner", daemon=True)

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        self._leaving.set()
        self._watcher.join(timeout=5)

    def scan(self) -> None:
        """List the whole queue. The cost depends on the jobs that wait, not on those that have finished."""
        jobs, strays = self._workspace.scan(Place.READY)
        there = set(jobs)
        for job_id in self._waiting.keys() - there:
            self.forget(job_id)
        self._unread = there - self._waiting.keys()
        self.unreadable &= there
        for job in self._waiting.values():
            if job.suspect and not job.waits_for:
                self._enter(job)  # its delay may be over
        for parent in self._children.keys() - there:  # it runs, or another server has ended it
            if self._workspace.find(parent) in (None, *FINISHED):
                self.on_end(parent)
        self._log_strays(set(strays))

    def read_new_jobs(self, seconds: float = READ_BUDGET_S) -> None:
        """Read the requests of new jobs, for a limited time: there can be very many, and running jobs must not wait."""
        with self._lock:
            self._unread |= self._new_jobs
            self._new_jobs = set()
        until = time.monotonic() + seconds
        while self._unread and time.monotonic() < until:
            self._add(self._unread.pop())

    def refresh(self, job_ids: Iterable[str]) -> None:
        """Read these jobs again: they came back to the queue, or have changed."""
        for job_id in job_ids:
            self.forget(job_id)
            self._unread.add(job_id)

    def on_end(self, job_id: str) -> None:
        """Read the children of a job again, because it has ended."""
        self.refresh(list(self._children.get(job_id, ())))

    def forget(self, job_id: str) -> None:
        self._entered.pop(job_id, None)
        known = self._waiting.pop(job_id, None)
        for parent in known.waits_for if known else ():
            self._children[parent].discard(job_id)
            if not self._children[parent]:
                del self._children[parent]

    @property
    def unread(self) -> int:
        return len(self._unread)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._unread)

    def first(
        self,
        accepts: Callable[[str | None], bool],
        running: Mapping[str | None, int] | None = None,
        may_run: Callable[[Waiting], bool] = lambda job: True,
    ) -> Waiting | None:
        """The job to take next: of those that are equally urgent, one of the owner with the fewest running jobs.

        running: how many jobs of each owner run. may_run: asked for the first job of each owner and model."""
        found = [self._waiting[queue[0][1]] for key in list(self._queues) if accepts(key[0]) and (queue := self._live_queue(key))]
        counts = running or {}

        def turn(job: Waiting) -> tuple[int, bool, int, float, tuple[int, int, int]]:
            priority, patient, due, age = self._entered[job.job_id]
            return priority, patient, counts.get(job.owner, 0), due, age

        return min(filter(may_run, found), key=turn, default=None)

    def unservable(self, accepts: Callable[[str | None], bool]) -> list[Waiting]:
        """Jobs that need a model that is not here, and their descendants (with `model=None`, since theirs may be here)."""
        lacking = {job_id: job for job_id, job in self._waiting.items() if not accepts(job.model)}
        descendants = self.descendants(lacking) - lacking.keys()
        return [*lacking.values(), *(replace(self._waiting[job_id], model=None) for job_id in descendants)]

    def descendants(self, job_ids: Iterable[str]) -> set[str]:
        """Jobs that are held back by these, directly or through others."""
        found: set[str] = set()
        ahead = list(job_ids)
        while ahead:
            held = self._children.get(ahead.pop(), set()) - found
            found |= held
            ahead += held
        return found

    # ---- inside ----

    def _add(self, job_id: str) -> None:
        self.forget(job_id)
        found = self._read(job_id)
        if found is None:
            return
        self._waiting[job_id] = found
        for parent in found.waits_for:
            self._children.setdefault(parent, set()).add(job_id)
        if not found.waits_for:
            self._enter(found)

    def _enter(self, job: Waiting) -> None:
        urgency = job.urgency
        if self._entered.get(job.job_id) != urgency:
            self._entered[job.job_id] = urgency
            heapq.heappush(self._queues.setdefault((job.model, job.owner), []), (urgency, job.job_id))

    def _live_queue(self, key: _QueueKey) -> list[tuple[Urgency, str]]:
        """Return the queue of a model and an owner, without stale entries at its head."""
        queue = self._queues[key]
        while queue and self._entered.get(queue[0][1]) != queue[0][0]:
            heapq.heappop(queue)
        if not queue:
            del self._queues[key]
        return queue

    def _read(self, job_id: str) -> Waiting | None:
        """Read what orders a job in the queue. A bad request is queued too: the Processor reports what is wrong with it."""
        try:
            folder = self._workspace.open_folder(job_id, Place.READY)
        except OSError as error:
            if job_id not in self.unreadable:
                logger.warning("skipping job %s: its folder cannot be opened: %s", job_id, error.strerror)
                self.unreadable.add(job_id)
            return None
        self.unreadable.discard(job_id)
        if folder is None:
            return None  # taken meanwhile
        try:
            request = WorkRequest()
            with suppress(Exception):  # one bad request must not hide other jobs
                request = read_request(folder).with_submit_time(job_id)
            due = math.inf if request.deadline is None else request.submitted + request.deadline
            suspect, model, waits_for = has_file(folder, SUSPECT), request.model, frozenset[str]()
            try:
                waits_for = open_parents(self._workspace, job_id, request.after)
            except WorkspaceError:
                model = None  # none is needed: the Processor reports why the job cannot run
            return Waiting(job_id, model, request.priority, due, suspect, time.monotonic(), waits_for, request.owner)
        finally:
            os.close(folder)

    def _watch(self) -> None:
        places = [self._ready, self._workspace.path / Place.CANCEL]
        try:
            from watchfiles import watch

            for changes in watch(
                *places,
                watch_filter=None,
                step=WATCH_STEP_MS,
                debounce=WATCH_DEBOUNCE_MS,
                recursive=False,
                stop_event=self._leaving,
                raise_interrupt=False,
                ignore_permission_denied=True,
            ):
                with self._lock:
                    self._new_jobs |= {
                        path.name for _, changed in changes if (path := Path(changed)).parent.name == self._ready.name
                    }
                    self._new_jobs = {name for name in self._new_jobs if is_job_id(name)}
                self._wake()
        except Exception as error:  # then only the regular scan is left
            logger.warning("cannot watch the folder, new jobs are noticed with a delay: %s", error)

    def _log_strays(self, strays: set[str]) -> None:
        for name in sorted(strays - self._logged_strays)[:10]:
            logger.warning("ignoring %r in %s: it is not a job", name[:80], self._ready)
        self._logged_strays = strays
