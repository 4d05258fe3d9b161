"""BatchDriver: looks after the open batches of a workspace, beside the Pool that runs their jobs.

Any number of servers may share a workspace: a batch belongs to whoever holds the lock of its folder, and to the next one when
that one dies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from penstock.errors import BadJob, WorkspaceError
from penstock.workspace.batch_drive import Drive, Refusal, Vet
from penstock.workspace.batches import is_open
from penstock.workspace.files import Place
from penstock.workspace.job_id import order
from penstock.workspace.layout import Workspace
from penstock.workspace.uploads import Uploads

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0  # seconds between two looks: at new batches, and at jobs that ended in other servers
PAUSE = 0.05  # seconds: jobs that end in one moment share a sync
RETRY_AFTER = 2.0  # seconds after the disk refused something
SWEEP_EVERY = 60.0
MOST = 64  # batches at once: each has files open; the others wait for their turn
LEAST_ROOM = 8  # jobs of a batch at once, however many batches there are


class BatchDriver:
    """`room` are the jobs that all batches together may have at once. `may_go_on` tells whether an owner's batches are still
    wanted, and `vet` refuses a model that is not for them. Between `start` and `stop` it works on a thread of its own; `turn` may
    be called from any."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        room: int,
        refusal: Refusal,
        may_go_on: Callable[[str | None], bool] = lambda owner: True,
        vet: Vet = lambda owner, model: None,
    ) -> None:
        self._workspace, self._room = workspace, room
        self._refusal, self._may_go_on, self._vet = refusal, may_go_on, vet
        self._lock, self._woken, self._stopping = threading.Lock(), threading.Event(), False
        self._drives: dict[str, Drive] = {}
        self._over: set[str] = set()  # batches that need no look any more
        self._next_sweep = 0.0
        self._in_trouble = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-batches", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        """Leave the batches where they are; whoever drives them next goes on there."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._let_go()

    def turn(self) -> bool:
        """Take every batch one step further, and tell whether there was one to take."""
        with self._lock:
            if self._stopping:
                return False
            if not self._workspace.is_in_place():
                self._open_again()
            self._sweep()
            self._take_batches()
            changed, trouble = False, None
            room = max(LEAST_ROOM, self._room // max(1, len(self._drives)))
            for drive in sorted(self._drives.values(), key=lambda drive: drive.due):
                try:
                    changed |= self._step(drive, room)
                except (OSError, WorkspaceError) as error:  # the others may be luckier
                    trouble = error
            if trouble is not None:
                raise trouble
            return changed

    # ---- inside ----

    def _run(self) -> None:
        while not self._stopping:
            pause = LOOK_EVERY
            try:
                if self.turn():
                    pause = 0.0
                if self._in_trouble:
                    self._in_trouble = False
                    logger.warning("%s: that is over, batches go on", self._workspace.path)
            except (OSError, WorkspaceError) as error:
                pause = RETRY_AFTER
                if not self._in_trouble:
                    logger.error("%s: %s; batches wait until that is over", self._workspace.path, error)
                self._in_trouble = True
            except Exception:  # batches that nobody looks after would look like those that take their time
                pause = RETRY_AFTER
                logger.exception("the batches of %s stumbled and go on", self._workspace.path)
            if not self._stopping:
                time.sleep(PAUSE)
            self._woken.wait(pause)
            self._woken.clear()

    def _step(self, drive: Drive, room: int) -> bool:
        try:
            changed = drive.step(room)
        except BadJob as error:
            self._leave_alone(drive.batch_id, error)
            return False
        except BaseException:  # it is taken anew, as the disk has it
            self._drives.pop(drive.batch_id).close()
            raise
        if drive.over:
            logger.info("batch", extra={"fields": {"id": drive.batch_id, **drive.told}})
            self._over.add(drive.batch_id)
            self._drives.pop(drive.batch_id).close()
        return changed

    def _take_batches(self) -> None:
        for batch_id in sorted(set(self._workspace.names(Place.BATCHES)) - self._over - self._drives.keys(), key=order):
            if len(self._drives) == MOST:
                return
            if not is_open(self._workspace, batch_id):
                self._over.add(batch_id)
                continue
            held = self._workspace.hold(batch_id, Place.BATCHES)
            if held is None:
                continue  # another server has it
            try:
                self._drives[batch_id] = drive = Drive(self._workspace, held, self._refusal, self._may_go_on, self._vet)
                drive.open()
            except BadJob as error:
                held.let_go()
                self._leave_alone(batch_id, error)
            except BaseException:
                held.let_go()
                if batch_id in self._drives:
                    self._drives.pop(batch_id).close()
                raise

    def _leave_alone(self, batch_id: str, error: BadJob) -> None:
        logger.warning("the batch %s is left alone: %s", batch_id, error)
        self._over.add(batch_id)
        if batch_id in self._drives:
            self._drives.pop(batch_id).close()

    def _sweep(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_EVERY
            Uploads(self._workspace).sweep()

    def _open_again(self) -> None:
        """Somebody removed the folder, or put another in its place."""
        self._let_go()
        self._over.clear()
        self._workspace = Workspace(self._workspace.path, create=True, disk=self._workspace.disk)

    def _let_go(self) -> None:
        for drive in self._drives.values():
            drive.close()
        self._drives.clear()
