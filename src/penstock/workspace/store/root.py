"""Creates and opens the folders of a workspace."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from penstock.errors import WorkspaceError
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import FOLDER, Place

MARKER_STEM = ".penstock-workspace-"
MARKER = f"{MARKER_STEM}1"  # an empty file, made once all folders exist and are synced
WRITTEN_BY_OTHERS, ENTERED_BY_OTHERS = 0o022, 0o011  # modes of folders


def open_places(path: Path, disk: Disk, *, create: bool) -> dict[Place, int]:
    """Return an open folder for each place. With `create`, an empty or missing folder is made a workspace."""
    with wrap_os_errors(path):
        if path.is_dir():
            _refuse_foreign(path)
        if not (path / MARKER).is_file():
            _make(path, disk, create=create)
        try:
            return _opened(path)
        except FileNotFoundError:  # copies and archives leave empty folders out
            _make_folders(path, disk)
            return _opened(path)


def _refuse_foreign(path: Path) -> None:
    """Raise if other users own or can write to a workspace: they could replace jobs and read results."""
    root = path.stat()
    within_reach = root.st_mode & ENTERED_BY_OTHERS
    for folder in (path, *(path / place for place in ("input", *Place))):
        try:
            found = folder.stat(follow_symlinks=folder is path)
        except FileNotFoundError:
            continue
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid():
            raise WorkspaceError(
                f"{folder} belongs to another user (id {found.st_uid}, and this is {os.geteuid()}).",
                hint="Run this as that user, or use a folder of your own. "
                f"If it should be yours: sudo chown -R $(id -u) {quote(str(path))}",
            )
        if mode & WRITTEN_BY_OTHERS and (folder is path or within_reach):
            raise WorkspaceError(
                f"Other users can write to {folder} (its mode is {mode:04o}).",
                hint=f"If none has, run: chmod -R go-w {quote(str(path))}",
            )


def _opened(path: Path) -> dict[Place, int]:
    folders: dict[Place, int] = {}
    try:
        for place in Place:
            folders[place] = os.open(path / place, FOLDER)
    except OSError:
        for folder in folders.values():
            os.close(folder)
        raise
    return folders


@contextmanager
def wrap_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a WorkspaceError that names the path."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output has left, which says nothing about the disk
    except OSError as error:
        raise to_workspace_error(path, error, "The workspace cannot be used.") from error


def to_workspace_error(path: Path, error: OSError, consequence: str) -> WorkspaceError:
    hints = {
        errno.ENOSPC: "The disk is full: make room and try again.",
        errno.EDQUOT: "Your disk quota is full: make room and try again.",
        errno.EACCES: "You may not write there: check who owns the folder.",
        errno.EPERM: "You may not write there: check who owns the folder.",
        errno.EROFS: "The file system is read-only: choose another folder.",
        errno.EIO: "The disk reports an error: check the system's log.",
        errno.ENOTDIR: "A file is where a folder is needed.",
        errno.ELOOP: "It is a link, and links are not followed.",
    }
    where = error.filename if isinstance(error.filename, str) and "/" in error.filename else path
    return WorkspaceError(f"{where}: {error.strerror or error}. {consequence}", hint=hints.get(error.errno or 0, ""))


def _make(path: Path, disk: Disk, *, create: bool) -> None:
    if path.exists() and not path.is_dir():
        raise WorkspaceError(f"{path} is a file.", hint="Name a folder, or a path that does not exist yet.")
    present = set(os.listdir(path)) if path.is_dir() else set()
    other = next((name for name in present if name.startswith(MARKER_STEM)), None)
    if other is not None:
        raise WorkspaceError(
            f"{path} is a workspace of another version of Penstock ({other}).", hint="Use that version, or another folder."
        )
    own_names = {Path(place).parts[0] for place in Place}
    if not create and not present & own_names:
        what = "is not a workspace" if path.is_dir() else "does not exist"
        raise WorkspaceError(f"{path} {what}.", hint="`penstock work` creates one and submits a job.")
    if present - own_names and not {"input", "output"} <= present:
        raise WorkspaceError(
            f"{path} contains other files.",
            hint="A workspace needs a folder of its own: name one that does not exist yet.",
        )
    disk.make_root(path)
    for folder in path.absolute().parents:  # all of them: a client that made one may have died before it synced it
        with suppress(PermissionError):
            _sync(folder, disk)
    _make_folders(path, disk)


def _make_folders(path: Path, disk: Disk) -> None:
    root = os.open(path, FOLDER & ~os.O_NOFOLLOW)
    try:
        for name in ("input", *Place):
            with suppress(FileExistsError):
                disk.make_folder(name, root)
        _sync(path / "input", disk)
        disk.sync(root)  # before the marker, which promises that this was done
        with suppress(FileExistsError):
            os.close(disk.create(MARKER, root))
    finally:
        os.close(root)


def _sync(path: Path, disk: Disk) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        disk.sync(folder)
    finally:
        os.close(folder)
