"""Memory that Penstock processes of this user have reserved and not used yet.

KV memory is taken only when it is written, so free memory alone does not show what running processes will still need.
A reservation is a file named after its process; those of dead processes do not count and are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROC = Path("/proc")
LOCK_TIMEOUT_S = 5.0
NAME = re.compile(r"(\d+)\.[0-9a-f]+\.bytes")


class Reservations:
    """Does nothing where the system does not show the memory of other processes, or the folder is not this user's alone."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-memory-{os.getuid()}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from reading or adding reservations; gives up on the lock if one holds it for too long."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                if self._is_ours():
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    lock = os.open(self._folder / "lock", flags, 0o600)
                    stack.callback(os.close, lock)
                    _wait_for(lock)
            yield

    def unused(self, *, own: bool = False) -> int:
        """Bytes that live processes have reserved and not taken yet. own: those of this process, too."""
        reserved: Counter[int] = Counter()
        with contextlib.suppress(OSError):
            for file in self._folder.iterdir() if self._is_ours() else ():
                named = NAME.fullmatch(file.name)
                if named is None:
                    continue
                pid = int(named[1])
                if not (PROC / str(pid)).exists():
                    file.unlink(missing_ok=True)
                elif own or pid != os.getpid():
                    with contextlib.suppress(ValueError):
                        reserved[pid] += max(0, int(file.read_text()))
        return sum(max(0, size - _resident(pid)) for pid, size in reserved.items())

    def reserve(self, size: int, owner: object) -> None:
        """Reserve memory until `owner` is gone."""
        with contextlib.suppress(OSError):
            if PROC.exists() and self._is_ours():
                file = self._folder / f"{os.getpid()}.{id(owner):x}.bytes"
                file.unlink(missing_ok=True)
                with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as out:
                    out.write(str(size))
                weakref.finalize(owner, _remove, file, os.getpid())

    def _is_ours(self) -> bool:
        """Whether the folder is a real one that only this user can write to: others could plant links and numbers there."""
        found = self._folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _wait_for(lock: int) -> None:
    until = time.monotonic() + LOCK_TIMEOUT_S
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return


def _remove(file: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        file.unlink(missing_ok=True)


def _resident(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
