"""Weights that were rounded once are mapped from disk; what is stale or damaged there is made anew."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.config.engine import EngineConfig
from penstock.model.files.cache import cache_dir
from penstock.model.files.weight_files import WeightFiles
from penstock.model.packed.packed_file import SOURCE
from penstock.pipes.loading.model_manager import LoadedModel, ModelManager
from tests.kernels.test_native_model import BLOCK_SIZE, KV_MEMORY, LAYERS, TEXT, load, logits, write_model

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "llama with biases")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were read from the model's files, for each call."""
    found: list[int] = []
    read = WeightFiles.read_hashed

    def counted(self: WeightFiles, shapes: dict[str, tuple[int, ...]]) -> object:
        found.append(len(shapes))
        return read(self, shapes)

    monkeypatch.setattr(WeightFiles, "read_hashed", counted)
    return found


def packed_files() -> list[Path]:
    return sorted(path for path in (cache_dir() / "packed").glob("*/*") if path.name != SOURCE)


def hashes(model: LoadedModel) -> list[str]:
    assert model.ends is not None
    return [model.ends.weight_hash, *(segment.weight_hash for segment in model.segments)]


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_second_start_reads_no_weights_of_the_model(quant: str, folder: Path, reads: list[int]) -> None:
    first = load(folder, quant=quant)
    assert len(reads) == LAYERS + 1
    wanted, before = logits(first, TEXT), hashes(first)
    reads.clear()
    second = load(folder, quant=quant, segments=[(0, 1), (1, LAYERS)])
    assert reads == []
    assert np.array_equal(logits(second, TEXT), wanted)
    assert hashes(load(folder, quant=quant)) == before
    assert len(packed_files()) == LAYERS + 1


def test_weights_that_are_not_rounded_are_not_kept(folder: Path) -> None:
    load(folder)
    assert packed_files() == []


def test_weights_that_have_changed_are_rounded_again(folder: Path) -> None:
    before = logits(load(folder, quant="int8"), TEXT)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(tensors, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    after = logits(load(folder, quant="int8"), TEXT)
    assert not np.array_equal(after, before)
    assert np.array_equal(logits(load(folder, quant="int8"), TEXT), after)
    assert len(packed_files()) == LAYERS + 1


def test_other_kernels_round_anew(folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder, quant="int8")
    reads.clear()
    monkeypatch.setattr("penstock.model.packed.packing.library_path", lambda: Path("libpenstock-other.so"))
    load(folder, quant="int8")
    assert len(reads) == LAYERS + 1


@pytest.mark.parametrize("damage", ["a bit", "cut short", "empty", "no header", "huge header"])
def test_damaged_files_are_made_anew(damage: str, folder: Path, reads: list[int]) -> None:
    wanted = logits(load(folder, quant="int4"), TEXT)
    file = packed_files()[1]
    content = file.read_bytes()
    damaged = {
        "a bit": content[:-100] + bytes([content[-100] ^ 4]) + content[-99:],
        "cut short": content[: len(content) // 2],
        "empty": b"",
        "no header": bytes(len(content)),
        "huge header": b"\xff" * 8 + content[8:],
    }[damage]
    file.write_bytes(damaged)
    reads.clear()
    assert np.array_equal(logits(load(folder, quant="int4"), TEXT), wanted)
    assert len(reads) == 1
    assert file.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = logits(load(folder, quant="int8"), TEXT)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert np.array_equal(logits(load(folder, quant="int8"), TEXT), wanted)
    assert f"Rounded weights cannot be kept in {tmp_path / 'file'}" in caplog.text


def test_what_was_kept_of_a_model_that_is_gone_is_removed(folder: Path, tmp_path: Path) -> None:
    load(folder, quant="int8")
    shutil.rmtree(folder)
    load(write_model(tmp_path / "other"), quant="int8")
    assert {path.parent.name.rpartition("-")[0] for path in packed_files()} == {"other"}


def test_rounding_shows_its_progress_once(folder: Path) -> None:
    def load_and_watch() -> set[str]:
        seen: set[str] = set()
        manager = ModelManager(EngineConfig(block_size=BLOCK_SIZE), lambda what, done, total: seen.add(what))
        manager.load(str(folder), device="cpu", kv_memory=KV_MEMORY, quant="int4")
        return seen

    assert "Rounding layers to int4" in load_and_watch()
    assert load_and_watch() == {"Loading layers"}
