"""Files that are this user's alone: private from their first byte, and never seen half written."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read(path: Path) -> bytes:
    with told(path, "read"):
        return path.read_bytes()


def replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """All of them lie beside the old ones before the first is moved over its own, so that a full disk changes nothing."""
    with told(folder, "written"):
        mark = secrets.token_hex(8)
        waiting = {name: folder / f".{name}.{mark}" for name in files}
        try:
            for name, data in files.items():
                _write_new(waiting[name], data)
            for name, path in waiting.items():
                path.rename(folder / name)
        finally:
            for path in waiting.values():
                path.unlink(missing_ok=True)
        _sync(folder)


def keep_folder(path: Path) -> None:
    """Make it where it is not there yet, for this user alone."""
    with told(path, "made"):
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # with `parents` the mode is that of the last one alone


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """It appears with all its files or not at all; FileExistsError when it is there already."""
    path.parents[1].mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    path.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # with `parents` the mode is that of the last one alone
    growing = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    growing.mkdir(mode=PRIVATE_FOLDER)
    try:
        for name, data in files.items():
            _write_new(growing / name, data)
        _sync(growing)
        if path.exists():  # an empty folder would be replaced
            raise FileExistsError(path)
        growing.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(growing, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """It is gone at once, whatever happens while its files are removed."""
    with told(path, "removed"):
        leaving = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        path.rename(leaving)
        shutil.rmtree(leaving)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two commands at a time would each write what it read before the other wrote."""
    with told(folder, "opened"):
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@contextmanager
def told(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path} cannot be {done}: {error.strerror}.") from None


def _write_new(path: Path, data: bytes) -> None:
    with open(os.open(path, _NEW_FILE, PRIVATE_FILE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(held)
    finally:
        os.close(held)
