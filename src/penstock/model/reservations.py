"""Memory that other Penstock processes of this user have reserved and not used yet.

KV memory is taken only when it is written, so free memory alone does not show what processes that run already will need.
A reservation is a file named after its process; those of dead processes do not count and are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROC = Path("/proc")


class Reservations:
    """Does nothing where the system does not show the memory of other processes, or the folder cannot be used."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"penstock-memory-{os.getuid()}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process reads or adds reservations meanwhile."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o700, exist_ok=True)
                lock = stack.enter_context((self._folder / "lock").open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def unused(self) -> int:
        """Bytes that other live processes have reserved and not taken yet."""
        reserved: Counter[int] = Counter()
        with contextlib.suppress(OSError):
            for file in self._folder.glob("*.bytes"):
                pid = int(file.name.split(".")[0])
                if not (PROC / str(pid)).exists():
                    file.unlink(missing_ok=True)
                elif pid != os.getpid():
                    reserved[pid] += int(file.read_text() or 0)
        return sum(max(0, size - _resident(pid)) for pid, size in reserved.items())

    def reserve(self, size: int, owner: object) -> None:
        """Reserve memory until `owner` is gone."""
        if not PROC.exists():
            return
        with contextlib.suppress(OSError):
            file = self._folder / f"{os.getpid()}.{id(owner):x}.bytes"
            file.write_text(str(size))
            weakref.finalize(owner, _remove, file, os.getpid())


def _remove(file: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        file.unlink(missing_ok=True)


def _resident(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
