"""How many layers fit into a budget, and whether that is what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipes.loading.footprint import DEFAULT_KV_TOKENS, Budget, Footprint
from tests.server import clean_environment

CONTEXT = 131072
FOOTPRINT = Footprint(
    num_layers=12,
    layer=70,
    ends=1000,
    kv_block=3,
    loading=20,
    activations=8,
    mask_block=2,
    context_blocks=50,
    min_blocks=10,
    max_blocks=1000,
)
BUFFERS = 20 + 2 * 10 * 3 + 10 * 2  # while loading; the KV that a pass gathers, and its mask, with the fewest blocks


def test_a_budget_counts_ends_layers_kv_and_the_peak_of_loading() -> None:
    assert Budget(FOOTPRINT, 1300 + BUFFERS, ends=True).capacity == 3
    assert Budget(FOOTPRINT, 1299 + BUFFERS, ends=True).capacity == 2
    assert Budget(FOOTPRINT, 1100 + BUFFERS, ends=False).capacity == 11
    assert Budget(FOOTPRINT, 10**6, ends=False).capacity == 12  # the model has no more
    assert Budget(FOOTPRINT, 500, ends=True).capacity == 0


def test_what_is_left_beside_the_layers_is_kv_for_all_of_them() -> None:
    assert Budget(FOOTPRINT, 12 * 100 + BUFFERS, ends=False).blocks == 10
    assert Budget(FOOTPRINT, 20 + 12 * 70 + 30 * (14 * 3 + 2), ends=False).blocks == 30
    assert Budget(FOOTPRINT, 20 + 12 * 70 + 100 * 14 * 3 + 50 * 2, ends=False).blocks == 100  # no mask beyond a context
    assert Budget(FOOTPRINT, 10**9, ends=False).blocks == FOOTPRINT.max_blocks
    assert Budget(FOOTPRINT, 20 + 3 * 70 + 30 * (5 * 3 + 2), ends=False, layers=3).blocks == 30  # as many as the settings ask for


def test_without_a_limit_part_of_what_is_left_stays_free() -> None:
    half = Budget(FOOTPRINT, 20 + 12 * 70 + 2 * 30 * (14 * 3 + 2), ends=False, kv_share=0.5)
    assert (half.capacity, half.blocks) == (12, 30)


def test_kv_memory_that_was_asked_for_is_what_all_layers_share() -> None:
    budget = Budget(FOOTPRINT, 20 + 5 * 70 + 300 + 20 * (2 * 3 + 2), ends=False, kv_memory=300)
    assert (budget.capacity, budget.blocks) == (5, 20)
    assert Budget(FOOTPRINT, 10**6, ends=False, kv_memory=13).capacity == 2  # a layer needs two blocks


def test_layers_that_come_and_go_change_nothing_for_the_others() -> None:
    budget = Budget(FOOTPRINT, 8 * 100 + BUFFERS, ends=False)
    blocks = budget.blocks
    budget.held = 3
    assert (budget.room, budget.blocks) == (5, blocks)
    budget.held = 0
    assert budget.room == 8


def llama(num_layers: int, hidden: int, intermediate: int) -> Footprint:
    """In bf16, with 8 KV heads of 128 numbers, blocks of 16 tokens and a context of 131,072."""
    layer = 2 * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * intermediate)
    return Footprint(
        num_layers=num_layers,
        layer=layer,
        ends=2 * 2 * 128256 * hidden,
        kv_block=2 * 2 * 16 * 1024,
        loading=2 * 2 * hidden * intermediate,
        activations=2048 * (14 * hidden + 2 * (2 * (hidden + 1024) + 3 * intermediate)),
        mask_block=2048 * 16 * 2,
        context_blocks=CONTEXT // 16,
        min_blocks=DEFAULT_KV_TOKENS // 16 + 1,
        max_blocks=256 * CONTEXT // 16,
    )


@pytest.mark.parametrize(
    "footprint, gigabytes, layers",
    [(llama(32, 4096, 14336), 64, 0), (llama(80, 8192, 28672), 113, 40)],
    ids=["all of an 8B model", "half of a 70B model"],
)
def test_memory_that_is_left_over_holds_the_kv_of_at_least_one_full_context(
    footprint: Footprint, gigabytes: int, layers: int
) -> None:
    budget = Budget(footprint, gigabytes * 10**9, ends=False, layers=layers)
    if budget.capacity < (layers or footprint.num_layers):
        pytest.fail("all of these layers should fit")
    assert budget.blocks * 16 >= CONTEXT


@given(
    total=st.integers(0, 10**6),
    ends=st.booleans(),
    kv_memory=st.none() | st.integers(1, 10**5),
    layers=st.integers(0, 12),
)
def test_a_budget_is_never_exceeded(total: int, ends: bool, kv_memory: int | None, layers: int) -> None:
    budget = Budget(FOOTPRINT, total, ends=ends, kv_memory=kv_memory, layers=layers)
    budget.held = budget.capacity
    assert budget.room == 0
    if budget.capacity:
        assert budget.blocks >= 2
        assert budget.spent + FOOTPRINT.peak + FOOTPRINT.kv(0, budget.blocks) <= total
        assert kv_memory is None or budget.capacity * budget.blocks * FOOTPRINT.kv_block <= kv_memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="how much memory a process has is asked of Linux")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_loaded_takes_no_more_than_its_budget(dtype: str, default_model_folder: Path) -> None:
    """In a process of its own, with every byte of KV written, and in the largest pass. A tokenizer is no part of a budget."""
    script = """
import json, re, sys, threading
import torch
from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.model.batch import BatchPiece
from penstock.model.sources import resolve
from penstock.model.text.tokenizer import Tokenizer
from penstock.pipes.loading.model_manager import ModelManager

def held() -> int:
    for thread in threading.enumerate():
        if thread.name == "penstock-pages":
            thread.join()  # until it has moved everything
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def most() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def resident() -> int:
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

manager, folder = ModelManager(EngineConfig(chunk=64)), resolve("smollm2-135m")
found = manager.find("smollm2-135m", folder, dtype=sys.argv[1], device="cpu")
small = manager.load_layers(found, LayerRange(29, 30), 2)
small.process(torch.zeros(16, 576), [BatchPiece(0, 16, range(1, 2))])
kept = [Tokenizer(folder), small]  # and what libraries set up once, and their code
budget = manager.budget(found, ends=True, kv_memory=None, max_memory=400_000_000)
before = held()
kept.append(manager.load_ends(found))
room = budget.held = budget.room
segment = manager.load_layers(found, LayerRange(0, room), budget.blocks)
for layer in segment._layers:
    layer.kv.fill_(1)
spent, total, measured = budget.spent, budget.total, held() - before
tokens, end = 256, budget.blocks * 16
open("/proc/self/clear_refs", "w").write("5")
resting = resident()
if sys.argv[1] == "float32":
    segment.process(torch.zeros(tokens, 576), [BatchPiece(end - tokens, tokens, range(1, budget.blocks + 1))])
pass_ = most() - resting
print(json.dumps({"room": room, "spent": spent, "total": total, "measured": measured, "pass": pass_}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, dtype],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["room"] >= 5
    assert found["spent"] <= found["total"]
    slack = 60_000_000  # the ends have a tokenizer of their own, and memory is taken in huge pages
    assert 0.6 * found["spent"] < found["measured"] < found["total"] + slack, found
    assert found["measured"] + found["pass"] < found["total"] + slack, found
