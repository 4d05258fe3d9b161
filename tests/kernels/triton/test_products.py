"""Products with rounded weights, against the same weights in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.packed import PackedMatrix
from penstock.kernels.structs import Kind, SourceType

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

KINDS = {"q4": Kind.Q4, "q4m": Kind.Q4M, "q8": Kind.Q8, "q8m": Kind.Q8M}
# outputs and inputs; the interpreter takes a while for each output
SHAPES = [(1, 64), (48, 32), (100, 416), (64, 1024)] if torch.cuda.is_available() else [(1, 64), (70, 32), (12, 416)]
ROWS = [1, 2, 3, 5, 16, 17, 70]


@pytest.fixture
def make(native: None, device: torch.device) -> Callable[[str, int, int], tuple[Any, Tensor]]:
    from penstock.kernels.triton.products import FP8, CardWeight, round_to_fp8, take_packed

    def make(kind: str, outputs: int, inputs: int) -> tuple[Any, Tensor]:
        """A weight on the card, and the same numbers in fp64."""
        values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)) * 0.05
        if kind == "bf16":
            return CardWeight(values.bfloat16().to(device)), values.bfloat16().double()
        if kind == "fp8":
            weight = round_to_fp8(values.to(device))
            assert weight.data.dtype == FP8
            assert weight.scales is not None
            return weight, weight.data.double().cpu() * weight.scales.double().cpu()[:, None]
        packed = PackedMatrix(KINDS[kind], outputs, inputs)
        packed.pack(SourceType.F32, values.numpy())
        return take_packed(KINDS[kind], outputs, inputs, packed.data, device), torch.from_numpy(packed.unpack()).double()

    return make


@pytest.mark.parametrize("kind", ["q4", "q4m", "q8", "q8m", "fp8"])
@pytest.mark.parametrize("outputs, inputs", SHAPES)
def test_a_packed_matrix_has_the_same_numbers_on_the_card(kind: str, outputs: int, inputs: int, make: Any) -> None:
    from penstock.kernels.triton.products import unpack

    weight, numbers = make(kind, outputs, inputs)
    assert (weight.outputs, weight.inputs) == (outputs, inputs)
    assert torch.allclose(unpack(weight, torch.float32).double().cpu(), numbers, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["bf16", "fp8", "q4", "q4m", "q8", "q8m"])
def test_products_of_any_number_of_rows(kind: str, rows: int, make: Any, device: torch.device) -> None:
    from penstock.kernels.triton.products import product

    for outputs, inputs in SHAPES:
        weight, numbers = make(kind, outputs, inputs)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
        found = product(x.to(device), weight, torch.float32).double().cpu()
        expected = x.double() @ numbers.T
        # weights become bf16 in tiles, and inputs fp8 where the card multiplies these
        rounding = 2.0**-4 if kind == "fp8" and rows >= 17 and device.type == "cuda" else 2.0**-8
        bound = rounding * (x.double().abs() @ numbers.T.abs()) / np.sqrt(inputs) * 4 + 2.0**-7 * expected.abs() + 1e-5
        assert found.shape == (rows, outputs)
        assert ((found - expected).abs() < bound).all(), (outputs, inputs)


@pytest.mark.parametrize("kind", ["fp8", "q4", "q8m"])
def test_few_rows_are_exact_but_for_fp32(kind: str, make: Any, device: torch.device) -> None:
    from penstock.kernels.triton.products import product

    weight, numbers = make(kind, 20, 160)
    x = torch.randn(2, 160, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.allclose(product(x.to(device), weight, torch.float32).double().cpu(), x.double() @ numbers.T, atol=3e-6)


def test_a_matrix_that_has_no_codes_is_refused(device: torch.device) -> None:
    from penstock.kernels.triton.products import take_packed

    with pytest.raises(ValueError, match="no codes"):
        take_packed(Kind.BF16, 16, 32, np.zeros(1024, np.uint8), device)
    with pytest.raises(ValueError, match="not a multiple"):
        take_packed(Kind.Q4, 16, 33, np.zeros(1024, np.uint8), device)
