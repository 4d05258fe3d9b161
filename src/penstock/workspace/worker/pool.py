"""Pool: takes jobs of a workspace while there is room, runs them, and recovers those of dead servers."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.errors import EngineError, WorkspaceError
from penstock.workspace.store.files import FINISHED, Outcome, Place
from penstock.workspace.store.recovery import MAX_DEATHS, cancel_unowned, recover
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.worker.processor import TRANSIENT_ERRNOS, Processor, Requeue
from penstock.workspace.worker.runner import Runner
from penstock.workspace.worker.running_jobs import RETRY_DELAY_S, JobFinished, JobRemoved, RunningJobs, WriteFailed
from penstock.workspace.worker.scanner import Scanner, Waiting

logger = logging.getLogger(__name__)

MAX_RUNNING = 64
SCAN_INTERVAL_S = 2.0  # of the whole queue, and of jobs of dead servers
SWEEP_INTERVAL_S = 600.0
LOGGED_FACTS = ("model", "seconds", "completion_tokens", "resumed_tokens")  # of a job that ended
MISSED_RETRY_S = 0.05  # for a job that another process held
PROBATION_S = 60.0  # after a job exceeded its owner's limits, the owner's jobs begin one at a time for this long
STOP_TIMEOUT_S = 1.0  # for the engine to release jobs when the server stops
DISK_WIDE_ERRNOS = (*TRANSIENT_ERRNOS, errno.EIO, errno.EROFS)  # these concern all jobs


@dataclass(frozen=True, slots=True)
class JobEnd:
    """A job that ended here. `facts` are those of its usage.json; `left` is the number of jobs that still wait or run."""

    job_id: str
    done: bool
    facts: Mapping[str, Any]
    left: int = 0


class OwnerPause(NamedTuple):
    """Jobs of an owner did not fit its limits. until: when to try one again."""

    until: float
    reason: str


class Pool:
    """Works on its own thread, between `start` and `stop` or during `drain`.

    on_end: called with each job that ended here.
    on_sweep: called every SWEEP_INTERVAL_S, to sweep other things.
    refill: called by `drain` when the queue is empty; returns whether there may be more to do."""

    def __init__(
        self,
        workspace: Workspace,
        runner: Runner,
        *,
        max_running: int = MAX_RUNNING,
        max_deaths: int = MAX_DEATHS,
        on_end: Callable[[JobEnd], None] = lambda end: None,
        on_sweep: Callable[[], object] = lambda: None,
        refill: Callable[[], bool] = lambda: False,
    ) -> None:
        self._workspace = workspace
        self._runner = runner
        self._on_end = on_end
        self._on_sweep = on_sweep
        self._refill = refill
        self._max_running = max_running
        self._max_deaths = max_deaths
        self._woken = threading.Event()
        self._scanner = Scanner(workspace, self.wake)
        self._running = RunningJobs(self.wake, 2 * max_running)
        self._stopping = False
        self._next_scan = 0.0
        self._next_sweep = 0.0
        self._no_claims_before = 0.0
        self._paused: dict[str | None, OwnerPause] = {}
        self._conflicts: set[str] = set()  # jobs that cannot be taken or moved; each was logged
        self._missed: set[str] = set()  # jobs that another process held when we wanted them
        self._thread: threading.Thread | None = None
        self._disk_failing = False
        self.done = 0
        self.failed = 0

    def describe(self) -> dict[str, int]:
        """Count the jobs that wait and run, and those that have ended here."""
        return {"queued": len(self._scanner), "running": len(self._running), "done": self.done, "failed": self.failed}

    def why_paused(self, owner: str | None) -> str | None:
        """Why no jobs of an owner are taken now; None if they are."""
        paused = self._paused.get(owner)
        return None if paused is None or paused.until < time.monotonic() else paused.reason

    @property
    def blocked(self) -> set[str]:
        """Jobs that cannot be taken, for reasons that were logged, and the jobs that wait for them."""
        stuck = self._conflicts | self._scanner.unreadable
        return stuck | self._scanner.descendants(stuck)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="penstock-pool", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Put running jobs back into the queue with their tokens so far; the next server continues them."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def drain(self) -> list[Waiting]:
        """Work until no job waits or runs, here or elsewhere. Returns the jobs that need a model that is not here, and those
        that come after them. Ctrl-C interrupts only the caller's thread; jobs are put back in order on another."""
        self._workspace.check_writable()
        interruption: KeyboardInterrupt | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-pool") as loop:
            drained = loop.submit(self._drain)
            try:
                while not drained.done():
                    try:
                        wait([drained])
                    except KeyboardInterrupt as error:
                        interruption, self._stopping = error, True
                        self.wake()
            finally:
                self._stopping = True
        if interruption is not None:
            raise interruption
        return drained.result()

    # ---- the loop ----

    def _drain(self) -> list[Waiting]:
        with self._running, self._at_work():
            while not self._stopping:
                self._runner.check()
                self._turn()
                if not self._is_empty():
                    self._wait()
                elif self._is_refilled():
                    self._next_scan = 0.0
                else:
                    break
            return self._scanner.unservable(self._runner.accepts)

    def _is_refilled(self) -> bool:
        try:
            return self._refill()
        except (OSError, WorkspaceError):  # of the disk; `refill` has logged it
            self._no_claims_before = time.monotonic() + RETRY_DELAY_S
            self._wait(RETRY_DELAY_S)
            return True

    def _serve(self) -> None:
        with self._running:
            while not self._stopping:
                try:
                    with self._at_work():
                        while not self._stopping and self._workspace.is_in_place():
                            self._runner.check()
                            self._turn()
                            self._wait()
                    if not self._stopping:
                        self._reopen()
                except EngineError as error:
                    logger.critical("stopped working on %s: %s", self._workspace.path, error)
                    return
                except Exception:  # a dead thread would look like an idle queue
                    logger.exception("unexpected error in the workspace %s; continuing", self._workspace.path)
                    time.sleep(RETRY_DELAY_S)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._workspace.serving():
            self._scanner = Scanner(self._workspace, self.wake)
            self._next_scan = 0.0
            self._scanner.start()
            try:
                yield
            finally:
                self._give_jobs_back()
                self._scanner.stop()

    def _give_jobs_back(self) -> None:
        """Put all jobs back into the queue, after a moment for the engine to stop them."""
        self._running.stop_all()
        until = time.monotonic() + STOP_TIMEOUT_S
        try:
            while len(self._running) and time.monotonic() < until:
                self._poll_running()
                self._wait(0.01)
        finally:
            self._running.hand_back_all()

    def _reopen(self) -> None:
        """Open the workspace again after its folder was removed or replaced; the old one would stay empty."""
        logger.warning("the workspace %s was removed or replaced: opening it again", self._workspace.path)
        self._workspace.reopen()
        self._conflicts.clear()

    def _turn(self) -> None:
        now = time.monotonic()
        self._poll_running()
        try:
            if now >= self._next_scan:
                self._next_scan = now + SCAN_INTERVAL_S
                self._scan(now)
            self._scanner.refresh(self._missed)
            self._missed.clear()
            self._scanner.read_new_jobs()
            self._pass_on_cancels()
            if now >= self._no_claims_before and not self._running.cannot_write:
                self._take_jobs()
                if self._disk_failing:
                    self._disk_failing = False
                    logger.warning("%s: the disk works again, taking jobs", self._workspace.path)
        except OSError as error:
            self._on_disk_error(error)

    def _wait(self, seconds: float | None = None) -> None:
        """Sleep until there may be something to do."""
        self._woken.wait(self._wait_seconds() if seconds is None else seconds)
        self._woken.clear()

    def _scan(self, now: float) -> None:
        moved = recover(self._workspace, self._max_deaths, self._conflicts)
        requeued = [job_id for job_id, place in moved.items() if place is Place.READY]
        for job_id, place in moved.items():
            if place in FINISHED:
                self._count(JobEnd(job_id, place is Place.OUTPUT, {}))
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL_S
            self._workspace.sweep()
            self._workspace.empty_trash()
            self._on_sweep()
        self._scanner.scan()
        self._scanner.refresh(requeued)
        self._paused = {owner: paused for owner, paused in self._paused.items() if paused.until > now - PROBATION_S}

    def _is_empty(self) -> bool:
        """Whether there is nothing that we could do now or later."""
        if len(self._running) or self._scanner.unread or self._scanner.first(self._runner.accepts) is not None:
            return False
        try:
            open_jobs = self._workspace.open_jobs() - self.blocked
            open_jobs -= {job.job_id for job in self._scanner.unservable(self._runner.accepts)}
        except OSError as error:
            self._on_disk_error(error)
            return False
        return not open_jobs

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        due = self._next_scan
        due = min(due, now + self._running.seconds_until_due)
        if now < self._no_claims_before:
            due = min(due, self._no_claims_before)
        if self._missed:
            due = min(due, now + MISSED_RETRY_S)
        due = min([due, *(paused.until for paused in self._paused.values() if paused.until > now)])
        if self._scanner.unread:
            due = now
        return max(0.001, due - now)

    # ---- taking jobs ----

    def _take_jobs(self) -> None:
        """Take jobs, the most urgent first. A suspect runs in isolation: only when nothing else runs, and nothing beside it."""
        taken: list[str] = []
        try:
            while not self._running.has_isolated_job:
                waiting = self._scanner.first(self._is_ready, self._running.owners, self._has_room)
                if waiting is None or (waiting.suspect and len(self._running)):
                    break
                self._scanner.forget(waiting.job_id)
                processor = self._take(waiting)
                if processor is not None:
                    self._running.add(processor, waiting.priority, waiting.owner)
                    self._conflicts.discard(waiting.job_id)
                    taken.append(waiting.job_id)
        finally:
            try:
                if taken:
                    self._workspace.sync_claims()
            finally:
                for job_id in taken:
                    self._running.begin(job_id)

    def _is_ready(self, model: str | None) -> bool:
        return self._runner.accepts(model) and self._runner.ready(model)

    def _has_room(self, waiting: Waiting) -> bool:
        """Whether a job can be taken. Two kinds may exceed the limit, up to twice: jobs with a higher priority than a
        running one, and jobs with equal priority of an owner below its share, which need not wait for slow jobs of another."""
        if waiting.owner in self._paused and not self._may_try(waiting.owner):
            return False
        if len(self._running) < self._max_running:
            return True
        if len(self._running) >= 2 * self._max_running:
            return False
        if waiting.priority != self._running.lowest_priority:
            return waiting.priority > self._running.lowest_priority
        running = self._running.owners
        return running[waiting.owner] < max(1, self._max_running // len(running.keys() | {waiting.owner}))

    def _may_try(self, owner: str | None) -> bool:
        """Whether to take another job of an owner whose jobs did not fit its limits: one at a time, since most will not."""
        return time.monotonic() >= self._paused[owner].until and not self._running.is_beginning(owner)

    def _take(self, waiting: Waiting) -> Processor | None:
        held = self._claim(waiting)
        if held is None:
            return None
        try:
            ended = self._workspace.roll_forward(held)
            if ended is not None:
                self._count(JobEnd(waiting.job_id, ended is Place.OUTPUT, {}))
                return None
            suspect = self._workspace.is_suspect(held)
            if suspect and len(self._running):  # it became a suspect after we read its request
                self._workspace.give_back(held)
                self._scanner.refresh([waiting.job_id])
                return None
            if suspect:
                self._workspace.record_isolated_run(held)
        except BaseException:
            with suppress(OSError):  # it has not run
                self._workspace.give_back(held, survived=True)
            held.release()
            raise
        return Processor(self._workspace, held, self._runner, self.wake, isolated=suspect, max_deaths=self._max_deaths)

    def _claim(self, waiting: Waiting) -> HeldJob | None:
        try:
            held = self._workspace.claim(waiting.job_id)
        except OSError as error:
            if error.errno in DISK_WIDE_ERRNOS:
                raise
            self._block(waiting.job_id, error)
            return None
        if held is None:  # another process holds it for a moment, or it has gone
            self._missed.add(waiting.job_id)
        return held

    def _is_gone(self, job_id: str) -> bool:
        """Whether a job is nowhere; not, if a failing disk does not say."""
        try:
            return self._workspace.find(job_id) is None
        except OSError:
            return False

    def _block(self, job_id: str, error: OSError) -> None:
        if job_id not in self._conflicts:
            logger.warning("skipping job %s: %s", job_id, error.strerror or error)
            self._conflicts.add(job_id)

    def _pass_on_cancels(self) -> None:
        for job_id in self._workspace.cancel_requests():
            if self._running.cancel(job_id):
                continue
            if self._workspace.find(job_id) in (None, *FINISHED):
                self._workspace.forget_cancel(job_id)
            elif job_id not in self._conflicts:  # the client died before it could do this itself
                try:
                    ended = cancel_unowned(self._workspace, job_id)
                    if ended is not None:
                        self._count(JobEnd(job_id, ended is Place.OUTPUT, {}))
                except OSError as error:
                    if error.errno in DISK_WIDE_ERRNOS:
                        raise
                    self._block(job_id, error)

    # ---- running jobs ----

    def wake(self) -> None:
        self._woken.set()

    def _poll_running(self) -> None:
        for event in self._running.poll():
            match event:
                case JobFinished(job_id, Outcome() as outcome):
                    self._count(JobEnd(job_id, outcome.done, outcome.facts))
                case JobFinished(job_id, Requeue(pause=float() | int() as pause, reason=reason), owner):
                    self._scanner.refresh([job_id])
                    self._paused[owner] = OwnerPause(time.monotonic() + pause, reason)
                case JobFinished(job_id, Requeue() as requeue):
                    self._scanner.refresh([job_id])
                    if not requeue.suspect:
                        self._no_claims_before = time.monotonic() + RETRY_DELAY_S  # its cause may persist
                case JobRemoved(job_id):
                    if self._is_gone(job_id):
                        logger.warning("forgetting job %s: it was removed", job_id)
                    else:
                        self._block(job_id, FileExistsError(errno.EEXIST, "another job has its id"))
                case WriteFailed(error):
                    self._on_disk_error(error)

    def _count(self, end: JobEnd) -> None:
        if end.done:
            self.done += 1
        else:
            self.failed += 1
        self._scanner.on_end(end.job_id)
        facts = {name: end.facts[name] for name in LOGGED_FACTS if name in end.facts}
        logger.info("job", extra={"fields": {"id": end.job_id, "outcome": "done" if end.done else "failed", **facts}})
        self._on_end(replace(end, left=len(self._scanner) + len(self._running)))

    def _on_disk_error(self, error: OSError) -> None:
        """Stop taking jobs until writing works again; running jobs continue in memory."""
        if not self._disk_failing:
            logger.error("%s: %s; not taking jobs until the disk works again", self._workspace.path, error.strerror or error)
        self._disk_failing = True
        self._no_claims_before = time.monotonic() + RETRY_DELAY_S
