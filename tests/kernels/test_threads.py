"""The thread pool: each item once, whoever calls, and after a fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.kernels.library import KernelContext, KernelsError
from penstock.kernels.packed import PackedMatrix
from penstock.kernels.structs import Kind, SourceType

SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_runs_once(native: None, threads: int) -> None:
    pool = KernelContext(threads)
    for items in (0, 1, 2, 7, 40, 100):
        seen: list[int] = []
        pool.parallel(items, seen.append)
        assert sorted(seen) == list(range(items))


def test_more_items_than_a_round_counts_run_once(native: None) -> None:
    seen = np.zeros(70_000, np.int8)

    def run(item: int) -> None:
        seen[item] += 1

    KernelContext(1).parallel(len(seen), run)
    KernelContext(2).parallel(len(seen), run)
    assert (seen == 2).all()


def test_callers_of_one_context_take_turns(native: None) -> None:
    pool = KernelContext(3)
    counts = [0] * 4

    def call(caller: int) -> None:
        for _ in range(30):
            seen: list[int] = []
            pool.parallel(9, seen.append)
            counts[caller] += len(set(seen))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts == [270] * 4


def test_threads_follow_the_affinity_mask_and_the_argument(native: None) -> None:
    assert KernelContext().threads == len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert KernelContext(3).threads == 3


def test_an_unknown_path_is_refused(native: None) -> None:
    with pytest.raises(KernelsError, match="cannot run the path 'abacus'"):
        KernelContext(1, "abacus")


def test_the_caller_releases_the_gil(native: None) -> None:
    """Two contexts whose items wait for each other finish only if neither holds the interpreter."""
    barrier = threading.Barrier(2, timeout=20)
    other = threading.Thread(target=lambda: KernelContext(1).parallel(1, lambda _: barrier.wait() and None))
    other.start()
    KernelContext(1).parallel(1, lambda _: barrier.wait() and None)
    other.join()


def _multiply(context: KernelContext, matrix: PackedMatrix, x: np.ndarray, wanted: np.ndarray) -> None:
    os._exit(0 if np.array_equal(context.product(matrix.struct, x), wanted) else 1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_computes_with_threads_of_its_own(native: None) -> None:
    context = KernelContext(3)
    rng = np.random.default_rng(0)
    matrix = PackedMatrix(Kind.Q4M, 256, 256)
    matrix.pack(SourceType.F32, rng.standard_normal((256, 256)).astype(np.float32))
    x = rng.standard_normal((8, 256)).astype(np.float32)
    wanted = context.product(matrix.struct, x)
    child = multiprocessing.get_context("fork").Process(target=_multiply, args=(context, matrix, x, wanted))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert np.array_equal(context.product(matrix.struct, x), wanted)


def test_a_process_ends_while_its_threads_wait(native: None) -> None:
    program = """
from penstock.kernels.library import KernelContext
KernelContext(4).parallel(9, lambda item: print(f"{item} ", end=""))
KernelContext(4)
"""
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == list("012345678")
