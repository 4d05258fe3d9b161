"""Private files and folders of this user: created with owner-only permissions, and replaced atomically."""

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
    """Replace several files: all are written as drafts before the first is renamed, so that a full disk changes nothing."""
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
    """Create a private folder unless it exists."""
    with wrap_os_errors(path, "made"):
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # with `parents`, the mode applies to the last folder only


def make_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Create a private folder atomically, with its files; raise FileExistsError if it exists."""
    path.parents[1].mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    path.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)  # with `parents`, the mode applies to the last folder only
    draft = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    draft.mkdir(mode=PRIVATE_FOLDER)
    try:
        for name, data in files.items():
            _write_new(draft / name, data)
        _sync(draft)
        if path.exists():  # rename would replace an empty folder
            raise FileExistsError(path)
        draft.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder: renamed first, so that it is never seen half empty."""
    with wrap_os_errors(path, "removed"):
        doomed = path.parent / f".{path.name}.{secrets.token_hex(8)}"
        path.rename(doomed)
        shutil.rmtree(doomed)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that two commands do not overwrite each other's changes."""
    with wrap_os_errors(folder, "opened"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def wrap_os_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an OSError into a ConfigError that says the path cannot be `action` ("read", "written")."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path} cannot be {action}: {error.strerror}.") from None


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
