"""A model that does not fit: what is said when the memory runs out although it looked like enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.engine import EngineConfig
from penstock.errors import NotEnoughMemory
from penstock.pipes.loading import model_manager
from penstock.pipes.loading.model_manager import ModelManager

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
