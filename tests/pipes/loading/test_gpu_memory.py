"""A model on a GPU: KV gets what the largest pass leaves. Without a GPU, in Triton's interpreter, on memory that is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.engine import EngineConfig
from penstock.errors import NotEnoughMemory
from penstock.model.backend import Backend
from penstock.model.batch import BatchPiece
from penstock.model.largest_pass import run_largest_pass
from penstock.model.memory.machine import available_memory, untaken_memory
from penstock.pipes.loading import gpu_memory, model_manager
from penstock.pipes.loading.gpu_memory import allocate_kv
from penstock.pipes.loading.model_manager import ModelManager
from tests.parity.tiny_models import KINDS, LAYERS, make
from tests.triton_device import device as device


@pytest.mark.slow  # the interpreter takes its time, and so does compiling
def test_kv_gets_what_the_largest_pass_leaves(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(KINDS["gemma3_text"], tmp_path)
    config = EngineConfig(chunk=8, idle_chunk=24, crowd_chunk=8, max_sequences=3, block_size=4)
    manager = ModelManager(config)
    monkeypatch.setattr(model_manager, "choose_backend", lambda *_, **__: Backend(triton=True))
    monkeypatch.setattr(gpu_memory, "untaken_memory", lambda device: 2 << 22)
    monkeypatch.setattr(gpu_memory, "total_memory", lambda device: 10 << 22)  # of which gpu_memory leaves a tenth
    caplog.set_level("INFO", "penstock.memory")
    found = manager.load(str(tmp_path), dtype="float32", device=device.type, segments=[(0, 2), (2, LAYERS)])
    footprint = manager.footprint(found)
    size = (1 << 22) + footprint.min_blocks * footprint.kv_block * LAYERS
    blocks = min(footprint.max_blocks, footprint.blocks_within(size, LAYERS))
    assert footprint.text_block > 0  # a pass brings the KV of a text side by side
    assert footprint.kv(LAYERS, blocks) <= size
    groups = found.spec.kv_groups
    assert [one.kv_blocks for one in found.segments] == [groups.rows_within(one.layers, blocks) for one in found.segments]
    tokens = min(one.kv_blocks for one in found.segments) * config.block_size
    assert f"KV memory for {tokens} tokens" in caplog.text


class Card:
    """Segments on a card with room for this many blocks."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[int] = []
        self.blocks = 5

    def allocate_kv(self, blocks: int) -> None:
        self.asked.append(blocks)
        if blocks > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.blocks = blocks


def test_memory_that_is_less_than_it_should_be_has_fewer_blocks() -> None:
    card: Any = Card(800)
    allocate_kv([card], 1000, least=2)
    assert card.blocks == 729
    assert card.asked == [0, 1000, 0, 900, 0, 810, 0, 729]  # what there was is given back first


def test_a_card_without_room_for_any_blocks_is_an_error() -> None:
    card: Any = Card(1)
    with pytest.raises(torch.OutOfMemoryError):
        allocate_kv([card], 1000, least=2)


def test_the_share_of_a_gpu_is_of_all_its_memory(small_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_manager, "available_memory", lambda device: 70)
    monkeypatch.setattr(gpu_memory, "total_memory", lambda device: 100)
    cuda = torch.device("cuda")
    assert ModelManager(EngineConfig(gpu_memory=0.75))._unreserved(cuda) == 45
    assert ModelManager(EngineConfig(gpu_memory=0.25))._unreserved(cuda) == 0
    found = replace(ModelManager(EngineConfig()).find("small", small_model_folder, dtype="float32"), device=cuda)
    monkeypatch.setattr(model_manager, "available_memory", lambda device: 1 << 40)
    monkeypatch.setattr(gpu_memory, "total_memory", lambda device: 1 << 41)
    with pytest.raises(NotEnoughMemory, match=r"gpu_memory = 0\.5 leaves") as caught:
        ModelManager(EngineConfig(gpu_memory=0.5)).kv_blocks(found, None, None, None)
    assert "--gpu-memory" in caught.value.hint


def test_keys_and_values_in_fp8_take_half_the_memory(small_model_folder: Path) -> None:
    found = ModelManager(EngineConfig()).find("small", small_model_folder, dtype="bfloat16", device="cpu")
    sizes = [ModelManager(EngineConfig(kv_dtype=kind)).footprint(found).kv_block for kind in ("auto", "fp8")]
    assert sizes[0] == 2 * sizes[1]


def test_what_torch_keeps_of_freed_memory_can_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """So layers fit where others were dropped a moment ago."""
    figures = {"mem_get_info": (10, 100), "memory_reserved": 60, "memory_allocated": 45}
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, figure=figure: figure)
    assert available_memory(torch.device("cuda", 1)) == 25
    assert untaken_memory(torch.device("cuda", 1)) == 10


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
    run_largest_pass(loaded.spec, loaded.segments, ends, tokens=100, rows=5, block=16)
    assert torch.equal(pass_through(), before)
