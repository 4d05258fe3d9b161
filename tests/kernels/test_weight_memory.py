"""Memory for packed weights: aligned, apart from each other, and returned with the last of its pieces."""

from __future__ import annotations

import errno
import gc
import mmap
from pathlib import Path

import pytest

from penstock.kernels.packed import ALIGNMENT
from penstock.kernels.weight_memory import WeightMemory

SIZES = [1, 64, 100, 3 << 20, 70 << 20, 5]


def test_pieces_are_aligned_empty_and_apart() -> None:
    memory = WeightMemory()
    pieces = [memory.take(size) for size in SIZES]
    assert [len(piece) for piece in pieces] == SIZES
    assert not any(piece.ctypes.data % ALIGNMENT for piece in pieces)
    for number, piece in enumerate(pieces, 1):
        assert not piece[:100].any()
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says how much memory is mapped")
def test_a_mapping_goes_with_its_last_piece() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    memory, before = WeightMemory(), mapped()
    pieces = [memory.take(200 << 20), memory.take(200 << 20)]
    del pieces[0]
    gc.collect()
    assert 100 << 20 < mapped() - before < 350 << 20
    del pieces, memory
    gc.collect()
    assert mapped() - before < 100 << 20


def test_memory_that_runs_out_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="Unable to allocate"):
        WeightMemory().take(1 << 40)
