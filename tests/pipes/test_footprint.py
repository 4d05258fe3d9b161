"""How many layers fit into a budget, and whether that is what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipes.footprint import Budget, Footprint
from tests.server import clean_environment

FOOTPRINT = Footprint(layer=70, ends=1000, kv_block=3, peak=20, least_blocks=10, most_blocks=1000)


def test_a_budget_counts_ends_layers_kv_and_the_peak_of_loading() -> None:
    assert FOOTPRINT.least == 100
    assert Budget(FOOTPRINT, 1320, ends=True).room == 3
    assert Budget(FOOTPRINT, 1319, ends=True).room == 2
    assert Budget(FOOTPRINT, 1319, ends=False).room == 12
    assert Budget(FOOTPRINT, 500, ends=True).room == 0


def test_what_is_given_back_can_be_taken_again() -> None:
    budget = Budget(FOOTPRINT, 820, ends=False)
    assert budget.room == 8
    blocks = budget.blocks(3)
    budget.take(3, blocks)
    assert budget.room < 5  # some of what was left is KV now
    budget.give_back(3, blocks)
    assert budget.room == 8


def test_kv_memory_that_was_asked_for_is_what_all_layers_share() -> None:
    budget = Budget(FOOTPRINT, 1000, ends=False, kv_memory=300)
    assert budget.room == 9  # of weights alone
    assert budget.blocks(5) == 20
    budget.take(5, 20)
    assert budget.room == 0  # no KV is left for another


@given(
    total=st.integers(0, 10**6),
    ends=st.booleans(),
    kv_memory=st.none() | st.integers(1, 10**5),
    asked=st.lists(st.integers(1, 12), max_size=6),
)
def test_a_budget_is_never_exceeded(total: int, ends: bool, kv_memory: int | None, asked: list[int]) -> None:
    budget = Budget(FOOTPRINT, total, ends=ends, kv_memory=kv_memory)
    for wanted in asked:
        layers = min(wanted, budget.room)
        if layers:
            blocks = budget.blocks(layers)
            assert blocks >= 2
            budget.take(layers, blocks)
            assert budget.spent <= total
            assert budget.room >= 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="how much memory a process has is asked of Linux")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_loaded_takes_no_more_than_its_budget(dtype: str, default_model_folder: Path) -> None:
    """In a process of its own, with every byte of KV written. The tokenizer is made before: it is no part of a budget."""
    script = """
import json, re, sys
from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.model.sources import resolve
from penstock.model.tokenizer import Tokenizer
from penstock.pipes.model_manager import ModelManager

def held() -> int:
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

manager, folder = ModelManager(EngineConfig()), resolve("smollm2-135m")
found = manager.find("smollm2-135m", folder, dtype=sys.argv[1], device="cpu")
kept = [Tokenizer(folder), manager.load_layers(found, LayerRange(29, 30), 2)]  # and what libraries set up once
budget = manager.budget(found, ends=True, kv_memory=None, max_memory=400_000_000)
before = held()
kept.append(manager.load_ends(found))
room = budget.room
blocks = budget.blocks(room)
segment = manager.load_layers(found, LayerRange(0, room), blocks)
for layer in segment._layers:
    layer.kv.fill_(1)
budget.take(room, blocks)
print(json.dumps({"room": room, "spent": budget.spent, "total": budget.total, "measured": held() - before}))
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
    tokenizer = 40_000_000  # the ends have one of their own
    assert 0.6 * found["spent"] < found["measured"] < found["total"] + tokenizer, found
