"""Linear layers, with weights in the layout that suits the device."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]"""


class PlainLinear:
    """A linear layer for any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """A bf16 linear layer for CPUs: the weight is stored in oneDNN's blocked layout, about twice as fast on small batches.

    Its two operators are private to torch, hence the probe in `can_pack`.
    """

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
