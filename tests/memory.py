"""Memory that tests do not need any more goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

GROWTH = 50_000_000  # bytes

_kept = 0  # bytes of this process after it last released memory


def release_memory() -> None:
    """Return freed memory to the system, where the C library would keep it, if this process has grown since the last time.

    glibc keeps the room of a freed model for later, but the next one seldom fits into the holes: a process that loads one
    model after the other would grow by half a gigabyte each time. To look for garbage takes a tenth of a second.
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
    """Bytes of memory that this process holds; many where that is not known."""
    if sys.platform != "linux":
        return sys.maxsize
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
