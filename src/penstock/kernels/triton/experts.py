"""A mixture of experts on a GPU, without the host: each token's experts are chosen, listed and computed on the card.

    experts = CardExperts(router, gate_up, down, per_token=8, normalised=True, activation="silu")
    y = experts(x)  # [T, hidden] in bf16 -> [T, hidden] in fp32, as model/decoder/mlp.py

Sizes depend on the number of tokens alone, so that a CUDA graph can hold it all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from penstock.kernels.triton import expert_kernels as kernels
from penstock.kernels.triton.products import CardWeight

MAX_CODED_ROWS = 32  # of a tile: Triton 3.6 cannot compile larger ones with weights out of codes
# by the most rows of a tile: its outputs, the inputs that it takes at once, and its warps
TILES = {16: (64, 128, 4), 32: (64, 128, 4), 64: (128, 64, 4), 128: (128, 64, 8)}
# the most pairs per expert, on average, for which such a tile is the fastest
_FULL = {16: 8, 32: 32, 64: 128, 128: math.inf}
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class CardExperts:
    """router: [experts, hidden] in fp32. gate_up: [experts, 2 * inner, hidden], the gates first. down: [experts, hidden, inner].

    normalised: the shares of a token's experts add up to one.
    """

    router: Tensor
    gate_up: CardWeight
    down: CardWeight
    per_token: int
    normalised: bool
    activation: str = "silu"

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden] in fp32"""
        shares, chosen = choose_experts(F.linear(x.float(), self.router), self.per_token, normalised=self.normalised)
        lists = group_by_expert(chosen, len(self.router), coded=bool(self.gate_up.bits or self.down.bits))
        inner = gated(_product(x, self.gate_up, lists, None, self.per_token), self.activation)
        parts = _product(inner, self.down, lists, shares, 1)
        out = torch.empty(len(x), x.shape[1], dtype=torch.float32, device=x.device)
        grid = (len(x), triton.cdiv(x.shape[1], _BLOCK))
        kernels.add_up[grid](parts, out, x.shape[1], PER_TOKEN=self.per_token, BLOCK=_BLOCK)
        return out


@dataclass(frozen=True, slots=True)
class ExpertLists:
    """order: the pairs (token, one of its experts), an expert's side by side. int32 [pairs]
    tiles: (expert, first, end) within `order`; expert -1 where there is no tile. int32 [slots, 3]
    rows: the most pairs of a tile.
    """

    order: Tensor
    tiles: Tensor
    rows: int


def choose_experts(scores: Tensor, per_token: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
    """The experts with the best scores [T, experts] in fp32. -> their shares in fp32 and numbers in int32, [T, per_token] each"""
    tokens, experts = scores.shape
    shares = torch.empty(tokens, per_token, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=scores.device)
    kernels.route[(tokens,)](
        scores, shares, chosen, experts, PER_TOKEN=per_token, NORMALISED=normalised,
        BLOCK=triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return shares, chosen


def group_by_expert(chosen: Tensor, experts: int, *, coded: bool) -> ExpertLists:
    """List the pairs of each expert, and cut the lists into tiles. chosen: int32 [T, per_token]; coded: weights are codes."""
    pairs = chosen.numel()
    rows = next(rows for rows, most in _FULL.items() if pairs <= most * experts or (coded and rows == MAX_CODED_ROWS))
    slots = min(pairs, pairs // rows + experts)
    order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(slots, 3, dtype=torch.int32, device=chosen.device)
    block = min(_BLOCK, triton.next_power_of_2(pairs))
    kernels.group[(experts,)](chosen, order, tiles, pairs, experts, slots, TILE=rows, BLOCK=block)
    return ExpertLists(order, tiles, rows)


def gated(x: Tensor, activation: str) -> Tensor:
    """activation(first half of each row) * second half"""
    width = x.shape[1] // 2
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    gelu = {"silu": False, "gelu_pytorch_tanh": True}[activation]
    kernels.gate[(len(x), triton.cdiv(width, _BLOCK))](x, out, width, GELU=gelu, BLOCK=_BLOCK)
    return out


def _product(x: Tensor, weight: CardWeight, lists: ExpertLists, shares: Tensor | None, per_row: int) -> Tensor:
    """Each row with its experts' weights. -> [pairs, out], in the order of tokens; in fp32 if multiplied with shares"""
    count, width = weight.outputs, weight.inputs
    out = torch.empty(len(lists.order), count, dtype=x.dtype if shares is None else torch.float32, device=x.device)
    scales = weight.data if weight.scales is None else weight.scales
    if not x.is_cuda:
        x = x.float()  # Triton's interpreter has no products in bf16
    outputs, block, warps = TILES[lists.rows]
    kernels.grouped_product[(len(lists.tiles), triton.cdiv(count, outputs))](
        x, weight.data, scales, scales if weight.minima is None else weight.minima,
        scales if shares is None else shares, out, lists.order, lists.tiles, count, width, per_row,
        BITS=weight.bits, ZERO=weight.zero, SCALED=weight.scales is not None and not weight.bits,
        MINIMA=weight.minima is not None, SHARED=shares is not None,
        ROWS=lists.rows, OUTPUTS=outputs, BLOCK=block, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out
