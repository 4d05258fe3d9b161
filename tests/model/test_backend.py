"""Which back-end computes a model, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError
from penstock.model import backend
from penstock.model.architecture.spec import spec_from_config
from penstock.model.backend import Backend, check_kv_dtype, choose_backend

CUDA = torch.device("cuda:0")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new GPU, and Triton."""
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")


def chosen(device: torch.device = CUDA, **changes: object) -> str:
    return str(choose_backend(spec_from_config(LLAMA | changes), Path(), dtype="auto", device=device))


def test_triton_computes_on_a_gpu(card) -> None:
    assert chosen() == "Triton kernels"


def test_torch_computes_on_a_gpu_without_triton_and_says_so(card, monkeypatch) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert chosen() == "PyTorch (Triton is not installed)"


def test_torch_computes_on_a_gpu_that_is_too_old(card, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert chosen() == "PyTorch (A Card is older than what Triton computes on)"


def test_torch_computes_heads_that_are_too_wide(card) -> None:
    assert chosen(head_dim=512) == "PyTorch (the Triton kernels do not compute heads of 512 numbers)"


def test_the_variable_chooses(card, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    assert chosen() == "PyTorch (PENSTOCK_KERNELS = torch)"
    monkeypatch.setenv("PENSTOCK_KERNELS", "triton")
    assert chosen() == "Triton kernels"
    with pytest.raises(ConfigError, match="PENSTOCK_KERNELS = triton, but the device is cpu"):
        chosen(torch.device("cpu"))


def rounded(quant: str, device: torch.device = CUDA, dtype: str = "auto") -> str:
    packing = choose_backend(spec_from_config(LLAMA), Path(), dtype=dtype, device=device, quant=quant).packing
    assert packing is not None
    return packing.precision


def test_a_card_takes_rounded_weights(card, monkeypatch) -> None:
    assert rounded("fp8") == "fp8"
    monkeypatch.setattr(backend, "load", object)
    assert rounded("int4") == "int4"


def test_keys_and_values_in_fp8_need_triton_and_a_card_that_computes_with_them(card, monkeypatch) -> None:
    check_kv_dtype("auto", Backend(), torch.device("cpu"))
    check_kv_dtype("fp8", Backend(triton=True), CUDA)
    with pytest.raises(ConfigError, match=r"kv_dtype = fp8 needs the Triton kernels on a CUDA GPU, not PyTorch on cpu\."):
        check_kv_dtype("fp8", Backend(), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"A Card does not compute in fp8\. Leave kv_dtype out\."):
        check_kv_dtype("fp8", Backend(triton=True), CUDA)


def test_weights_are_refused_where_nothing_computes_with_them(card, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="quant = fp8 needs a CUDA GPU, but the device is cpu"):
        rounded("fp8", torch.device("cpu"))
    with pytest.raises(ConfigError, match="quant = int8 needs the native kernels, but the device is mps"):
        rounded("int8", torch.device("mps"))
    with pytest.raises(ConfigError, match="quant = fp8, but dtype = bfloat16"):
        rounded("fp8", dtype="bfloat16")
    monkeypatch.setattr(backend, "load", lambda: None)
    with pytest.raises(ConfigError, match="quant = int8 needs the native kernels, which are not compiled"):
        rounded("int8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="A Card does not compute in fp8"):
        rounded("fp8")
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    with pytest.raises(ConfigError, match="quant = fp8 needs the Triton kernels, but PENSTOCK_KERNELS = torch"):
        rounded("fp8")
