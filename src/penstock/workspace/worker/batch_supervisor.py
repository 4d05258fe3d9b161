"""BatchSupervisor: works on the open batches of a workspace, beside the Pool that runs their jobs.

Any number of servers may share a workspace: a batch belongs to the one that holds the lock of its folder.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from penstock.errors import BadJob, WorkspaceError
from penstock.workspace.batch.batches import end_of, read_batch_request
from penstock.workspace.batch.results import Refusal
from penstock.workspace.store.files import Place
from penstock.workspace.store.job_id import order
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.batch_run import Accepts, BatchRun, IsWanted, Vet
from penstock.workspace.worker.pool import DISK_WIDE_ERRNOS

logger = logging.getLogger(__name__)

SCAN_INTERVAL_S = 1.0  # for new batches, and jobs that ended in other servers
TURN_PAUSE_S = 0.05  # jobs that end within it share a sync
RETRY_DELAY_S = 2.0  # after an error of the disk
BAD_BATCH_DELAY_S = 30.0  # after an unexpected error in a batch
SWEEP_INTERVAL_S = 60.0
MAX_OPEN_BATCHES = 64  # each keeps files open; the others wait for their turn


class BatchSupervisor:
    """Works on its own thread between `start` and `stop`; `turn` and `refill` may be called from any thread.

    room: maximum number of jobs of all batches; yet each batch may have at least one, and each owner half of its share.
    is_wanted: whether an owner's batches should still run.
    vet: raises KeyForbids for a model that an owner may not use.
    accepts: whether a model is served here."""

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
        self._workspace = workspace
        self._room = room
        self._new_run = partial(BatchRun, workspace, refusal=refusal, is_wanted=is_wanted, vet=vet, accepts=accepts)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._opened = workspace.opened
        self._runs: dict[str, BatchRun] = {}  # in the order in which they were taken
        self._over: set[str] = set()  # batches that have ended
        self._retry_at: dict[str, float] = {}  # for batches that had an unexpected error
        self._yielded_in_turn: dict[str, int] = {}  # the turn in which a batch gave way to others
        self._turns = 0
        self._waiting = 0  # batches that found no place in the last turn
        self._waiting_owners: set[str | None] = set()  # the owners of these batches
        self._owners: dict[str, str | None] = {}  # of batches that have waited for a place
        self._changed = False  # since the last call of `refill`
        self._disk_errors: list[Exception] = []  # in this turn
        self._disk_failing = False
        self._next_sweep = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-batches", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """Stop, and release the batches; the next server continues them."""
        self._stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._drop_all()

    def turn(self) -> bool:
        """Take every batch one step further, and return whether any of them changed. If there are too many batches, those that
        had nothing to do give way to the others."""
        with self._lock:
            return self._turn()

    def why_waiting(self, batch_id: str) -> str | None:
        """Why the next line of one of our batches cannot become a job now; None if nothing prevents it."""
        run = self._runs.get(batch_id)
        return None if run is None else run.why_waiting

    def refill(self) -> bool:
        """Take turns until every batch had one. Returns False if nothing has changed since the last call, in these or any other
        turns: then there are no new jobs."""
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
            except Exception:  # a dead thread would look like slow batches
                pause = RETRY_DELAY_S
                logger.exception("unexpected error in the batches of %s; continuing", self._workspace.path)
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
                logger.error("%s: %s; batches wait until the disk works again", self._workspace.path, error)
            self._disk_failing = True
            raise
        if self._disk_failing:
            self._disk_failing = False
            logger.warning("%s: the disk works again, batches continue", self._workspace.path)
        return changed

    def _take_turn(self) -> bool:
        if self._stopping.is_set() or not self._workspace.is_in_place():
            return False  # the Pool reopens it
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
        for batch_id in self._to_yield(idle):
            self._runs.pop(batch_id).close()
            self._yielded_in_turn[batch_id] = self._turns
        return changed

    def _to_yield(self, idle: set[str]) -> list[str]:
        """The batches that give way to others: idle ones, or if there are none and some owner has no place, the last batch of the
        owner with the most places."""
        found = [batch_id for batch_id in self._runs if batch_id in idle][: self._waiting]
        places = Counter(run.owner for run in self._runs.values())
        if found or not self._waiting_owners - places.keys():
            return found
        owner, count = places.most_common(1)[0]
        return [batch_id for batch_id, run in self._runs.items() if run.owner == owner][-1:] if count > 1 else []

    @property
    def _places(self) -> int:
        return max(1, min(MAX_OPEN_BATCHES, self._room))

    def _guarded(self, batch_id: str, action: Callable[[], bool]) -> bool:
        """Run an action for one batch without letting an error stop the others. After an error the batch is dropped and taken
        again from disk: in the next turn if the disk failed, after a delay otherwise."""
        try:
            return action()
        except Exception as error:
            self._drop(batch_id)
            if type(error) is WorkspaceError or (isinstance(error, OSError) and error.errno in DISK_WIDE_ERRNOS):
                self._disk_errors.append(error)
            else:
                if batch_id not in self._retry_at:
                    logger.exception("unexpected error in batch %s; retrying every %g seconds", batch_id, BAD_BATCH_DELAY_S)
                self._retry_at[batch_id] = time.monotonic() + BAD_BATCH_DELAY_S
            return False
        except BaseException:
            self._drop(batch_id)
            raise

    def _step(self, run: BatchRun) -> bool:
        """Let a batch use half of the room that the others leave, so that new ones find some, and shares even out. Each owner
        also has its share of the room, so that one owner's many batches leave others more than a line."""
        others = [other for other in self._runs.values() if other is not run]
        share = self._room // len({run.owner, *(other.owner for other in others)})
        free = max(
            self._room - sum(other.jobs for other in others),
            share - sum(other.jobs for other in others if other.owner == run.owner),
        )
        changed = run.step(max(1, free // 2))
        self._retry_at.pop(run.batch_id, None)
        if run.over:
            logger.info("batch", extra={"fields": {"id": run.batch_id, **run.end_summary}})
            self._over.add(run.batch_id)
            self._drop(run.batch_id)
        return changed

    # ---- taking batches ----

    def _take_batches(self) -> None:
        """Take new batches: first of owners without a place, then those that have waited longest."""
        names, now, self._waiting = set(self._workspace.names(Place.BATCHES)), time.monotonic(), 0
        self._over &= names
        for known in (self._retry_at, self._yielded_in_turn, self._owners):
            for batch_id in known.keys() - names:
                del known[batch_id]
        candidates = [name for name in names - self._over - self._runs.keys() if self._retry_at.get(name, now) <= now]
        places = Counter(run.owner for run in self._runs.values())
        self._waiting_owners.clear()

        def turn(batch_id: str) -> tuple[bool, int, tuple[int, int, int]]:
            return self._owner_of(batch_id) in places, self._yielded_in_turn.get(batch_id, 0), order(batch_id)

        for batch_id in sorted(candidates, key=turn):
            full = len(self._runs) >= self._places
            if self._guarded(batch_id, partial(self._take, batch_id, full=full)):
                self._waiting += 1
                self._waiting_owners.add(self._owner_of(batch_id))

    def _take(self, batch_id: str, *, full: bool) -> bool:
        """Take a batch, and return whether it must wait for a place."""
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
            run = self._runs[batch_id] = self._new_run(held)
        except BadJob as error:
            held.release()
            logger.warning("ignoring batch %s: %s", batch_id, error)
            self._over.add(batch_id)
            return False
        except BaseException:
            held.release()
            raise
        run.open()
        return False

    def _owner_of(self, batch_id: str) -> str | None:
        if batch_id not in self._owners:
            request = None
            with suppress(OSError), self._workspace.reading_folder(batch_id, Place.BATCHES) as folder:  # `_take` reports it
                request = None if folder is None else read_batch_request(folder)
            self._owners[batch_id] = None if request is None else request.owner
        return self._owners[batch_id]

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
    """Check the input of a new batch, without a model or an API."""
    held = workspace.hold(batch_id, Place.BATCHES)
    if held is None:
        return  # another process works on it
    run = BatchRun(workspace, held, lambda error: (500, error), lambda owner: True, lambda owner, model: None, lambda model: True)
    try:
        run.open()
        run.validate()
    finally:
        run.close()
