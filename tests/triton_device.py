"""Where Triton's kernels are tested: on the GPU where there is one, otherwise in Triton's interpreter, if Triton is installed."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from tests.triton_interpreter import quicken

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported


@pytest.fixture(scope="session")
def device() -> torch.device:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: `make test-slow` does that on Linux")
    if torch.cuda.is_available():
        return torch.device("cuda")
    quicken()
    return torch.device("cpu")


@pytest.fixture(scope="session")
def cuda(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("there is no CUDA device")
    return device
