"""Memory that tests do not need any more goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Return freed memory to the system, where the C library would keep it.

    glibc keeps the room of a freed model for later, but the next one seldom fits into the holes: a process that loads one
    model after the other would grow by half a gigabyte each time.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none, and keep less
        if trim is not None:
            trim(0)
