"""A model on a GPU: KV gets what the largest pass leaves. Without a GPU, in Triton's interpreter, on memory that is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.config.engine import EngineConfig
from penstock.model.backend import Backend
from penstock.pipes import model_manager
from penstock.pipes.model_manager import ModelManager
from tests.parity.tiny_models import KINDS, LAYERS, make
from tests.triton_device import device as device

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling


def test_kv_gets_what_the_largest_pass_leaves(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(KINDS["gemma3_text"], tmp_path)
    config = EngineConfig(chunk=8, idle_chunk=24, crowd_chunk=8, max_sequences=3, block_size=4)
    manager = ModelManager(config)
    monkeypatch.setattr(model_manager, "choose_backend", lambda *_, **__: Backend(triton=True))
    monkeypatch.setattr(ModelManager, "_unreserved", lambda *_, **__: 1 << 22)
    caplog.set_level("INFO", "penstock.memory")
    found = manager.load(str(tmp_path), dtype="float32", device=device.type, segments=[(0, 2), (2, LAYERS)])
    footprint = manager.footprint(found)
    blocks = min(footprint.max_blocks, footprint.min_blocks + (1 << 22) // (footprint.kv_block * LAYERS))
    groups = found.spec.kv_groups
    assert [one.kv_blocks for one in found.segments] == [groups.rows_within(one.layers, blocks) for one in found.segments]
    tokens = min(one.kv_blocks for one in found.segments) * config.block_size
    assert f"KV memory for {tokens} tokens" in caplog.text
