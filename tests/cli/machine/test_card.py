"""What bench and doctor say about a CUDA GPU."""

from __future__ import annotations

import importlib.metadata
import subprocess

import pytest
import torch

from penstock.cli.machine import doctor, hardware
from penstock.cli.machine.bench import plan_gpu_rounds
from penstock.cli.machine.card import CardLimits, measure_card
from penstock.cli.machine.findings import CheckResult

CARD = CardLimits("A Card", bandwidth=4.2e12, flops=790e12)


def test_limits_are_those_of_reading_weights_and_of_multiplying() -> None:
    assert CARD.decode(16e9) == pytest.approx(262.5)
    assert CARD.read(7e9) == pytest.approx(56_429, rel=1e-4)
    assert str(CARD) == "A Card: copies 4.20 TB/s, multiplies 790 TFLOP/s in bf16"


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
    assert "too old" in next(doctor._triton((7, 5))).seen
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    assert "turns it off" in next(doctor._triton((9, 0))).seen


def test_a_driver_that_does_not_answer_is_unknown(monkeypatch) -> None:
    def run(*args: object, **how: object) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    assert hardware.nvidia_driver() is None
