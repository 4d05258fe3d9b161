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
    with wrap_os_errors(path, "read"):
        return path.read_bytes()


def replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """All of them lie beside the old ones before the first is moved over its own, so that a full disk changes nothing."""
    with wrap_os_errors(folder, "written"):
        mark = secrets.token_hex(8)
        drafts = {name: folder / f".{name}.{mark}" for name in files}
        try:
            for name, data in files.items():
                _write_new(drafts[name], data)
            for name, path in drafts.items():
                path.rename(folder / name)
        finally:
            for path in drafts.values():
                path.unlink(missing_ok=True)
        _sync(folder)


def ensure_folder(path: Path) -> None:
    """Make it where it is not there yet, for this user alone."""
    with wrap_os_errors(path, "made"):
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # with `parents` the mode is that of the last one alone


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """It appears with all its files or not at all; FileExistsError when it is there already."""
    path.parents[1].mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    path.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # with `parents` the mode is that of the last one alone
    draft = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    draft.mkdir(mode=PRIVATE_FOLDER)
    try:
        for name, data in files.items():
            _write_new(draft / name, data)
        _sync(draft)
        if path.exists():  # an empty folder would be replaced
            raise FileExistsError(path)
        draft.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """It is gone at once, whatever happens while its files are removed."""
    with wrap_os_errors(path, "removed"):
        leaving = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        path.rename(leaving)
        shutil.rmtree(leaving)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Two commands at a time would each write what it read before the other wrote."""
    with wrap_os_errors(folder, "opened"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def wrap_os_errors(path: Path, done: str) -> Iterator[None]:
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
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
