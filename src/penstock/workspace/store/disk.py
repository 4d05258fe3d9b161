"""Disk: the system calls that change a workspace, one method each, so that tests can end or fail every one of them.

Folders are open file descriptors: what happens inside a job's folder is addressed through it, wherever the folder is moved
meanwhile, and links are never followed. Nothing here knows what the files mean. Below are the few things that are made of
several calls.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_NEW_FILE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OVERWRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_APPEND = _OVERWRITE | os.O_APPEND


class Disk:
    def make_folder(self, name: str, folder: int) -> None:
        os.mkdir(name, dir_fd=folder)

    def create(self, name: str, folder: int) -> int:
        """A new file, open for writing. There must be none of that name."""
        return os.open(name, _NEW_FILE, 0o666, dir_fd=folder)

    def append_to(self, name: str, folder: int) -> int:
        """A file that is there, open for writing at its end."""
        return os.open(name, _APPEND, dir_fd=folder)

    def open_to_overwrite(self, name: str, folder: int) -> int:
        """A file that is there, open for writing over its bytes."""
        return os.open(name, _OVERWRITE, dir_fd=folder)

    def write(self, file: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def cut(self, file: int, length: int) -> None:
        os.ftruncate(file, length)

    def sync(self, file: int) -> None:
        """Until the file's bytes, or the folder's entries, survive a power cut."""
        os.fsync(file)

    def move(self, name: str, source: int, target: int) -> None:
        """Rename a folder from one parent to another, atomically. One that is there already, and is not empty, stays."""
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)

    def replace(self, name: str, other: str, folder: int) -> None:
        """A file takes the name of another, which is no more; atomically."""
        os.rename(name, other, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        """With all that is in it; links in it are removed, not followed."""
        shutil.rmtree(name, dir_fd=folder)

    def make_root(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # what people ask is their own business


def put_file(disk: Disk, folder: int, name: str, data: bytes | Iterable[bytes]) -> None:
    """A file that is whole after a power cut; what is large comes in parts. One that an earlier life left half-written is
    replaced, not written over: after a failed sync nobody knows which of its bytes are on the disk."""
    clear(disk, folder, name)
    _fill(disk, disk.create(name, folder), data)


def rewrite_file(disk: Disk, folder: int, name: str, data: bytes) -> None:
    """The very bytes that a file has, written over them: who wrote them died, or its sync failed, and what can be read need not
    be on the disk. Whenever this is interrupted, the file is as it was."""
    _fill(disk, disk.open_to_overwrite(name, folder), data)


def touch(disk: Disk, folder: int, name: str) -> None:
    """An empty file, if there is none of that name."""
    with suppress(FileExistsError):
        os.close(disk.create(name, folder))


def clear(disk: Disk, folder: int, name: str) -> None:
    """Remove whatever has this name, if anything has."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            disk.remove_folder(name, folder)
        else:
            disk.remove(name, folder)


def _fill(disk: Disk, file: int, data: bytes | Iterable[bytes]) -> None:
    try:
        for part in [data] if isinstance(data, bytes) else data:
            disk.write(file, part)
        disk.sync(file)
    finally:
        os.close(file)
