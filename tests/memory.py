"""Releases memory that tests no longer need to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

GROWTH = 50_000_000  # bytes

_kept = 0  # bytes of this process after it last released memory


def release_memory() -> None:
    """Return freed memory that the C library holds to the system, if this process has grown since the last call.

    glibc retains the memory of a freed model, but the next one seldom fits into the holes: a process that loads one model after
    the other would grow by half a gigabyte each time. Garbage collection takes a tenth of a second.
    """
    global _kept
    if _resident() < _kept + GROWTH:
        return
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none, and keep less
        if trim is not None:
            trim(0)
        _kept = _resident()


def _resident() -> int:
    """Resident bytes of this process; a large number if unknown."""
    if sys.platform != "linux":
        return sys.maxsize
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
