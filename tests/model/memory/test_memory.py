"""What a process keeps: freed memory goes back when asked for, and a served model's memory stays the same."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.errors import NotEnoughMemory
from penstock.model.memory.machine import explaining_exhaustion

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")

RESIDENT = """
from pathlib import Path

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])  # in pages
"""


def run(script: str) -> list[int]:
    """Run a script in a process of its own, and return the numbers that it prints."""
    done = subprocess.run([sys.executable, "-c", RESIDENT + script], capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize("allocate", [lambda: np.zeros(1 << 60, np.uint8), lambda: torch.zeros(1 << 60, dtype=torch.uint8)])
def test_memory_that_runs_out_is_explained(allocate: Callable[[], object]) -> None:
    with (
        pytest.raises(NotEnoughMemory, match=r"The memory ran out while the model was loaded: .*allocate"),
        explaining_exhaustion(),
    ):
        allocate()


def test_freed_memory_is_kept_until_it_is_returned() -> None:
    before, kept, returned = run("""
from penstock.model.memory.allocator import keep_freed_memory, return_freed_memory
keep_freed_memory()
before = resident()
pieces = [bytearray(b"x" * (1 << 20)) for _ in range(200)]
last = bytearray(b"x" * (1 << 16))  # in front of it lies what was freed
del pieces
kept = resident()
return_freed_memory()
print(before, kept, resident())
""")
    pages = (200 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert kept - before > 0.8 * pages
    assert returned - before < 0.2 * pages


@pytest.mark.slow
def test_requests_of_ever_new_sizes_take_no_more_memory() -> None:
    warm, end = run("""
import random
from penstock import LLM, SamplingParams

chance = random.Random(1)

def ask(count: int) -> None:
    for _ in range(count):
        prompts = [[chance.randrange(1000) for _ in range(chance.randrange(1, 120))] for _ in range(chance.randrange(1, 6))]
        llm.generate(prompts, SamplingParams(temperature=0.7, max_tokens=chance.randrange(1, 8)), use_tqdm=False)

with LLM("smollm2-135m", device="cpu", kv_memory=24 << 20) as llm:
    llm.generate([[5] * 600], SamplingParams(max_tokens=1), use_tqdm=False)
    ask(10)
    warm = resident()
    ask(20)
    print(warm, resident())
""")
    assert end <= 1.05 * warm
