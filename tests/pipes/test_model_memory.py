"""A model that does not fit: what is said when the memory runs out although it looked like enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.engine import EngineConfig
from penstock.errors import NotEnoughMemory
from penstock.model.batch import BatchPiece
from penstock.model.largest_pass import run_largest_pass
from penstock.pipes import model_manager
from penstock.pipes.model_manager import ModelManager

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB.\nMore words."


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."),
    ],
)
@pytest.mark.parametrize("where", ["available_memory", "LlmModel", "read_spec"])
def test_memory_that_runs_out_is_a_clear_error_with_what_helps(
    where: str, error: RuntimeError, small_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is full fails at the first look at it, and one that is almost full while weights or KV are allocated."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(model_manager, where, fail)
    with pytest.raises(NotEnoughMemory, match="memory") as caught:
        ModelManager(EngineConfig()).load(str(small_model_folder), dtype="float32")
    assert "--kv-memory" in caught.value.hint
    assert "\n" not in caught.value.message


def test_other_errors_stay_what_they_are(small_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(model_manager, "LlmModel", fail)
    with pytest.raises(RuntimeError, match="something else"):
        ModelManager(EngineConfig()).load(str(small_model_folder), dtype="float32")


class Card:
    """Segments on a card with room for this many blocks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[int] = []
        self.blocks = 5

    def allocate_kv(self, blocks: int) -> None:
        self.asked.append(blocks)
        if blocks > self.room:
            raise torch.OutOfMemoryError(CUDA)
        self.blocks = blocks


def test_memory_that_is_less_than_it_should_be_has_fewer_blocks() -> None:
    card: Any = Card(800)
    model_manager.fill_kv([card], 1000, least=2)
    assert card.blocks == 729
    assert card.asked == [0, 1000, 0, 900, 0, 810, 0, 729]  # what there was is given back first


def test_a_card_without_room_for_any_blocks_is_an_error() -> None:
    card: Any = Card(1)
    with pytest.raises(torch.OutOfMemoryError):
        model_manager.fill_kv([card], 1000, least=2)


def test_the_share_of_a_gpu_is_of_all_its_memory(small_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manager, "available_memory", lambda device: 70)
    monkeypatch.setattr(model_manager, "total_memory", lambda device: 100)
    cuda = torch.device("cuda")
    assert ModelManager(EngineConfig(gpu_memory=0.75))._unreserved(cuda) == 45
    assert ModelManager(EngineConfig(gpu_memory=0.25))._unreserved(cuda) == 0
    found = replace(ModelManager(EngineConfig()).find("small", small_model_folder, dtype="float32"), device=cuda)
    monkeypatch.setattr(model_manager, "available_memory", lambda device: 1 << 40)
    monkeypatch.setattr(model_manager, "total_memory", lambda device: 1 << 41)
    with pytest.raises(NotEnoughMemory, match=r"gpu_memory = 0\.5 leaves") as caught:
        ModelManager(EngineConfig(gpu_memory=0.5)).kv_blocks(found, None, None, None)
    assert "--gpu-memory" in caught.value.hint


def test_the_largest_pass_runs_on_nothing_and_leaves_nothing_behind(small_model_folder: Path) -> None:
    loaded = ModelManager(EngineConfig()).load(str(small_model_folder), dtype="float32", kv_memory=1 << 22)
    ends = loaded.ends
    assert ends is not None

    def pass_through() -> torch.Tensor:
        hidden = ends.compute_embed([7, 8, 9])
        for segment in loaded.segments:
            hidden = segment.process(hidden, [BatchPiece(0, 3, [1])])
        return hidden

    before = pass_through()
    run_largest_pass(loaded.spec, loaded.segments, ends, loaded.device, tokens=100, rows=5, block=16)
    assert torch.equal(pass_through(), before)
