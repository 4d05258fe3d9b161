"""Scanner: which jobs wait, in the order in which they should be taken.

The kernel tells of new ones as they come (inotify and its like); now and then the whole folder is looked through, since
events can be lost. A job's request is read once, when it is first seen. One that comes after others is held back until they have
ended: it is read again when one of them has.
"""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import WorkspaceError
from penstock.workspace.store.files import FINISHED, SUSPECT, Place, has_file
from penstock.workspace.store.job_id import is_job_id, order
from penstock.workspace.store.layout import Workspace
from penstock.workspace.store.parents import open_parents
from penstock.workspace.store.request import WorkRequest, read_request

logger = logging.getLogger(__name__)

WATCH_STEP_MS, WATCH_DEBOUNCE_MS = 10, 20  # milliseconds: a burst of new jobs is told at once, but not much later than its first
READ_BUDGET_S = 0.05  # seconds at a time for the requests of new jobs
SUSPECT_DELAY_S = 60.0  # seconds that a suspect lets others go first: it must run alone, and holds everybody up

Urgency = tuple[int, bool, float, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job in the queue. `due` is when it should be done by, in Unix time; `seen` is when we first saw it, by our own clock.
    It is held back while some in `waits_for` have not ended."""

    job_id: str
    model: str | None
    priority: int
    due: float
    suspect: bool
    seen: float
    waits_for: frozenset[str] = frozenset()

    @property
    def urgency(self) -> Urgency:
        """Lower is first: by priority, then those that can run beside others, then by deadline and age."""
        patient = self.suspect and time.monotonic() - self.seen < SUSPECT_DELAY_S
        return -self.priority, patient, self.due, order(self.job_id)


class Scanner:
    """`wake` is called, on a thread of ours, whenever something may have changed. All else belongs to one thread."""

    def __init__(self, workspace: Workspace, wake: Callable[[], None]) -> None:
        self._workspace, self._wake = workspace, wake
        self._ready = workspace.path / Place.READY
        self._waiting: dict[str, Waiting] = {}
        self._queues: dict[str | None, list[tuple[Urgency, str]]] = {}  # a heap for each model; who left stays in it a while
        self._entered: dict[str, Urgency] = {}  # which of a job's entries counts
        self._children: dict[str, set[str]] = {}  # who is held back, by each whom it waits for
        self._new_jobs: set[str] = set()  # told by the watcher
        self._unread: set[str] = set()
        self._lock, self._leaving = threading.Lock(), threading.Event()
        self._logged_strays: set[str] = set()
        self.unreadable: set[str] = set()  # jobs that we may not look into
        self._watcher = threading.Thread(target=self._watch, name="penstock-scanner", daemon=True)

    def start(self) -> None:
        self._watcher.start()

    def stop(self) -> None:
        self._leaving.set()
        self._watcher.join(timeout=5)

    def scan(self) -> None:
        """Go through the whole folder. Its cost is that of the jobs that wait, however many are finished."""
        jobs, strays = self._workspace.scan(Place.READY)
        there = set(jobs)
        for job_id in self._waiting.keys() - there:
            self.forget(job_id)
        self._unread = there - self._waiting.keys()
        for job in self._waiting.values():
            if job.suspect and not job.waits_for:
                self._enter(job)  # its turn may have come
        for parent in self._children.keys() - there:  # it runs, or another server has ended it
            if self._workspace.find(parent) in (None, *FINISHED):
                self.on_end(parent)
        self._log_strays(set(strays))

    def read_new_jobs(self, seconds: float = READ_BUDGET_S) -> None:
        """Read the jobs that are new, for so long: there may be a great many, and those that run must be looked after."""
        with self._lock:
            self._unread |= self._new_jobs
            self._new_jobs = set()
        until = time.monotonic() + seconds
        while self._unread and time.monotonic() < until:
            self._add(self._unread.pop())

    def refresh(self, job_ids: Iterable[str]) -> None:
        """These came back to the queue, or others than we know of them."""
        for job_id in job_ids:
            self.forget(job_id)
            self._unread.add(job_id)

    def on_end(self, job_id: str) -> None:
        """A job has ended: those that wait for it are read again."""
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

    def first(self, accepts: Callable[[str | None], bool]) -> Waiting | None:
        tops = [queue[0] for model in list(self._queues) if accepts(model) and (queue := self._live_queue(model))]
        return self._waiting[min(tops)[1]] if tops else None

    def unservable(self, accepts: Callable[[str | None], bool]) -> list[Waiting]:
        """Those that wait for a model that is not here, and those that come after them; what the latter ask for may be here."""
        lacking = {job_id: job for job_id, job in self._waiting.items() if not accepts(job.model)}
        descendants = self.descendants(lacking) - lacking.keys()
        return [*lacking.values(), *(replace(self._waiting[job_id], model=None) for job_id in descendants)]

    def descendants(self, job_ids: Iterable[str]) -> set[str]:
        """Those that are held back by one of these, or by one that is."""
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
            heapq.heappush(self._queues.setdefault(job.model, []), (urgency, job.job_id))

    def _live_queue(self, model: str | None) -> list[tuple[Urgency, str]]:
        """A model's queue without those at its head that have left it."""
        queue = self._queues[model]
        while queue and self._entered.get(queue[0][1]) != queue[0][0]:
            heapq.heappop(queue)
        if not queue:
            del self._queues[model]
        return queue

    def _read(self, job_id: str) -> Waiting | None:
        """What matters for its turn. A request that cannot be read gets its turn too: whoever takes it tells what is wrong."""
        try:
            folder = self._workspace.open_folder(job_id, Place.READY)
        except OSError as error:
            if job_id not in self.unreadable:
                logger.warning("the job %s is left alone: its folder cannot be opened: %s", job_id, error.strerror)
                self.unreadable.add(job_id)
            return None
        if folder is None:
            return None  # taken meanwhile
        try:
            request = WorkRequest()
            with suppress(Exception):  # nobody's request must keep others from being seen
                request = read_request(folder).with_submit_time(job_id)
            due = math.inf if request.deadline is None else request.submitted + request.deadline
            suspect, model, waits_for = has_file(folder, SUSPECT), request.model, frozenset[str]()
            try:
                waits_for = open_parents(self._workspace, job_id, request.after)
            except WorkspaceError:
                model = None  # none is needed: whoever takes it tells why it is not run
            return Waiting(job_id, model, request.priority, due, suspect, time.monotonic(), waits_for)
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
        except Exception as error:  # then the slow look is all there is
            logger.warning("new jobs are noticed later than usual, since the folder cannot be watched: %s", error)

    def _log_strays(self, strays: set[str]) -> None:
        for name in sorted(strays - self._logged_strays)[:10]:
            logger.warning("%s holds %r, which is no job: it is left alone", self._ready, name[:80])
        self._logged_strays = strays
