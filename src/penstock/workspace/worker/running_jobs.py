"""RunningJobs: the jobs that run here, and the threads that read and write for them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from penstock.workspace.store.files import Outcome
from penstock.workspace.worker.processor import TRANSIENT_ERRNOS, Processor, Requeue

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 0.2  # seconds between two writes of what jobs have said
RETRY_DELAY_S = 1.0  # seconds until what the disk refused is tried again
MAX_WRITE_FAILURES = 10  # ... and how often, where it is not for want of room
STOP_TIMEOUT_S = 1.0  # seconds for the engine to let go of jobs when the server leaves
WRITER_THREADS = 4  # threads that write: what they sync together, the file system writes together
STARTER_THREADS = 2  # threads that read and tokenize: a long prompt must not keep others from being saved


class JobEvents(Protocol):
    """Whoever has a crew hears of what happens to its jobs."""

    def on_verdict(self, job_id: str, verdict: Outcome | Requeue) -> None:
        """A job ended, or is back in the queue."""

    def on_taken_away(self, job_id: str) -> None:
        """Somebody removed a job while it ran, or put another of its id in its way."""

    def on_trouble(self, error: OSError) -> None:
        """The disk refused something, which is tried again."""

    def wake(self) -> None:
        """There is something to do; from any thread."""


@dataclass(slots=True)
class _Running:
    processor: Processor
    priority: int
    busy: Future[Any] | None = None  # what a worker does for it now
    not_before: float = 0.0  # the disk refused something; when to try again
    write_failures: int = 0  # ... and how often it did since something was written last
    saved: float = field(default_factory=time.monotonic)


class RunningJobs:
    """Belongs to one thread, but for the workers inside; they end when it is left."""

    def __init__(self, foreman: JobEvents) -> None:
        self._foreman = foreman
        self._writers = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="penstock-workspace")
        self._starters = ThreadPoolExecutor(STARTER_THREADS, thread_name_prefix="penstock-workspace-begin")
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> RunningJobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writers.shutdown()
        self._starters.shutdown()

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_isolated_job(self) -> bool:
        return any(job.processor.isolated for job in self._running.values())

    @property
    def cannot_write(self) -> bool:
        """What a job said, or how it ended, could not be written, and was not since."""
        return any(job.write_failures for job in self._running.values())

    @property
    def lowest_priority(self) -> int:
        return min(job.priority for job in self._running.values())

    @property
    def seconds_until_due(self) -> float:
        """Seconds until something is due."""
        return SAVE_INTERVAL_S if self._running else math.inf

    def add(self, processor: Processor, priority: int) -> None:
        self._running[processor.job_id] = _Running(processor, priority)

    def begin(self, job_id: str) -> None:
        job = self._running[job_id]
        self._submit(job, job.processor.begin, self._starters)

    def cancel(self, job_id: str) -> bool:
        """False if it does not run here."""
        job = self._running.get(job_id)
        if job is not None and not job.processor.cancelled:
            job.processor.cancel()
        return job is not None

    def look_after(self) -> None:
        """Hear what the workers have done, and give them what is due."""
        now = time.monotonic()
        for job_id, job in list(self._running.items()):
            if job.busy is not None:
                if not job.busy.done():
                    continue
                finished, job.busy = job.busy, None
                if not self._goes_on(job_id, job, finished):
                    continue
            if now < job.not_before:
                continue
            if job.processor.ended:
                self._submit(job, job.processor.end, self._writers)
            elif job.processor.first_text_unsaved or now - job.saved >= SAVE_INTERVAL_S:
                job.saved = now
                self._submit(job, job.processor.save, self._writers)

    def give_all_back(self, rest: Callable[[float], None]) -> None:
        """The engine is asked to stop, but not waited for: a pass may take a minute, and giving back takes milliseconds."""
        for job in self._running.values():
            job.processor.stop()
        until = time.monotonic() + STOP_TIMEOUT_S
        try:
            while self._running and time.monotonic() < until:
                self.look_after()
                rest(0.01)
        finally:
            for job in self._running.values():
                job.processor.hand_back()
            self._running.clear()

    # ---- inside ----

    def _submit(self, job: _Running, what: Callable[[], Any], workers: ThreadPoolExecutor) -> None:
        def on_done(_: Future[Any]) -> None:
            if job.processor.ended:
                self._foreman.wake()

        job.busy = workers.submit(what)
        job.busy.add_done_callback(on_done)

    def _goes_on(self, job_id: str, job: _Running, finished: Future[Any]) -> bool:
        """What a worker has done for a job, which may have been the last."""
        error = finished.exception()
        if error is not None:
            self._on_error(job_id, job, error)
            return False
        job.write_failures = 0
        verdict = finished.result()
        if verdict is None:
            return True  # it began, or was saved
        del self._running[job_id]
        self._foreman.on_verdict(job_id, verdict)
        return False

    def _on_error(self, job_id: str, job: _Running, error: BaseException) -> None:
        if not isinstance(error, OSError):
            logger.error("the job %s is left to recovery", job_id, exc_info=error)
        elif not job.processor.is_ours():
            self._foreman.on_taken_away(job_id)
        elif self._should_retry(job, error):
            job.not_before = time.monotonic() + RETRY_DELAY_S
            self._foreman.on_trouble(error)
            return
        else:
            logger.error("the job %s is left to recovery: %s", job_id, error)
        job.processor.stop()
        job.processor.abandon()
        del self._running[job_id]

    def _should_retry(self, job: _Running, error: OSError) -> bool:
        """Whether what the disk refused should be tried again. A full disk loses nothing, however long that lasts."""
        job.write_failures += 1
        return error.errno in TRANSIENT_ERRNOS or not job.processor.ended or job.write_failures < MAX_WRITE_FAILURES
