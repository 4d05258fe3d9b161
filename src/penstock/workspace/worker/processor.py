"""Processor: takes one claimed job from its files to its end."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, TokensOut
from penstock.errors import (
    BadJob,
    Cancelled,
    EngineError,
    EngineStopped,
    KeyLimit,
    NotReady,
    PenstockError,
    RequestError,
    StorageLimit,
)
from penstock.workspace.store.files import Outcome, Place
from penstock.workspace.store.outcomes import done, failed
from penstock.workspace.store.parents import resolve_prompt
from penstock.workspace.store.request import read_job
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.worker.answer_room import AnswerRoom
from penstock.workspace.worker.runner import PartUpdate, Runner, Task

logger = logging.getLogger(__name__)

TRANSIENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)  # not the job's fault
SYNC_INTERVAL_S = 5.0  # the work that a power cut may cost a job


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put the job back into the queue. A `suspect` runs in isolation next; with `restart`, its tokens so far are dropped.

    pause: seconds for which jobs of the same owner need not be tried.
    reason: why it must pause, for its owner.
    """

    suspect: bool = False
    restart: bool = False
    pause: float | None = None
    reason: str = ""


@dataclass(slots=True)
class _Output:
    """What the model has generated. `tokens` and `unsaved` (text) are not on disk yet."""

    tokens: list[int] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    reason: FinishReason | None = None
    last: JobDone | JobFailed | None = None


class Processor:
    """Runs one job. `begin`, `save` and `end` work with files on the calling thread, one at a time; after an OSError they can be
    called again.

    isolated: no other job runs beside it.
    wake: called when `save` or `end` is due."""

    def __init__(
        self, workspace: Workspace, held: HeldJob, runner: Runner, wake: Callable[[], None], *, isolated: bool, max_deaths: int
    ) -> None:
        self.job_id = held.job_id
        self.isolated = isolated
        self._workspace = workspace
        self._held = held
        self._runner = runner
        self._wake = wake
        self._max_deaths = max_deaths
        self._lock = threading.Lock()
        self._updates: deque[JobUpdate | PartUpdate] = deque()
        self._output = _Output()
        self._task: Task | None = None
        self._room: AnswerRoom | None = None
        self._aborted = threading.Event()  # passed to the code that prepares it
        self._transcript: Transcript | None = None
        self._cancel: Callable[[], None] | None = None
        self._resumed = 0  # tokens of an earlier run
        self._to_skip = 0  # how many of those the updates still have to repeat
        self._started = self._next_sync = time.monotonic()
        self._verdict: Outcome | Requeue | None = None
        self._stopping = False
        self._cancelled = False
        self._has_text = False
        self.begun = False  # `begin` has finished
        self.first_text_unsaved = False  # a client may be waiting for it
        self.ended = False  # the last update has come, or there will be none: call `end`

    # ---- from any thread ----

    def stop(self) -> None:
        """Stop the model, so that the job goes back to the queue with its tokens so far."""
        self._stopping = True
        self._cancel_task()

    def cancel(self) -> None:
        """Stop the model, so that the job ends as cancelled."""
        self._cancelled = True
        self._cancel_task()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def _cancel_task(self) -> None:
        self._aborted.set()
        if self._cancel is not None:
            self._cancel()

    def _on_update(self, update: JobUpdate | PartUpdate) -> None:
        """Queue an update. Runs on the compute thread, so it does no file work."""
        self._updates.append(update)
        if isinstance(update, JobDone | JobFailed):
            self.ended = True
            self._wake()
        elif isinstance(update, TokensOut) and update.text and not self._has_text:
            self.first_text_unsaved = self._has_text = True
            self._wake()

    # ---- the work with files ----

    def begin(self) -> None:
        """Read the job and start it, or decide how it ends already."""
        with self._lock:
            try:
                self._start()
                if self._stopping or self._cancelled:
                    self._cancel_task()  # `stop` or `cancel` was called while we were starting
            except PenstockError as error:
                self._output.last = JobFailed(error)
            except OSError as error:
                bad = BadJob(f"The job's files cannot be read: {error.strerror or error}.")
                self._verdict = Requeue() if error.errno in TRANSIENT_ERRNOS else failed(bad)
            except Exception as error:  # one bad job must not stop the others
                logger.exception("cannot start job %s", self.job_id)
                self._verdict = failed(EngineError(f"The job could not be started: {type(error).__name__}: {error}."))
            self.begun = True
            if self._verdict is not None or self._output.last is not None:
                self.ended = True
                self._wake()

    def _start(self) -> None:
        request, prompt = read_job(self._held.folder)
        prompt = resolve_prompt(self._workspace, self.job_id, request, prompt)
        self._room = AnswerRoom(self._workspace.usage, request, prompt)
        task = self._task = self._runner.prepare(request.with_submit_time(self.job_id), prompt, self._aborted)
        if not task.resumable:
            self._cancel = task.start(self.job_id, secrets.randbits(63) if task.seed is None else task.seed, (), self._on_update)
            return
        before = read_tokens(self._held.folder)
        if before is None or before.fingerprint != task.fingerprint:
            before = SavedTokens(secrets.randbits(63) if task.seed is None else task.seed % (1 << 64), task.fingerprint)
        self._transcript = Transcript(self._workspace.disk, self._held.folder, before)
        self._resumed = self._to_skip = len(before.tokens)
        seed = before.seed if task.seed is None else task.seed
        self._cancel = task.start(self.job_id, seed, before.tokens, self._on_update)

    def save(self) -> None:
        """Write new tokens and text to disk."""
        with self._lock:
            self.first_text_unsaved = False
            self._take_updates()
            try:
                self._write()
            except StorageLimit as error:
                self._verdict = self._verdict or failed(error, self._facts())
                self._cancel_task()

    def end(self) -> Outcome | Requeue:
        """Write the outcome, or put the job back into the queue."""
        with self._lock:
            self._take_updates()
            if self._verdict is None:
                self._verdict = self._decide()
            try:
                self._apply(self._verdict)
            except (OSError, PenstockError):
                raise
            except Exception as error:  # or the job would be retried for ever
                logger.exception("cannot end job %s", self.job_id)
                self._verdict = failed(EngineError(f"The job could not be ended: {type(error).__name__}: {error}."))
                self._apply(self._verdict)
            return self._verdict

    def hand_back(self) -> None:
        """Put the job back into the queue at once, because the server stops, without waiting for the model."""
        with self._lock:
            self._take_updates()
            try:
                self._apply(self._verdict or (Requeue() if self._output.last is None else self._decide()))
            except OSError as error:
                logger.warning("leaving job %s to recovery: %s", self.job_id, error)
            self._held.release()

    def _apply(self, verdict: Outcome | Requeue) -> None:
        held = self._held
        if held.place is not Place.PROCESSING:
            return  # an earlier call did all but a sync
        if isinstance(verdict, Requeue) or not verdict.done:
            with suppress(OSError, StorageLimit):  # tokens that are not saved are generated again
                self._write()
        if isinstance(verdict, Outcome):
            self._workspace.finish(held, verdict)
        else:
            survived = self.isolated and not verdict.suspect
            self._workspace.give_back(held, suspect=verdict.suspect, survived=survived, restart=verdict.restart)

    def is_ours(self) -> bool:
        """Whether the job is still where we took it, and the only one of its id: users may remove, move and make folders."""
        held = self._held
        try:
            there = self._workspace.find(self.job_id) is Place.PROCESSING and os.fstat(held.folder).st_nlink > 0
        except OSError:
            return True  # unknown
        return there or held.place is not Place.PROCESSING

    def abandon(self) -> None:
        """Release the job where it is; recovery will find it."""
        with self._lock:
            self._held.release()

    # ---- inside ----

    def _take_updates(self) -> None:
        output = self._output
        while self._updates:
            update = self._updates.popleft()
            if self._task is not None and (text := self._task.writer.take(update)):
                output.unsaved.append(text)
            match update:
                case TokensOut(token_ids=ids):
                    skipped = min(self._to_skip, len(ids))
                    self._to_skip -= skipped
                    output.tokens += ids[skipped:]
                case OutputFinished(reason=reason) if output.reason is not FinishReason.CANCELLED:
                    output.reason = reason
                case JobDone() | JobFailed() as last:
                    output.last = last

    def _write(self) -> None:
        """Raises StorageLimit, and writes nothing, if the owner has no room for the text."""
        output, transcript = self._output, self._transcript
        if transcript is None or self._held.folder < 0:  # released: its descriptor may be another folder's now
            return
        if output.tokens or output.unsaved:
            text = "".join(output.unsaved).encode("utf-8", "replace")
            self._check_room(transcript.text_length + len(text))
            now = time.monotonic()
            due = now >= self._next_sync
            transcript.append(output.tokens, text, sync=due)
            output.tokens, output.unsaved = [], []
            if due:
                self._next_sync = now + SYNC_INTERVAL_S

    def _decide(self) -> Outcome | Requeue:
        output = self._output
        if isinstance(output.last, JobFailed):
            return self._decide_failure(output.last.error)
        assert output.last is not None
        if output.reason is not FinishReason.CANCELLED:
            assert self._task is not None
            outcome = done(self._task.writer.result(output.last.usage), self._facts())
            try:
                self._check_room(len(outcome.text))
            except StorageLimit as error:
                return failed(error, self._facts())
            return outcome
        if self._cancelled:
            return failed(Cancelled("The job was cancelled."), self._facts())
        return Requeue()

    def _decide_failure(self, error: PenstockError) -> Outcome | Requeue:
        if self._cancelled:
            return failed(Cancelled("The job was cancelled."), self._facts())
        if isinstance(error, EngineStopped | NotReady):
            return Requeue()
        if isinstance(error, KeyLimit):
            return Requeue(pause=error.retry_after, reason=error.message)
        if isinstance(error, RequestError) and error.field == "resume" and self._resumed:
            logger.warning("restarting job %s from its prompt: %s", self.job_id, error)
            return Requeue(restart=True)
        if isinstance(error, EngineError) and self._workspace.count_isolated_runs(self._held) < self._max_deaths:
            # all jobs of a failed pass get this error: only one that fails in isolation is at fault
            logger.warning("job %s goes back to the queue, to run in isolation: %s", self.job_id, error)
            return Requeue(suspect=True)
        return failed(error, self._facts())

    def _check_room(self, size: int) -> None:
        if self._room is not None:
            self._room.check(size)

    def _facts(self) -> dict[str, Any]:
        output = self._output
        facts: dict[str, Any] = {"seconds": round(time.monotonic() - self._started, 3)}
        if self._task is not None:
            facts["model"] = self._task.model
        if isinstance(output.last, JobDone):
            usage = output.last.usage
            facts |= {
                "finish_reason": None if output.reason is None else str(output.reason),
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            }
        if self._resumed:
            facts["resumed_tokens"] = self._resumed
        return facts
