"""Disks that end the process, or fail, at a chosen step: the smallest change that a crash can separate from the next."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.workspace.store.disk import Disk

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GROWS = ("mkdir", "create", "write")  # what a full disk refuses


class Killed(BaseException):
    """The process has died. Not an Exception, so that no handler catches it."""


class SteppingDisk(Disk):
    """A Disk that works in small steps: a write is two halves, and a tree is removed file by file."""

    def __init__(self) -> None:
        self.steps: list[str] = []  # those since `arm`
        self.armed = self.dead = False
        self._trap = ""

    def arm(self) -> None:
        """Count steps from here on; earlier ones were the preparation."""
        self.armed = True

    def step(self, kind: str, name: str, action: Callable[[], Any]) -> Any:
        if self.dead:
            raise Killed(f"a dead process wants to {kind} {name}")  # a dead process runs no `finally`
        if self.armed:
            self.steps.append(f"{kind} {name}")
            self.fate(len(self.steps), kind)
        elif kind == self._trap:
            self.dead = True
            raise Killed(f"before {kind} {name}")
        return action()

    @contextmanager
    def dying_before(self, kind: str) -> Iterator[None]:
        """For preparations: the process in the block dies before its first step of this kind; later ones can use the disk."""
        self._trap = kind
        with process():
            yield
        self._trap, self.dead = "", False

    def fate(self, number: int, kind: str) -> None:
        """Before step `number`, counted from 1: return, or raise."""

    # ---- what the workspace calls ----

    def make_root(self, path: Path) -> None:
        for folder in [*reversed(path.absolute().parents), path.absolute()]:
            with suppress(FileExistsError):
                if not folder.is_dir():
                    parent = os.open(folder.parent, os.O_RDONLY)
                    try:
                        self.make_folder(folder.name, parent)
                    finally:
                        os.close(parent)

    def make_folder(self, name: str, folder: int) -> None:
        self.step("mkdir", name, lambda: super(SteppingDisk, self).make_folder(name, folder))

    def create(self, name: str, folder: int) -> int:
        return self.step("create", name, lambda: super(SteppingDisk, self).create(name, folder))

    def append_to(self, name: str, folder: int) -> int:
        return self.step("open", name, lambda: super(SteppingDisk, self).append_to(name, folder))

    def write(self, file: int, data: bytes) -> None:
        half = (len(data) + 1) // 2
        for part in filter(None, (data[:half], data[half:])):
            self.write_part(file, part)

    def cut(self, file: int, length: int) -> None:
        self.step("cut", f"to {length}", lambda: super(SteppingDisk, self).cut(file, length))

    def sync(self, file: int) -> None:
        self.step("sync", "", lambda: super(SteppingDisk, self).sync(file))

    def move(self, name: str, source: int, target: int) -> None:
        self.step("move", name, lambda: super(SteppingDisk, self).move(name, source, target))

    def replace(self, name: str, other: str, folder: int) -> None:
        self.step("replace", other, lambda: super(SteppingDisk, self).replace(name, other, folder))

    def remove(self, name: str, folder: int) -> None:
        self.step("remove", name, lambda: super(SteppingDisk, self).remove(name, folder))

    def remove_folder(self, name: str, folder: int) -> None:
        inside = os.open(name, _FOLDER, dir_fd=folder)
        try:
            with os.scandir(inside) as entries:
                kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
            for entry, is_folder in sorted(kinds.items()):
                (self.remove_folder if is_folder else self.remove)(entry, inside)
        finally:
            os.close(inside)
        self.remove_empty(name, folder)

    # ---- the steps that Disk has no method for ----

    def write_part(self, file: int, part: bytes) -> None:
        self.step("write", f"{len(part)} bytes", lambda: super(SteppingDisk, self).write(file, part))

    def remove_empty(self, name: str, folder: int) -> None:
        self.step("rmdir", name, lambda: os.rmdir(name, dir_fd=folder))


class KillingDisk(SteppingDisk):
    """Ends the process before a step."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before

    def fate(self, number: int, kind: str) -> None:
        if number == self.before:
            self.dead = True
            raise Killed(f"before step {number}, {self.steps[-1]}")


class SuicidalDisk(SteppingDisk):
    """Kills its own process with a real signal before a step."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.before = before

    def fate(self, number: int, kind: str) -> None:
        if number == self.before:
            os.kill(os.getpid(), signal.SIGKILL)


class FailingDisk(SteppingDisk):
    """One step fails with an OSError; with `full`, all later ones that need space fail too."""

    def __init__(self, at: int, *, full: bool = False) -> None:
        super().__init__()
        self.at, self.full, self.failed = at, full, 0

    def repair(self) -> None:
        self.armed = False

    def fate(self, number: int, kind: str) -> None:
        if number == self.at or (self.full and number > self.at and kind in _GROWS):
            self.failed += 1
            code = errno.ENOSPC if kind in _GROWS else errno.EIO
            raise OSError(code, os.strerror(code))


# ---- what a dead process leaves ----


def open_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor used for listing
            os.fstat(int(name))
            found.add(int(name))
    return found


@contextmanager
def process() -> Iterator[None]:
    """A block that can be killed: all that it has open is then closed, as by the kernel, and nothing else runs."""
    before = open_descriptors()
    try:
        with suppress(Killed):
            yield
    finally:
        for descriptor in open_descriptors() - before:
            os.close(descriptor)


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder for workspaces that need not survive a power cut: in memory, where possible."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="penstock-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
