"""Disk: the system calls that change a workspace, one method each, so that tests can make any of them fail or kill the process.

Folders are passed as open file descriptors, which stay valid when the folder is moved. Symbolic links are never followed.
The functions below the class combine several calls.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700  # prompts and answers are for their user alone

_NEW_FILE = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OVERWRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_APPEND = _OVERWRITE | os.O_APPEND


class Disk:
    def make_folder(self, name: str, folder: int) -> None:
        os.mkdir(name, PRIVATE_FOLDER, dir_fd=folder)

    def create(self, name: str, folder: int) -> int:
        """Create a file and open it for writing. Fails if the name exists."""
        return os.open(name, _NEW_FILE, PRIVATE_FILE, dir_fd=folder)

    def append_to(self, name: str, folder: int) -> int:
        """Open an existing file for writing at its end."""
        return os.open(name, _APPEND, dir_fd=folder)

    def open_to_overwrite(self, name: str, folder: int) -> int:
        """Open an existing file for writing over its bytes."""
        return os.open(name, _OVERWRITE, dir_fd=folder)

    def write(self, file: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def cut(self, file: int, length: int) -> None:
        os.ftruncate(file, length)

    def sync(self, file: int) -> None:
        """Wait until the file's bytes, or the folder's entries, would survive a power cut."""
        os.fsync(file)

    def move(self, name: str, source: int, target: int) -> None:
        """Move a folder to another parent, atomically. Fails if the target exists and is not empty."""
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)

    def replace(self, name: str, other: str, folder: int) -> None:
        """Rename a file over another one, atomically."""
        os.rename(name, other, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, name: str, folder: int) -> None:
        """Remove a folder and its contents. Links inside are removed, not followed."""
        shutil.rmtree(name, dir_fd=folder)

    def make_root(self, path: Path) -> None:
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)


def put_file(disk: Disk, folder: int, name: str, data: bytes | Iterable[bytes]) -> None:
    """Write and sync a file. One left half-written by a crash is replaced, not written over: after a failed sync it is unknown
    which of its bytes are on the disk."""
    clear(disk, folder, name)
    _fill(disk, disk.create(name, folder), data)


def rewrite_file(disk: Disk, folder: int, name: str, data: bytes) -> None:
    """Write the bytes that a file already has over themselves, and sync. Its writer may have died before its own sync, so
    what can be read need not be on the disk. If this is interrupted, the file is unchanged."""
    _fill(disk, disk.open_to_overwrite(name, folder), data)


def touch(disk: Disk, folder: int, name: str) -> None:
    """Create an empty file unless the name exists."""
    with suppress(FileExistsError):
        os.close(disk.create(name, folder))


def clear(disk: Disk, folder: int, name: str) -> None:
    """Remove the file or folder of this name, if there is one."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            disk.remove_folder(name, folder)
        else:
            disk.remove(name, folder)


def grow_file(disk: Disk, folder: int, name: str, length: int, data: bytes, *, sync: bool = False) -> None:
    """Append to a file whose first `length` bytes are good. Anything behind them is the remains of a crash or a failed write."""
    file = disk.append_to(name, folder)
    try:
        if os.fstat(file).st_size != length:
            disk.cut(file, length)
        if data:
            disk.write(file, data)
        if sync:
            disk.sync(file)
    finally:
        os.close(file)


def _fill(disk: Disk, file: int, data: bytes | Iterable[bytes]) -> None:
    try:
        for part in [data] if isinstance(data, bytes) else data:
            disk.write(file, part)
        disk.sync(file)
    finally:
        os.close(file)
