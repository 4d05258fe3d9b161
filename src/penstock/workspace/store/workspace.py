"""Workspace: the exact order in which a job's files are written, synced and moved.

A job is a folder, and its parent folder is its state:

    input/writing/ID -> input/ready/ID -> processing/ID -> output/ID or failed/ID

Every change of state is one rename. A job's folder is changed only under its lock (flock on the folder itself: the lock moves
with the folder and ends with the process), and finished folders are never changed. docs/workspace.md lists the same steps and
why each is needed.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from penstock.domain.request import new_job_id, new_public_id
from penstock.errors import WorkspaceError
from penstock.workspace.store.disk import clear, put_file, rewrite_file, touch
from penstock.workspace.store.files import (
    ERROR,
    FINISHED,
    ISOLATED_RUN,
    PARTIAL,
    RESULT,
    SUSPECT,
    TOKENS,
    USAGE,
    Outcome,
    Place,
    has_file,
    names_in,
    proven_end,
)
from penstock.workspace.store.job_id import checked, later_than
from penstock.workspace.store.places import HeldJob as HeldJob
from penstock.workspace.store.places import Places
from penstock.workspace.store.root import to_workspace_error

logger = logging.getLogger(__name__)

STALE_AFTER_S = 3600.0  # age at which a folder in `writing` without a living owner is removed
NOT_SUBMITTED = "Nothing was submitted."


class Workspace(Places):
    # ---- submit: writing -> ready ----

    def submit(self, files: Mapping[str, bytes], *, key: str | None = None, after: Collection[str] = ()) -> str:
        """Store a new job and return its id; from then on it survives a power cut.

        key: name of the file in `keys` that will hold the job's id.
        after: job ids that the new id must sort after."""
        return self._put(self._new_folder(after), files, Place.READY, key)

    def add(self, files: Mapping[str, bytes | Iterable[bytes]], place: Place, job_id: str | None = None) -> str:
        """Store a folder that is not a job but has such an id. It appears whole or not at all, and survives a power cut when
        this returns. Only one process may add a given id at a time; a half-written folder of that id is replaced."""
        if job_id is None:
            return self._put(self._new_folder((), place), files, place)
        try:
            with suppress(FileExistsError):
                self.disk.make_folder(checked(job_id), self._folders[Place.WRITING])
        except OSError as error:
            raise to_workspace_error(self.path, error, NOT_SUBMITTED) from error
        return self._put(job_id, files, place)

    def _put(self, job_id: str, files: Mapping[str, bytes | Iterable[bytes]], place: Place, key: str | None = None) -> str:
        disk = self.disk
        moved = False
        try:
            held = self._lock(job_id, Place.WRITING)
            if held is None:
                raise FileNotFoundError(errno.ENOENT, "the new folder was removed", job_id)
            try:
                for name, data in files.items():
                    put_file(disk, held.folder, name, data)
                disk.sync(held.folder)
                if key is not None:
                    put_file(disk, self._folders[Place.KEYS], key, f"{job_id}\n".encode())
                    disk.sync(self._folders[Place.KEYS])
            finally:
                held.release()  # release before it becomes visible, or a fast server would find it locked
            disk.move(job_id, self._folders[Place.WRITING], self._folders[place])
            moved = True
            self.sync_submits(place)
        except OSError as error:
            self._undo_put(job_id, place, moved)
            raise to_workspace_error(self.path, error, NOT_SUBMITTED) from error
        except Exception:  # raised by the function that writes the data
            self._undo_put(job_id, place, moved)
            raise
        return job_id

    def sync_submits(self, place: Place = Place.READY) -> None:
        """Make moves from `writing` to `place` survive a power cut."""
        self.disk.sync(self._folders[place])
        self.disk.sync(self._folders[Place.WRITING])

    def _new_folder(self, after: Collection[str], place: Place = Place.READY) -> str:
        """Make a folder in `writing` with an unused id. Ids can collide: containers that share a workspace have the same process
        ids, and clocks go backwards."""
        for _ in range(1000):
            job_id = later_than(after, new_job_id() if place is Place.READY else new_public_id())
            try:
                self.disk.make_folder(job_id, self._folders[Place.WRITING])
            except FileExistsError:
                continue
            except OSError as error:
                raise to_workspace_error(self.path, error, NOT_SUBMITTED) from error
            if self.find(job_id) is None and not self._is_at(job_id, place):
                return job_id
            with suppress(OSError):
                self.disk.remove_folder(job_id, self._folders[Place.WRITING])
        raise WorkspaceError(f"No free id was found in {self.path}.", hint="Is the clock of this machine standing still?")

    def _undo_put(self, job_id: str, place: Place, moved: bool) -> None:
        """Remove what `_put` left before an error: the client gets an error that says nothing was submitted."""
        if moved:
            with self.holding(job_id, place) as held, suppress(OSError):
                if held is None:
                    return  # a server has taken it
                self.disk.move(job_id, self._folders[place], self._folders[Place.WRITING])
        with suppress(OSError):
            if moved:
                self.sync_submits(place)  # or it could reappear after a power cut, without its files
            self.disk.remove_folder(job_id, self._folders[Place.WRITING])

    # ---- claim: ready -> processing ----

    def claim(self, job_id: str) -> HeldJob | None:
        """Take a job to run it; None if it has gone or is locked. Call `sync_claims` to make claims durable."""
        held = self.hold(job_id, Place.READY)
        if held is None:
            return None
        try:
            if any(self._is_at(job_id, place) for place in (Place.PROCESSING, *FINISHED)):
                raise FileExistsError(errno.EEXIST, "there is another job of this id", job_id)
            self._move(held, Place.PROCESSING)
        except BaseException:
            held.release()
            raise
        return held

    def sync_claims(self) -> None:
        """Make all claims so far survive a power cut. Must be called before any of the claimed jobs ends."""
        self.disk.sync(self._folders[Place.PROCESSING])
        self.disk.sync(self._folders[Place.READY])

    def record_isolated_run(self, held: HeldJob) -> None:
        """Count an isolated run on disk before it begins, so that the count survives if the run kills the server."""
        held.isolated_run = 1
        while has_file(held.folder, f"{ISOLATED_RUN}{held.isolated_run}"):
            held.isolated_run += 1
        touch(self.disk, held.folder, f"{ISOLATED_RUN}{held.isolated_run}")
        self.disk.sync(held.folder)

    # ---- back: processing -> ready ----

    def give_back(self, held: HeldJob, *, suspect: bool = False, survived: bool = False, restart: bool = False) -> None:
        """Put a job back into the queue.

        suspect: its server died, so its next run is isolated.
        survived: its isolated run did not kill the server, so that run does not count.
        restart: its saved tokens cannot be continued; drop them."""
        for name in (
            *([f"{ISOLATED_RUN}{held.isolated_run}"] if survived and held.isolated_run else []),
            *([TOKENS] if restart else []),
        ):
            clear(self.disk, held.folder, name)
        if suspect and not self.is_suspect(held):
            touch(self.disk, held.folder, SUSPECT)
        if suspect or survived:
            self.disk.sync(held.folder)
        self._move(held, Place.READY, last=True)

    # ---- the end: processing -> output or failed ----

    def finish(self, held: HeldJob, outcome: Outcome) -> None:
        """Write a job's outcome and move it. Once USAGE is there and matches, the job is over: after a crash it is only moved."""
        clear(self.disk, held.folder, ERROR if outcome.done else RESULT)  # of an earlier attempt
        put_file(self.disk, held.folder, outcome.file, outcome.text)
        put_file(self.disk, held.folder, USAGE, outcome.record())
        self.disk.sync(held.folder)
        self._move_to_end(held, outcome.place)

    def roll_forward(self, held: HeldJob) -> Place | None:
        """Move a job whose outcome a dead process has written, and return where; None if it has no outcome. Its result was
        synced before USAGE was begun; USAGE may not have been."""
        end = proven_end(held.folder)
        if end is None:
            return None
        rewrite_file(self.disk, held.folder, USAGE, end.record)
        self.disk.sync(held.folder)
        self._move_to_end(held, end.place)
        return end.place

    def _move_to_end(self, held: HeldJob, place: Place) -> None:
        if place is Place.OUTPUT:
            for name in (TOKENS, PARTIAL):
                clear(self.disk, held.folder, name)
        job_id = held.job_id
        self._move(held, place, last=True)
        self.forget_cancel(job_id)

    # ---- cleaning ----

    def throw_away(self, job_ids: Iterable[str], place: Place) -> list[str]:
        """Delete finished jobs: each leaves its place in one step, then its files are removed. Returns those that existed."""
        removed = []
        for job_id in job_ids:
            try:
                self._empty(checked(job_id))
                self.disk.move(job_id, self._folders[place], self._folders[Place.TRASH])
                removed.append(job_id)
            except FileNotFoundError:
                pass  # another process removed it
            except OSError as error:
                logger.warning("cannot remove job %s: %s", job_id, error.strerror)
        if removed:
            self.usage.forget(place, removed)
            self.disk.sync(self._folders[Place.TRASH])
            self.disk.sync(self._folders[place])
            self._empty(*removed)
        return removed

    def empty_trash(self) -> None:
        self._empty(*names_in(self._folders[Place.TRASH]))

    def _empty(self, *names: str) -> None:
        for name in names:
            try:
                self.disk.remove_folder(name, self._folders[Place.TRASH])
            except (FileNotFoundError, NotADirectoryError):
                pass  # another process removed it
            except OSError as error:  # it is invisible already, and the others must go too
                logger.warning("cannot remove %s from %s: %s", name, self.path / Place.TRASH, error.strerror)

    def sweep(self, now: float | None = None) -> int:
        """Remove what dead clients left in `writing`; no id was returned for it. If a client is alive after all, its rename
        fails and it reports that."""
        swept = 0
        for job_id in self.names(Place.WRITING):
            with suppress(OSError):
                age = (time.time() if now is None else now) - self._stat(job_id, Place.WRITING).st_mtime
                if age <= STALE_AFTER_S:
                    continue
                with self.holding(job_id, Place.WRITING) as held:
                    if held is not None:
                        self._empty(job_id)
                        self.disk.move(job_id, self._folders[Place.WRITING], self._folders[Place.TRASH])
                        self._empty(job_id)
                        swept += 1
        return swept

    # ---- requests to cancel, keys ----

    def request_cancel(self, job_id: str) -> None:
        touch(self.disk, self._folders[Place.CANCEL], checked(job_id))
        self.disk.sync(self._folders[Place.CANCEL])

    def forget_cancel(self, job_id: str) -> None:
        clear(self.disk, self._folders[Place.CANCEL], checked(job_id))

    def forget_key(self, key: str) -> None:
        clear(self.disk, self._folders[Place.KEYS], key)

    # ---- inside ----

    def _move(self, held: HeldJob, target: Place, *, last: bool = False) -> None:
        """Move a job. With `last`, also release its lock and make the move survive a power cut."""
        source = held.place
        self.disk.move(held.job_id, self._folders[source], self._folders[target])
        held.place = target
        if last:
            held.release()
            self.disk.sync(self._folders[target])
            self.disk.sync(self._folders[source])
