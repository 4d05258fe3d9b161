"""RunningJobs: the jobs that run here, and the threads that read and write their files."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from penstock.workspace.store.files import Outcome
from penstock.workspace.worker.processor import TRANSIENT_ERRNOS, Processor, Requeue

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 0.2  # between two writes of a job's new tokens
RETRY_DELAY_S = 1.0  # after a failed write
MAX_WRITE_FAILURES = 10  # in a row, for a job that has ended; for a full disk there is no limit
WRITER_THREADS = 4  # concurrent syncs share a write of the file system


class JobFinished(NamedTuple):
    """A job has ended, or is back in the queue."""

    job_id: str
    verdict: Outcome | Requeue
    owner: str | None = None


class JobRemoved(NamedTuple):
    """A running job's folder was removed or replaced."""

    job_id: str


class WriteFailed(NamedTuple):
    """The disk refused a write, which will be retried."""

    error: OSError


JobEvent = JobFinished | JobRemoved | WriteFailed


@dataclass(slots=True)
class _Running:
    processor: Processor
    priority: int
    owner: str | None
    busy: Future[Any] | None = None  # what a thread does for it now
    not_before: float = 0.0  # when to retry after a failed write
    write_failures: int = 0  # since the last write that succeeded
    saved: float = field(default_factory=time.monotonic)


class RunningJobs:
    """For use on one thread; its worker threads end with the context.

    wake: called from any thread when `poll` should be called soon.
    max_jobs: each can begin on its own thread: a long prompt must not delay saving other jobs, nor a slow grammar their start."""

    def __init__(self, wake: Callable[[], None], max_jobs: int) -> None:
        self._wake = wake
        self._writers = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="penstock-workspace")
        self._starters = ThreadPoolExecutor(max_jobs, thread_name_prefix="penstock-workspace-begin")
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
        """Whether the last write for some job failed."""
        return any(job.write_failures for job in self._running.values())

    @property
    def lowest_priority(self) -> int:
        return min(job.priority for job in self._running.values())

    @property
    def seconds_until_due(self) -> float:
        return SAVE_INTERVAL_S if self._running else math.inf

    @property
    def owners(self) -> Counter[str | None]:
        """How many jobs of each owner run."""
        return Counter(job.owner for job in self._running.values())

    def is_beginning(self, owner: str | None) -> bool:
        """Whether a job of this owner was taken but has not started to run yet."""
        return any(job.owner == owner and (job.processor.ended or not job.processor.begun) for job in self._running.values())

    def add(self, processor: Processor, priority: int, owner: str | None) -> None:
        self._running[processor.job_id] = _Running(processor, priority, owner)

    def begin(self, job_id: str) -> None:
        job = self._running[job_id]
        self._submit(job, job.processor.begin, self._starters)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job; False if it does not run here."""
        job = self._running.get(job_id)
        if job is not None and not job.processor.cancelled:
            job.processor.cancel()
        return job is not None

    def poll(self) -> Iterator[JobEvent]:
        """Start the file work that is due, and yield the events of finished work. Must be exhausted."""
        now = time.monotonic()
        for job_id, job in list(self._running.items()):
            if job.busy is not None:
                if not job.busy.done():
                    continue
                finished, job.busy = job.busy, None
                event = self._after_work(job_id, job, finished)
                if event is not None:
                    yield event
            if job_id not in self._running or now < job.not_before:
                continue
            if job.processor.ended:
                self._submit(job, job.processor.end, self._writers)
            elif job.processor.first_text_unsaved or now - job.saved >= SAVE_INTERVAL_S:
                job.saved = now
                self._submit(job, job.processor.save, self._writers)

    def stop_all(self) -> None:
        """Ask the engine to stop all jobs, so that they go back to the queue."""
        for job in self._running.values():
            job.processor.stop()

    def hand_back_all(self) -> None:
        """Put all jobs back into the queue without waiting for the engine: a pass may take a minute."""
        for job in self._running.values():
            job.processor.hand_back()
        self._running.clear()

    # ---- inside ----

    def _submit(self, job: _Running, work: Callable[[], Any], threads: ThreadPoolExecutor) -> None:
        def on_done(_: Future[Any]) -> None:
            if job.processor.ended or threads is self._starters:
                self._wake()

        job.busy = threads.submit(work)
        job.busy.add_done_callback(on_done)

    def _after_work(self, job_id: str, job: _Running, finished: Future[Any]) -> JobEvent | None:
        error = finished.exception()
        if error is not None:
            return self._on_error(job_id, job, error)
        job.write_failures = 0
        verdict = finished.result()
        if verdict is None:
            return None  # it began, or was saved
        del self._running[job_id]
        return JobFinished(job_id, verdict, job.owner)

    def _on_error(self, job_id: str, job: _Running, error: BaseException) -> JobEvent | None:
        event: JobEvent | None = None
        if not isinstance(error, OSError):
            logger.error("leaving job %s to recovery", job_id, exc_info=error)
        elif not job.processor.is_ours():
            event = JobRemoved(job_id)
        elif self._should_retry(job, error):
            job.not_before = time.monotonic() + RETRY_DELAY_S
            return WriteFailed(error)
        else:
            logger.error("leaving job %s to recovery: %s", job_id, error)
        job.processor.stop()
        job.processor.abandon()
        del self._running[job_id]
        return event

    def _should_retry(self, job: _Running, error: OSError) -> bool:
        job.write_failures += 1
        return error.errno in TRANSIENT_ERRNOS or not job.processor.ended or job.write_failures < MAX_WRITE_FAILURES
