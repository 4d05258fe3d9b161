"""BatchSupervisor: looks after the open batches of a workspace, beside the Pool that runs their jobs.

Any number of servers may share a workspace: a batch belongs to whoever holds the lock of its folder, and to the next one when
that one dies.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

from penstock.errors import BadJob, WorkspaceError
from penstock.workspace.batch.batches import end_of
from penstock.workspace.batch.results import Refusal
from penstock.workspace.store.files import Place
from penstock.workspace.store.job_id import order
from penstock.workspace.store.layout import Workspace
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.worker.batch_run import Accepts, BatchRun, IsWanted, Vet
from penstock.workspace.worker.pool import DISK_WIDE_ERRNOS

logger = logging.getLogger(__name__)

SCAN_INTERVAL_S = 1.0  # seconds between two looks: at new batches, and at jobs that ended in other servers
TURN_PAUSE_S = 0.05  # seconds: jobs that end in one moment share a sync
RETRY_DELAY_S = 2.0  # seconds after the disk refused something
BAD_BATCH_DELAY_S = 30.0  # seconds for a batch that something is wrong with
SWEEP_INTERVAL_S = 60.0
MAX_OPEN_BATCHES = 64  # batches at once: each has files open; the others wait for their turn


class BatchSupervisor:
    """`room` are the jobs that the batches it holds may have at once, save that each may have one. `is_wanted` tells whether an
    owner's batches are still wanted, `vet` refuses a model that is not for them, and `accepts` tells which are here. Between
    `start` and `stop` it works on a thread of its own; `turn` and `refill` may be called from any."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        room: int,
        refusal: Refusal,
        is_wanted: IsWanted = lambda owner: True,
        vet: Vet = lambda owner, model: None,
        accepts: Accepts = lambda model: True,
    ) -> None:
        self._workspace, self._room = workspace, room
        self._refusal, self._is_wanted, self._vet, self._accepts = refusal, is_wanted, vet, accepts
        self._lock, self._woken, self._stopping = threading.Lock(), threading.Event(), threading.Event()
        self._opened = workspace.opened
        self._runs: dict[str, BatchRun] = {}  # those that were taken first are the first
        self._over: set[str] = set()  # batches that need no look any more
        self._retry_at: dict[str, float] = {}  # until when, for those that something is wrong with
        self._yielded_in_turn: dict[str, int] = {}  # the turn in which a batch gave way to others
        self._turns = self._waiting = 0  # so far; and batches that had no place in the last
        self._changed = False  # since `refill` was last asked
        self._disk_errors: list[Exception] = []  # of the disk, in this turn
        self._disk_failing = False
        self._next_sweep = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-batches", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """Leave the batches where they are; whoever drives them next goes on there."""
        self._stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._drop_all()

    def turn(self) -> bool:
        """Take every batch one step further, and tell whether there was one to take. Where there are too many, those that had
        nothing to do give way to the others."""
        with self._lock:
            return self._turn()

    def refill(self) -> bool:
        """Take a turn; several, until every batch had one. False if nothing has changed since this was last asked, in those or in
        any other turn: then there is no job that was not there before."""
        with self._lock:
            self._turn()
            for _ in range(math.ceil(self._waiting / self._places)):
                if not self._changed:
                    self._turn()
            changed, self._changed = self._changed, False
            return changed

    # ---- a turn ----

    def _run(self) -> None:
        while not self._stopping.is_set():
            pause = SCAN_INTERVAL_S
            try:
                if self.turn():
                    pause = 0.0
            except (OSError, WorkspaceError):
                pause = RETRY_DELAY_S
            except Exception:  # batches that nobody looks after would look like those that take their time
                pause = RETRY_DELAY_S
                logger.exception("the batches of %s stumbled and go on", self._workspace.path)
            if not self._stopping.is_set():
                time.sleep(TURN_PAUSE_S)
            self._woken.wait(pause)
            self._woken.clear()

    def _turn(self) -> bool:
        self._disk_errors.clear()
        try:
            changed = self._take_turn()
            for trouble in self._disk_errors:
                raise trouble
        except (OSError, WorkspaceError) as error:
            if not self._disk_failing:
                logger.error("%s: %s; batches wait until that is over", self._workspace.path, error)
            self._disk_failing = True
            raise
        if self._disk_failing:
            self._disk_failing = False
            logger.warning("%s: that is over, batches go on", self._workspace.path)
        return changed

    def _take_turn(self) -> bool:
        if self._stopping.is_set() or not self._workspace.is_in_place():
            return False  # whoever looks after the folder opens it again
        if self._opened != self._workspace.opened:
            self._opened = self._workspace.opened
            self._drop_all()
            self._over.clear()
        self._turns += 1
        self._sweep()
        self._take_batches()
        changed, idle = False, set(self._runs)
        for batch_id, run in sorted(self._runs.items(), key=lambda item: item[1].due):
            if self._stopping.is_set():
                break
            if self._guarded(batch_id, partial(self._step, run)):
                idle.discard(batch_id)
                changed = self._changed = True
        for batch_id in [batch_id for batch_id in self._runs if batch_id in idle][: self._waiting]:
            self._runs.pop(batch_id).close()
            self._yielded_in_turn[batch_id] = self._turns
        return changed

    @property
    def _places(self) -> int:
        return max(1, min(MAX_OPEN_BATCHES, self._room))

    def _guarded(self, batch_id: str, action: Callable[[], bool]) -> bool:
        """One batch must not stop the others. After an error it is taken anew, as the disk has it: in the next turn if it was the
        disk's, and after a while if something is wrong with the batch, or with us."""
        try:
            return action()
        except Exception as error:
            self._drop(batch_id)
            if type(error) is WorkspaceError or (isinstance(error, OSError) and error.errno in DISK_WIDE_ERRNOS):
                self._disk_errors.append(error)
            else:
                if batch_id not in self._retry_at:
                    logger.exception("the batch %s stumbled, and is tried again now and then", batch_id)
                self._retry_at[batch_id] = time.monotonic() + BAD_BATCH_DELAY_S
            return False
        except BaseException:
            self._drop(batch_id)
            raise

    def _step(self, run: BatchRun) -> bool:
        """A batch may have half of the room that the others leave: so the next one finds some, and in time all have as much."""
        free = self._room - sum(other.jobs for other in self._runs.values() if other is not run)
        changed = run.step(max(1, free // 2))
        self._retry_at.pop(run.batch_id, None)
        if run.over:
            logger.info("batch", extra={"fields": {"id": run.batch_id, **run.end_summary}})
            self._over.add(run.batch_id)
            self._drop(run.batch_id)
        return changed

    # ---- who is driven ----

    def _take_batches(self) -> None:
        """Those that have waited longest for a place."""
        names, now, self._waiting = set(self._workspace.names(Place.BATCHES)), time.monotonic(), 0
        self._over &= names
        for known in (self._retry_at, self._yielded_in_turn):
            for batch_id in known.keys() - names:
                del known[batch_id]
        candidates = [name for name in names - self._over - self._runs.keys() if self._retry_at.get(name, now) <= now]
        for batch_id in sorted(candidates, key=lambda batch_id: (self._yielded_in_turn.get(batch_id, 0), order(batch_id))):
            full = len(self._runs) >= self._places
            self._waiting += self._guarded(batch_id, partial(self._take, batch_id, full=full))

    def _take(self, batch_id: str, *, full: bool) -> bool:
        """Whether it waits for a place."""
        if end_of(self._workspace, batch_id) is not None:
            self._over.add(batch_id)
            return False
        held = self._workspace.hold(batch_id, Place.BATCHES)
        if held is None:
            return False  # another server has it
        if full:
            held.release()
            return True
        try:
            run = BatchRun(self._workspace, held, self._refusal, self._is_wanted, self._vet, self._accepts)
            self._runs[batch_id] = run
        except BadJob as error:
            held.release()
            logger.warning("the batch %s is left alone: %s", batch_id, error)
            self._over.add(batch_id)
            return False
        except BaseException:
            held.release()
            raise
        run.open()
        return False

    def _drop(self, batch_id: str) -> None:
        if batch_id in self._runs:
            self._runs.pop(batch_id).close()

    def _drop_all(self) -> None:
        for batch_id in list(self._runs):
            self._drop(batch_id)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL_S
            Uploads(self._workspace).sweep()


def validate(workspace: Workspace, batch_id: str) -> None:
    """Whether the input of a new batch is one is known without a model, and without an API whose words its lines would get."""
    held = workspace.hold(batch_id, Place.BATCHES)
    if held is None:
        return  # somebody drives it
    run = BatchRun(workspace, held, lambda error: (500, error), lambda owner: True, lambda owner, model: None, lambda model: True)
    try:
        run.open()
        run.validate()
    finally:
        run.close()
