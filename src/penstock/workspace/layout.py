"""The workspace on disk: the exact order in which a job's files are written, synced and moved.

A job is a folder, and the folder that it lies in is its state:

    input/writing/ID -> input/ready/ID -> processing/ID -> output/ID or failed/ID

Every change of state is one rename. Whoever changes a job's folder holds the lock on it (flock on the folder itself: it travels
with the folder and dies with its owner), and finished folders are never changed. docs/workspace.md has the same steps as a
table, and why each is needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.domain.job import new_job_id
from penstock.errors import UnknownJob, WorkspaceError
from penstock.workspace.disk import Disk
from penstock.workspace.files import (
    ALONE,
    FINISHED,
    FOLDER,
    PARTIAL,
    SUSPECT,
    TOKENS,
    USAGE,
    Outcome,
    Place,
    has_file,
    names_in,
    proven_end,
    read_file,
    take_lock,
)
from penstock.workspace.job_id import checked, is_job_id
from penstock.workspace.root import disk_trouble, open_places

STALE = 3600.0  # seconds after which what lies in `writing` without a living owner is swept


@dataclass(slots=True)
class HeldJob:
    """A job whose lock we hold. `folder` is its open folder, wherever it is moved."""

    job_id: str
    folder: int
    place: Place
    run_alone: int = 0  # the number of the run that it has alone

    def let_go(self) -> None:
        if self.folder >= 0:
            os.close(self.folder)
            self.folder = -1


class Workspace:
    """`create` makes the folder a workspace if it is none yet. All methods may be used from several threads."""

    def __init__(self, path: str | Path, *, create: bool = False, disk: Disk | None = None) -> None:
        self.path, self.disk = Path(path), disk or Disk()
        self._folders = open_places(self.path, self.disk, create=create)
        self.close = weakref.finalize(self, _close, list(self._folders.values()))

    # ---- submit: writing -> ready ----

    def submit(self, files: Mapping[str, bytes], *, key: str | None = None) -> str:
        """When this returns, the job survives a power cut. `key` is the name of a file in `keys` that shall tell its id."""
        disk = self.disk
        job_id = self._new_folder()
        moved = False
        try:
            held = self._open(job_id, Place.WRITING)
            assert held is not None, "nobody else touches a folder that was made just now"
            try:
                for name, data in files.items():
                    self._put(held.folder, name, data)
                disk.sync(held.folder)
                if key is not None:
                    self._put(self._folders[Place.KEYS], key, f"{job_id}\n".encode())
                    disk.sync(self._folders[Place.KEYS])
            finally:
                held.let_go()  # before it can be seen: or a server that is quick would find it locked
            disk.move(job_id, self._folders[Place.WRITING], self._folders[Place.READY])
            moved = True
            disk.sync(self._folders[Place.READY])
            disk.sync(self._folders[Place.WRITING])
        except OSError as error:
            self._take_back(job_id, moved)
            raise disk_trouble(self.path, error, "The job was not submitted.") from error
        return job_id

    def _new_folder(self) -> str:
        """A folder in `writing` with an id that no job has. Ids can meet: containers that share a workspace count their
        processes alike, and clocks go backwards."""
        for _ in range(1000):
            job_id = new_job_id()
            try:
                self.disk.make_folder(job_id, self._folders[Place.WRITING])
            except FileExistsError:
                continue
            except OSError as error:
                raise disk_trouble(self.path, error, "The job was not submitted.") from error
            if self.find(job_id) is None:
                return job_id
            with suppress(OSError):
                self.disk.remove_folder(job_id, self._folders[Place.WRITING])
        raise WorkspaceError(f"No free job id was found in {self.path}.", hint="Is the clock of this machine standing still?")

    def _take_back(self, job_id: str, moved: bool) -> None:
        """After an error nobody should find the job: the client was told that it is not there."""
        if moved:
            with self._holding(job_id, Place.READY) as held, suppress(OSError):
                if held is not None:
                    self.disk.move(job_id, self._folders[Place.READY], self._folders[Place.WRITING])
        with suppress(OSError):
            self.disk.remove_folder(job_id, self._folders[Place.WRITING])

    # ---- claim: ready -> processing ----

    def claim(self, job_id: str) -> HeldJob | None:
        """Take a job to run it; None if it is not there any more, or somebody holds it. `settle` makes claims durable."""
        held = self.hold(job_id, Place.READY)
        if held is None:
            return None
        try:
            if any(self._is_at(job_id, place) for place in (Place.PROCESSING, *FINISHED)):
                raise FileExistsError(errno.EEXIST, "there is another job of this id", job_id)
            self._move(held, Place.PROCESSING)
        except BaseException:
            held.let_go()
            raise
        return held

    def settle(self) -> None:
        """Claims before this stay claims after a power cut. One call serves many claims; it comes before any of them ends."""
        self.disk.sync(self._folders[Place.PROCESSING])
        self.disk.sync(self._folders[Place.READY])

    def note_run_alone(self, held: HeldJob) -> None:
        """Count a run alone before it begins: if the server dies in it, it has died alone, and the count is on the disk."""
        held.run_alone = self.runs_alone(held) + 1
        self._touch(held.folder, f"{ALONE}{held.run_alone}")
        self.disk.sync(held.folder)

    # ---- back: processing -> ready ----

    def give_back(self, held: HeldJob, *, suspect: bool = False, survived: bool = False) -> None:
        """Put a job back into the queue. `suspect`: its server died, so the next run is alone; `survived`: it ran alone and the
        server lives, so that run does not count."""
        if survived and held.run_alone:
            with suppress(FileNotFoundError):
                self.disk.remove(f"{ALONE}{held.run_alone}", held.folder)
        if suspect and not self.is_suspect(held):
            self._touch(held.folder, SUSPECT)
        if suspect or survived:
            self.disk.sync(held.folder)
        self._move(held, Place.READY, last=True)

    # ---- the end: processing -> output or failed ----

    def finish(self, held: HeldJob, outcome: Outcome) -> None:
        """From the moment USAGE is there and fits, the job is over: whoever finds it only moves it."""
        self._put(held.folder, outcome.file, outcome.text)
        self._put(held.folder, USAGE, outcome.record())
        self.disk.sync(held.folder)
        self.roll_forward(held, outcome.place)

    def roll_forward(self, held: HeldJob, place: Place) -> None:
        if place is Place.OUTPUT:
            for name in (TOKENS, PARTIAL):
                with suppress(FileNotFoundError):
                    self.disk.remove(name, held.folder)
        job_id = held.job_id
        self._move(held, place, last=True)
        with suppress(FileNotFoundError):
            self.disk.remove(job_id, self._folders[Place.CANCEL])

    def finished_as(self, held: HeldJob) -> Place | None:
        """Where a job belongs that is over and was not moved yet; None if it is not over."""
        return proven_end(held.folder)

    # ---- cleaning ----

    def throw_away(self, job_id: str) -> bool:
        """A finished job vanishes whole, then its files are removed."""
        for place in FINISHED:
            with suppress(FileNotFoundError):
                self.empty_trash(checked(job_id))
                self.disk.move(job_id, self._folders[place], self._folders[Place.TRASH])
                self.disk.sync(self._folders[place])
                self.empty_trash(job_id)
                return True
        return False

    def empty_trash(self, *names: str) -> None:
        for name in names or names_in(self._folders[Place.TRASH]):
            with suppress(FileNotFoundError, NotADirectoryError):  # somebody else empties it too
                self.disk.remove_folder(name, self._folders[Place.TRASH])

    def sweep(self, now: float | None = None) -> int:
        """Remove what clients left in `writing` when they died. Nobody was given its id."""
        swept = 0
        for job_id in self.names(Place.WRITING):
            with suppress(OSError):
                age = (time.time() if now is None else now) - self._stat(job_id, Place.WRITING).st_mtime
                if age <= STALE:
                    continue
                with self._holding(job_id, Place.WRITING) as held:
                    if held is not None:
                        self.disk.remove_folder(job_id, self._folders[Place.WRITING])
                        swept += 1
        return swept

    # ---- requests to cancel, keys ----

    def ask_to_cancel(self, job_id: str) -> None:
        self._touch(self._folders[Place.CANCEL], checked(job_id))
        self.disk.sync(self._folders[Place.CANCEL])

    def is_asked_to_cancel(self, job_id: str) -> bool:
        return has_file(self._folders[Place.CANCEL], checked(job_id))

    def forget_cancel(self, job_id: str) -> None:
        with suppress(FileNotFoundError):
            self.disk.remove(checked(job_id), self._folders[Place.CANCEL])

    @contextmanager
    def keys_locked(self) -> Iterator[None]:
        """One client at a time may look for a key and submit its job."""
        folder = os.open(self.path / Place.KEYS, FOLDER)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def job_of_key(self, key: str) -> str | None:
        """The job that a key belongs to, if there is still one; a key whose job was cleaned away is free again."""
        found = (read_file(self._folders[Place.KEYS], key, 100) or b"").decode("ascii", "replace").strip()
        return found if is_job_id(found) and self.find(found) is not None else None

    def forget_key(self, key: str) -> None:
        with suppress(FileNotFoundError):
            self.disk.remove(key, self._folders[Place.KEYS])

    # ---- looking ----

    def find(self, job_id: str) -> Place | None:
        """Where a job is. It may move between two looks, so nobody is called missing before several."""
        for _ in range(3):
            for place in (Place.OUTPUT, Place.FAILED, Place.PROCESSING, Place.READY):
                if self._is_at(checked(job_id), place):
                    return place
        return None

    def names(self, place: Place) -> list[str]:
        """The jobs at a place, in no order. What has no job's name is not ours to touch."""
        return [name for name in names_in(self._folders[place]) if is_job_id(name)]

    def strays(self, place: Place) -> list[str]:
        """What lies among the jobs and is none: other names, files, links."""
        found = names_in(self._folders[place])
        return [name for name in found if not is_job_id(name) or not self._is_at(name, place)]

    @contextmanager
    def looking_at(self, job_id: str) -> Iterator[tuple[Place, int]]:
        """A job's folder to read from, wherever it is and is moved to. UnknownJob if there is none."""
        for _ in range(3):
            place = self.find(job_id)
            if place is None:
                break
            with suppress(FileNotFoundError):
                folder = os.open(job_id, FOLDER, dir_fd=self._folders[place])
                try:
                    yield place, folder
                finally:
                    os.close(folder)
                return
        raise UnknownJob(f"There is no job {job_id} in {self.path}.", hint="It was cleaned away, or it was never here.")

    def age_of(self, job_id: str, place: Place) -> float:
        """Seconds since something changed in a job's folder."""
        return time.time() - self._stat(job_id, place).st_mtime

    def is_suspect(self, held: HeldJob) -> bool:
        return has_file(held.folder, SUSPECT)

    def runs_alone(self, held: HeldJob) -> int:
        return sum(name.startswith(ALONE) for name in names_in(held.folder))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Whoever works on the queue shares the lock of `processing`, so that clients can tell whether somebody does."""
        folder = os.open(self.path / Place.PROCESSING, FOLDER)
        try:
            fcntl.flock(folder, fcntl.LOCK_SH)
            yield
        finally:
            os.close(folder)

    def is_in_place(self) -> bool:
        """Whether our path still leads to the folders that we have open."""
        try:
            return os.path.samestat(os.stat(self.path / Place.READY), os.fstat(self._folders[Place.READY]))
        except FileNotFoundError:
            return False

    def is_served(self) -> bool:
        folder = os.open(self.path / Place.PROCESSING, FOLDER)
        try:
            return not take_lock(folder)
        finally:
            os.close(folder)

    # ---- inside ----

    def hold(self, job_id: str, place: Place) -> HeldJob | None:
        """Lock a job at a place, unless somebody else has, or it has gone meanwhile."""
        held = self._open(checked(job_id), place)
        if held is None:
            return None
        try:
            ours, there = os.fstat(held.folder), self._stat(job_id, place)
        except OSError:
            held.let_go()
            return None
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
            held.let_go()  # it was moved on before we had the lock
            return None
        return held

    @contextmanager
    def _holding(self, job_id: str, place: Place) -> Iterator[HeldJob | None]:
        held = self.hold(job_id, place)
        try:
            yield held
        finally:
            if held is not None:
                held.let_go()

    def _open(self, job_id: str, place: Place) -> HeldJob | None:
        """Lock whatever has this name now."""
        try:
            folder = os.open(job_id, FOLDER, dir_fd=self._folders[place])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None  # a link, which we do not follow
            raise
        if take_lock(folder):
            return HeldJob(job_id, folder, place)
        os.close(folder)
        return None

    def _move(self, held: HeldJob, target: Place, *, last: bool = False) -> None:
        """`last`: we are done with it: others may have it now, and after a power cut it is still there."""
        source = held.place
        self.disk.move(held.job_id, self._folders[source], self._folders[target])
        held.place = target
        if last:
            held.let_go()
            self.disk.sync(self._folders[target])
            self.disk.sync(self._folders[source])

    def _put(self, folder: int, name: str, data: bytes) -> None:
        """A file that is whole after a power cut. One that an earlier life left half-written is replaced, not written over:
        after a failed sync nobody knows which of its bytes are on the disk."""
        self._clear(folder, name)
        file = self.disk.create(name, folder)
        try:
            self.disk.write(file, data)
            self.disk.sync(file)
        finally:
            os.close(file)

    def _touch(self, folder: int, name: str) -> None:
        with suppress(FileExistsError):
            os.close(self.disk.create(name, folder))

    def _clear(self, folder: int, name: str) -> None:
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(there.st_mode):
            self.disk.remove_folder(name, folder)
        else:
            self.disk.remove(name, folder)

    def _is_at(self, job_id: str, place: Place) -> bool:
        try:
            return stat.S_ISDIR(self._stat(job_id, place).st_mode)
        except FileNotFoundError:
            return False

    def _stat(self, job_id: str, place: Place) -> os.stat_result:
        return os.stat(job_id, dir_fd=self._folders[place], follow_symlinks=False)


def _close(folders: list[int]) -> None:
    for folder in folders:
        os.close(folder)
