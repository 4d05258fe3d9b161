"""Measure free memory, and tune the page size for inference."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.errors import NotEnoughMemory
from penstock.kernels.weight_memory import HUGE_PAGE_BYTES

# Linux's madvise advice
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory")  # in the messages of torch's other errors


def use_huge_pages() -> None:
    """Move weights that torch has loaded onto 2 MiB pages, where Linux allows it; packed ones are there (`WeightMemory`).

    Memory that was never written stays untouched. The kernel copies as fast as memory goes, which nobody waits for.
    """
    if sys.platform.startswith("linux"):
        threading.Thread(target=_collapse_pages, name="penstock-pages", daemon=True).start()


def _collapse_pages() -> None:
    try:
        madvise = ctypes.CDLL(None).madvise
        lines = Path("/proc/self/maps").read_text().splitlines()
    except (OSError, AttributeError):
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in lines:
        where, rights, _, _, inode, *name = line.split(maxsplit=5)
        if not rights.startswith("rw-p") or inode != "0" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(part, 16) for part in where.split("-"))
        start, end = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if end - start >= 2 * HUGE_PAGE_BYTES:
            madvise(start, end - start, _MADV_HUGEPAGE)
            madvise(start, end - start, _MADV_COLLAPSE)  # an older kernel rejects this and does it later by itself


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now. On a CUDA GPU, also those that torch keeps of what was freed."""
    if device.type == "cuda":
        return untaken_memory(device) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = _meminfo()
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and used is not None:
        found = min(found, max(limit - used, 0))
    return found


def untaken_memory(device: torch.device) -> int:
    """Bytes of a CUDA GPU that no program has taken, this one included."""
    return int(torch.cuda.mem_get_info(device)[0])


def total_memory(device: torch.device) -> int:
    """Bytes that a CUDA GPU has."""
    return int(torch.cuda.mem_get_info(device)[1])


def _meminfo() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # not Linux: assume that half is free


def _cgroup(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


@contextmanager
def explaining_exhaustion() -> Iterator[None]:
    """Turn an allocation that fails, on a GPU or in main memory, into an error that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # of torch, and of numpy, which has the memory of the native kernels
        reason = next(iter(str(error).splitlines()), "")
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not any(words in reason for words in _EXHAUSTED):
            raise
        raise NotEnoughMemory(
            f"The memory ran out while the model was loaded: {reason}",
            hint="Close other programs that use this GPU or memory, set --max-memory, --kv-memory or --gpu-memory to less, "
            "choose a smaller model, or compute elsewhere with --device cpu.",
        ) from error
