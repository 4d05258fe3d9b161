"""WeightMemory: where packed weights lie, on pages of 2 MiB where Linux allows it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.packed import ALIGNMENT

HUGE_PAGE_BYTES = 2 << 20
_MAPPING_BYTES = 64 << 20  # takes none until written


class WeightMemory:
    """Hands out pieces of large mappings, each of which lasts as long as its pieces.

    A decode step reads every weight once; with pages of 4 KiB much of that time goes into page table lookups (with huge pages
    1 stream is 7 % faster, and so are 32). From the heap they would take small objects along, and what lies free between them.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # layers are read by several threads
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, which are 0."""
        with self._lock:
            if len(self._left) < size:
                self._left = _map(max(size, _MAPPING_BYTES))
            piece = self._left[:size]
            self._left = self._left[size + -size % ALIGNMENT :]
            return piece


def _map(size: int) -> NDArray[np.uint8]:
    try:
        memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"Unable to allocate {size} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    skip = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[skip : skip + size]
