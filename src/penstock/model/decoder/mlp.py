"""The second half of a layer: a gated MLP, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.decoder.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
Gate = Callable[[Tensor, str], Tensor]


class Mlp(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Activate the first half of each row and multiply it by the second. [T, 2 inner] -> [T, inner]"""
    gate, up = gate_up.chunk(2, dim=1)
    return ACTIVATIONS[activation](gate).mul_(up)


class GatedMlp:
    """gate: computes what `gated` does, perhaps faster."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, gate: Gate = gated) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gate(self._gate_up(x), self._activation))


class Experts:
    """A mixture of experts: each token goes through the `per_token` experts that the router scores best."""

    def __init__(self, router: Tensor, experts: Sequence[Mlp], per_token: int, *, normalised: bool) -> None:
        self._router = router  # [experts, hidden] in fp32: a rounded score may choose another expert
        self._experts = experts
        self._per_token = per_token
        self._normalised = normalised

    def __call__(self, x: Tensor) -> Tensor:
        shares, chosen = F.linear(x.float(), self._router).softmax(dim=-1).topk(self._per_token, dim=-1)  # [T, k] each
        if self._normalised:
            shares /= shares.sum(dim=-1, keepdim=True)
        chosen = chosen.view(-1)
        order = chosen.argsort(stable=True)  # the tokens of each expert side by side
        sent = x.index_select(0, order // self._per_token)
        counts = torch.bincount(chosen, minlength=len(self._experts)).tolist()
        parts = zip(self._experts, torch.split(sent, counts), strict=True)
        answers = torch.cat([expert(part) for expert, part in parts if len(part)])
        # back to each token's own rows, so that its sum does not depend on the rest of the batch
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        rows = answers.index_select(0, back).view(-1, self._per_token, x.shape[1])  # [T, k, hidden]
        return torch.bmm(shares.unsqueeze(1), rows.float()).squeeze(1)
