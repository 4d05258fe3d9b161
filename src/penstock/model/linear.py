"""Matrix products with a layer's weights, laid out for the device that runs them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""


class PlainLinear:
    """Any device, any type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """bf16 on a CPU: the weight is kept in the blocked layout that oneDNN multiplies with, about twice as fast on small
    batches. The two operators are torch's own but private, hence the probe in `can_pack`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    try:
        probe = PackedLinear(torch.ones(32, 32, dtype=dtype), None)
        return bool((probe(torch.ones(2, 32, dtype=dtype)) == 32).all())
    except (AttributeError, RuntimeError, TypeError):  # another torch, or a build without oneDNN
        return False


def linear(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Linear:
    return PackedLinear(weight, bias) if packed else PlainLinear(weight, bias)
