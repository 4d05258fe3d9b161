"""Places: the open folders of a workspace. Finds jobs, reads and locks them; changes nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UnknownJob, WorkspaceError
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.disk_usage import DiskUsage
from penstock.workspace.store.files import (
    FOLDER,
    ISOLATED_RUN,
    SUSPECT,
    Place,
    has_file,
    names_in,
    read_file,
    try_lock,
)
from penstock.workspace.store.job_id import checked, is_job_id
from penstock.workspace.store.root import open_places

LOCK_TIMEOUT_S = 30.0  # for a lock that another client holds


@dataclass(slots=True)
class HeldJob:
    """A job whose lock we hold.

    folder: its open folder, which stays valid when the job is moved; -1 once released.
    isolated_run: number of the isolated run that it is in, 0 for none."""

    job_id: str
    folder: int
    place: Place
    isolated_run: int = 0

    def release(self) -> None:
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1


class Places:
    """The folders of one workspace. Thread-safe. With `create`, an empty or missing folder becomes a workspace.

    usage: what each owner has stored, and its limits.
    """

    def __init__(self, path: str | Path, *, create: bool = False, disk: Disk | None = None) -> None:
        self.path = Path(path)
        self.disk = disk or Disk()
        self._folders = open_places(self.path, self.disk, create=create)
        self._open = list(self._folders.values())
        self.close = weakref.finalize(self, _close, self._open)
        self.opened = 1
        self.usage = DiskUsage(weakref.proxy(self))  # a reference cycle would keep the folders open for longer

    def reopen(self) -> None:
        """Switch to what is at the path now, after the folder was removed or replaced; `opened` counts this. The old folders
        stay open, since other threads may be using them."""
        self._folders = open_places(self.path, self.disk, create=True)
        self._open += self._folders.values()
        self.opened += 1

    # ---- finding jobs ----

    def find(self, job_id: str) -> Place | None:
        """Return where a job is, or None. A job may move while we look, so we look several times before giving up."""
        for _ in range(3):
            for place in (Place.OUTPUT, Place.FAILED, Place.PROCESSING, Place.READY):
                if self._is_at(checked(job_id), place):
                    return place
        return None

    def names(self, place: Place) -> list[str]:
        """Ids of the jobs at a place, in no order."""
        return self.scan(place)[0]

    def scan(self, place: Place) -> tuple[list[str], list[str]]:
        """Return the ids of the jobs at a place, and the names of everything else there, which is not ours to touch."""
        jobs: list[str] = []
        strays: list[str] = []
        with _reopened(self._folders[place]) as folder, os.scandir(folder) as entries:
            for entry in entries:
                ours = is_job_id(entry.name) and entry.is_dir(follow_symlinks=False)
                (jobs if ours else strays).append(entry.name)
        return jobs, strays

    def open_jobs(self) -> set[str]:
        """Ids of the jobs that wait or run. A job may go back from `processing` while we look, so `ready` is read twice."""
        return {job_id for place in (Place.READY, Place.PROCESSING, Place.READY) for job_id in self.names(place)}

    def cancel_requests(self) -> list[str]:
        return [name for name in names_in(self._folders[Place.CANCEL]) if is_job_id(name)]

    def is_cancel_requested(self, job_id: str) -> bool:
        return has_file(self._folders[Place.CANCEL], checked(job_id))

    def changed_at(self, job_id: str, place: Place) -> float:
        """Unix time of the last change in a job's folder; of a finished job, when it ended."""
        return self._stat(job_id, place).st_mtime

    def age_of(self, job_id: str, place: Place) -> float:
        """Seconds since something changed in a job's folder."""
        return time.time() - self.changed_at(job_id, place)

    def check_writable(self) -> None:
        """Raise WorkspaceError if the workspace is read-only for us."""
        for place in (Place.READY, Place.PROCESSING, Place.OUTPUT, Place.FAILED):
            if not os.access(self.path / place, os.W_OK):
                raise WorkspaceError(
                    f"{self.path / place} cannot be written.", hint="Check its owner, and whether the disk is read-only."
                )

    def is_in_place(self) -> bool:
        """Whether our path still leads to the folders we have open."""
        try:
            return os.path.samestat(os.stat(self.path / Place.READY), os.fstat(self._folders[Place.READY]))
        except FileNotFoundError:
            return False

    # ---- a job's folder ----

    @contextmanager
    def reading_job(self, job_id: str) -> Iterator[tuple[Place, int]]:
        """Open a job's folder for reading, wherever it is. Raises UnknownJob if there is no such job."""
        for _ in range(3):
            place = self.find(job_id)
            folder = None if place is None else self.open_folder(job_id, place)
            if place is not None and folder is not None:
                try:
                    yield place, folder
                finally:
                    os.close(folder)
                return
        raise self.unknown_job(job_id)

    def unknown_job(self, job_id: str) -> UnknownJob:
        return UnknownJob(f"There is no job {job_id} in {self.path}.", hint="It was removed, or never existed.")

    @contextmanager
    def reading_folder(self, job_id: str, place: Place) -> Iterator[int | None]:
        """Open a folder at a place for reading; None if there is none."""
        folder = self.open_folder(job_id, place) if is_job_id(job_id) else None
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)

    def open_folder(self, job_id: str, place: Place) -> int | None:
        """Return a descriptor that the caller closes; None if there is no such folder. Links are not followed."""
        try:
            return os.open(job_id, FOLDER, dir_fd=self._folders[place])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise

    def hold(self, job_id: str, place: Place) -> HeldJob | None:
        """Lock a job at a place; None if it is locked already, or has gone."""
        held = self._lock(checked(job_id), place)
        if held is None:
            return None
        with suppress(OSError):
            if os.path.samestat(os.fstat(held.folder), self._stat(job_id, place)):
                return held
        held.release()  # it was moved before we had the lock
        return None

    @contextmanager
    def holding(self, job_id: str, place: Place) -> Iterator[HeldJob | None]:
        held = self.hold(job_id, place)
        try:
            yield held
        finally:
            if held is not None:
                held.release()

    def is_suspect(self, held: HeldJob) -> bool:
        return has_file(held.folder, SUSPECT)

    def count_isolated_runs(self, held: HeldJob) -> int:
        return sum(name.startswith(ISOLATED_RUN) for name in names_in(held.folder))

    # ---- locks between clients ----

    @contextmanager
    def keys_locked(self) -> Iterator[None]:
        """Let one client at a time look up a key and submit its job."""
        with self._locked(Place.KEYS, "submitting a job with a key"):
            yield

    @contextmanager
    def gc_locked(self) -> Iterator[None]:
        """Block submissions of jobs with parents, from the search for jobs still needed until the others are removed."""
        with self._locked(Place.TRASH, "submitting a job with --after, or removing old jobs,"):
            yield

    @contextmanager
    def gc_blocked(self) -> Iterator[None]:
        """Block the removal of old jobs while a job's parents are checked and it is submitted. May be held by many at once."""
        with self._locked(Place.TRASH, "removing old jobs", shared=True):
            yield

    @contextmanager
    def _locked(self, place: Place, doing: str, *, shared: bool = False) -> Iterator[None]:
        with _reopened(self._folders[place]) as folder:
            until = time.monotonic() + LOCK_TIMEOUT_S
            while not try_lock(folder, shared=shared):
                if time.monotonic() > until:
                    raise WorkspaceError(
                        f"Another client has been {doing} for {LOCK_TIMEOUT_S:g} seconds.",
                        hint="It may be suspended. Try again when it has continued or ended.",
                    )
                time.sleep(0.01)
            yield

    def job_of_key(self, key: str) -> str | None:
        """Return the job that has this key, or None. A key whose job was removed is free again."""
        found = (read_file(self._folders[Place.KEYS], key, 100) or b"").decode("ascii", "replace").strip()
        return found if is_job_id(found) and self.find(found) is not None else None

    # ---- whether a server works on the queue ----

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Mark the queue as served: every server on it shares the lock of `processing`, which clients test."""
        with _reopened(self._folders[Place.PROCESSING]) as folder:
            fcntl.flock(folder, fcntl.LOCK_SH)
            yield

    def is_served(self) -> bool:
        with _reopened(self._folders[Place.PROCESSING]) as folder:
            return not try_lock(folder)

    # ---- inside ----

    def _lock(self, job_id: str, place: Place) -> HeldJob | None:
        """Lock the folder that has this name now."""
        folder = self.open_folder(job_id, place)
        if folder is None:
            return None
        if try_lock(folder):
            return HeldJob(job_id, folder, place)
        os.close(folder)
        return None

    def _is_at(self, job_id: str, place: Place) -> bool:
        try:
            return stat.S_ISDIR(self._stat(job_id, place).st_mode)
        except FileNotFoundError:
            return False

    def _stat(self, job_id: str, place: Place) -> os.stat_result:
        return os.stat(job_id, dir_fd=self._folders[place], follow_symlinks=False)


@contextmanager
def _reopened(folder: int) -> Iterator[int]:
    """Open a folder again: the new descriptor has its own lock and read position."""
    again = os.open(".", FOLDER, dir_fd=folder)
    try:
        yield again
    finally:
        os.close(again)


def _close(folders: list[int]) -> None:
    for folder in folders:
        os.close(folder)
