"""What bench and doctor say about a CUDA GPU."""

from __future__ import annotations

import importlib.metadata
import subprocess
from types import SimpleNamespace

import pytest
import torch

from penstock.cli.machine import doctor, hardware
from penstock.cli.machine.bench import find_limits, plan_gpu_rounds
from penstock.cli.machine.card import CardLimits, measure_card
from penstock.cli.machine.findings import CheckResult
from penstock.model.architecture.shapes import layer_params
from penstock.model.architecture.spec import spec_from_config
from tests.model.test_backend import LLAMA

CARD = CardLimits("A Card", bandwidth=4.2e12, flops=790e12)


def test_limits_are_those_of_reading_weights_and_of_multiplying() -> None:
    assert CARD.decode(16e9) == pytest.approx(262.5)
    assert CARD.read(7e9) == pytest.approx(56_429, rel=1e-4)
    assert str(CARD) == "A Card: copies 4.20 TB/s, multiplies 790 TFLOP/s in bf16"


def test_limits_follow_the_precision_and_the_experts_that_a_token_meets() -> None:
    def limits(precision: str, packing: object, **config: object) -> dict[str, float]:
        spec = spec_from_config(LLAMA | config)
        return find_limits(SimpleNamespace(spec=spec, dtype=precision, backend=SimpleNamespace(packing=packing)), CARD)

    packed = SimpleNamespace(
        layer_bytes=lambda index: layer_params(spec_from_config(LLAMA), index), end_bytes=lambda: 2 * 128 * 64
    )
    plain, half = limits("bfloat16", None), limits("fp8", packed)
    assert limits("float32", None)["one answer"] == pytest.approx(plain["one answer"] / 2)
    assert half["one answer"] == pytest.approx(2 * plain["one answer"], rel=0.01)
    assert half["reading a prompt"] == plain["reading a prompt"]
    experts = {"model_type": "qwen3_moe", "num_experts": 64, "moe_intermediate_size": 96, "norm_topk_prob": True}
    one, two = (limits("bfloat16", None, **experts, num_experts_per_tok=count) for count in (1, 2))
    assert one["one answer"] > two["one answer"]


def test_a_long_prompt_is_no_longer_than_the_context() -> None:
    assert [one.prompt_tokens for one in plan_gpu_rounds(64, context=2048)][-1] == 2047
    assert [one.prompt_tokens for one in plan_gpu_rounds(64, context=131072)][-1] == 8192


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_card_is_measured() -> None:
    found = measure_card("cuda")
    assert found.bandwidth > 1e10
    assert found.flops > 1e11


def test_doctor_says_what_is_lost_without_triton(monkeypatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    (found,) = doctor._triton((9, 0))
    assert (found.what, found.verdict) == ("Triton", CheckResult.WARNING)
    assert "several times slower" in found.seen


def test_doctor_knows_triton_and_what_turns_it_off(monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0")
    assert [one.verdict for one in doctor._triton((9, 0))] == [CheckResult.GOOD]
    assert "3.6.0; --quant may be fp8" in next(doctor._triton((9, 0))).seen
    assert "fp8" not in next(doctor._triton((8, 0))).seen
    assert "too old" in next(doctor._triton((7, 5))).seen
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    assert "turns it off" in next(doctor._triton((9, 0))).seen


def test_doctor_looks_at_every_card(monkeypatch) -> None:
    cards = [("New", (9, 0)), ("Old", (7, 5))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(name=cards[i][0], total_memory=1 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: cards[i][1])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0")
    gpu, triton = doctor._accelerator()
    assert "New" in gpu.seen
    assert "Old" in gpu.seen
    assert "--device cuda uses all 2" in gpu.seen
    assert "too old" in triton.seen


def test_a_driver_that_does_not_answer_is_unknown(monkeypatch) -> None:
    def run(*args: object, **how: object) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    assert hardware.nvidia_driver() is None
