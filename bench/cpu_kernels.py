"""Measure the native kernels: how fast they read packed weights for one row, and compute for many.

    python bench/cpu_kernels.py [--threads N] [--seconds S]

Each figure is followed by its share of the memory copy bandwidth on as many threads, measured in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.kernels.library import KernelContext, usable_paths
from penstock.kernels.packed import PackedMatrix, packed_bytes
from penstock.kernels.structs import Kind, SourceType

ROWS, COLS, MATRICES = 3072, 1536, 24  # 70 MB in four bits: more than the caches
KINDS = (Kind.Q4, Kind.Q4M, Kind.Q8, Kind.BF16)
COPY_BYTES = 128 << 20  # for each thread


def best_seconds(body: Callable[[], object], seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, at least three."""
    end, found = time.perf_counter() + seconds, []
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        body()
        found.append(time.perf_counter() - start)
    return min(found)


def copy_speed(threads: int, seconds: float) -> float:
    """Bytes per second that are read, and as many written, by all threads together."""
    pairs = [(np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return 2 * threads * COPY_BYTES / best_seconds(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)), seconds)


def matrices(kind: Kind) -> list[PackedMatrix]:
    values = np.random.default_rng(0).standard_normal((ROWS, COLS)).astype(np.float32)
    first = PackedMatrix(kind, ROWS, COLS)
    first.pack(SourceType.F32, values)
    rest = [PackedMatrix(kind, ROWS, COLS) for _ in range(MATRICES - 1)]
    for other in rest:
        other.data[:] = first.data
    return [first, *rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="default: as many as the affinity mask allows")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    options = parser.parse_args()
    paths = [path for path in usable_paths() if path != "portable"] or ["portable"]
    threads = KernelContext(options.threads).threads
    copied = copy_speed(threads, options.seconds)
    print(f"{threads} threads; copying memory: {copied / 1e9:.1f} GB/s, read and written")
    for kind in KINDS:
        weights = matrices(kind)
        size = MATRICES * packed_bytes(kind, ROWS, COLS)
        for path in paths:
            context = KernelContext(threads, path)
            for m in (1, 8, 64, 512):
                x = np.random.default_rng(1).standard_normal((m, COLS)).astype(np.float32)

                def run(context: KernelContext = context, x: np.ndarray = x, weights: list[PackedMatrix] = weights) -> None:
                    for matrix in weights:
                        context.product(matrix.struct, x)

                taken = best_seconds(run, options.seconds)
                print(
                    f"{path:<9} {kind.name:<5} {m:>4} rows  {size / taken / 1e9:6.2f} GB/s of weights"
                    f" ({size / taken / copied:4.0%} of copying)  {2 * m * ROWS * COLS * MATRICES / taken / 1e9:8.1f} GFLOP/s"
                )


if __name__ == "__main__":
    main()
