"""Products with weights in bf16, fp8, or the 4- and 8-bit codes of the native kernels' files, on a GPU.

    weight = round_to_fp8(tensor)  # or take_packed(kind, rows, cols, data, device), or CardWeight(tensor)
    y = product(x, weight)  # [T, in] in bf16 -> [T, out]

How a product is computed depends on the number of rows only: a few rows are multiplied as the weights stream by; more go
through tensor cores, with weights that become bf16 in registers; for hundreds, fp8 weights meet inputs in fp8, and
codes are unpacked once. Everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from penstock.kernels.structs import Kind
from penstock.kernels.triton import product_kernels as kernels

FEW_ROWS = 4
MANY_ROWS = 17  # inputs become fp8 from here on, where weights are
UNPACKED_ROWS = 48  # codes are unpacked for the whole product from here on
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_PANEL = 16  # outputs that the native layouts interleave
_GROUP = 32
_PANELS_AT_ONCE = 256  # that are brought into another order: it takes some times their memory
_OUTPUTS_AT_ONCE = 1024  # that are rounded, likewise


@dataclass(frozen=True, slots=True)
class CardWeight:
    """A weight matrix [out, in], or those of several experts [experts, out, in], on a card.

    data: numbers in bf16 or fp8, or int32 words of `bits`-bit codes (see product_kernels.py).
    scales: fp32 [.., out] for fp8; fp16 [.., out, in / 32] for codes.
    minima: as scales, for layouts that have them: value = scale * (code - zero) + minimum.
    """

    data: Tensor
    scales: Tensor | None = None
    minima: Tensor | None = None
    bits: int = 0  # of a code; 0 for numbers
    zero: int = 0

    @classmethod
    def join(cls, weights: Sequence[CardWeight]) -> CardWeight:
        """One matrix with the outputs of several that are alike."""
        first = weights[0]
        if len(weights) == 1:
            return first

        def joined(name: str, axis: int) -> Tensor | None:
            parts = [getattr(weight, name) for weight in weights]
            return None if parts[0] is None else torch.cat(parts, axis)

        data = joined("data", -2)
        assert data is not None
        return cls(data, joined("scales", -2 if first.bits else -1), joined("minima", -2), first.bits, first.zero)

    def is_like(self, other: CardWeight) -> bool:
        """Whether both have the same kind of numbers or codes."""

        def kind(weight: CardWeight) -> tuple[object, ...]:
            return weight.data.dtype, weight.bits, weight.zero, weight.scales is None, weight.minima is None

        return kind(self) == kind(other)

    def room_for(self, experts: int) -> CardWeight:
        """Memory for a matrix like this of each expert; `put` fills it."""

        def room(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.new_empty(experts, *tensor.shape)

        data = room(self.data)
        assert data is not None
        return CardWeight(data, room(self.scales), room(self.minima), self.bits, self.zero)

    def put(self, expert: int, weight: CardWeight) -> None:
        for name in ("data", "scales", "minima"):
            whole, part = getattr(self, name), getattr(weight, name)
            if whole is not None:
                whole[expert].copy_(part)

    @property
    def inputs(self) -> int:
        return self.data.shape[-1] * (32 // self.bits if self.bits else 1)

    @property
    def outputs(self) -> int:
        return self.data.shape[-2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.data, self.scales, self.minima) if tensor is not None)


def round_to_fp8(weight: Tensor) -> CardWeight:
    """Round to e4m3, with a scale for each output."""
    scales = weight.abs().amax(dim=-1).float().clamp_(min=1e-30) / FP8_MAX
    data = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    for begin in range(0, weight.shape[-2], _OUTPUTS_AT_ONCE):
        part = slice(begin, begin + _OUTPUTS_AT_ONCE)
        data[..., part, :] = (weight[..., part, :].float() / scales[..., part, None]).to(FP8)
    return CardWeight(data, scales)


def take_packed(kind: Kind, rows: int, cols: int, data: np.ndarray, device: torch.device) -> CardWeight:
    """Take over a matrix in a layout of the native kernels (`PackedMatrix.data`): the same codes, an output's side by side."""
    if kind not in (Kind.Q4, Kind.Q4M, Kind.Q8, Kind.Q8M):
        raise ValueError(f"{kind.name} has no codes.")
    if cols % _GROUP:
        raise ValueError(f"{cols} inputs are not a multiple of {_GROUP}.")
    bits = 4 if kind in (Kind.Q4, Kind.Q4M) else 8
    groups, panels = cols // _GROUP, -(-rows // _PANEL)
    whole = torch.from_numpy(np.require(data, requirements="W")).to(device).view(panels, -1)  # torch warns of what is mapped
    size = groups * bits * 64  # bytes of a panel's codes
    codes = torch.cat([_words(part[:, :size], groups, bits) for part in whole.split(_PANELS_AT_ONCE)])[:rows]
    end = size + groups * _PANEL * (4 if kind in (Kind.Q4M, Kind.Q8M) else 2)  # the rest only fills up the panel
    halves = whole[:, size:end].contiguous().view(torch.float16).view(panels, -1, groups, _PANEL)
    columns = [half.transpose(1, 2).reshape(panels * _PANEL, groups)[:rows].contiguous() for half in halves.unbind(1)]
    zero = {Kind.Q4: 8, Kind.Q4M: 0}.get(kind, 128)
    return CardWeight(codes, columns[0], columns[1] if len(columns) > 1 else None, bits, zero)


def _words(panels: Tensor, groups: int, bits: int) -> Tensor:
    """The codes of native panels [P, bytes] as words, in the order that the kernels of this package read. [P * 16, words]"""
    quarters = panels.reshape(len(panels), groups, -1, _PANEL, 4).permute(0, 3, 1, 2, 4)  # [P, 16, groups, 4 or 8, 4]
    if bits == 4:  # inputs from 16 on in the high bits
        quarters = torch.stack([quarters & 15, quarters >> 4], dim=3)
    else:
        quarters = quarters ^ 128  # signed codes become unsigned
    per = 32 // bits
    codes = quarters.reshape(len(panels) * _PANEL, -1, per, 4).int()
    return sum((codes[:, :, j] << bits * j for j in range(1, per)), codes[:, :, 0]).flatten(1)


def product(x: Tensor, weight: CardWeight, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, in] times the transpose of a weight [out, in]. -> [T, out] in dtype, by default x's own"""
    rows, dtype = len(x), dtype or x.dtype
    if weight.bits == 0 and weight.scales is None:
        return _in_numbers(x, weight.data, dtype)
    if weight.bits and rows <= FEW_ROWS:
        return _few_rows(x, weight, dtype)
    if rows == 1:
        return _one_row(x, weight, dtype)
    if weight.bits == 0 and rows >= MANY_ROWS and has_fp8(x.device) and weight.outputs % 16 == weight.inputs % 16 == 0:
        return _in_fp8(x, weight, dtype)
    if rows >= UNPACKED_ROWS:
        return _in_numbers(x, unpack(weight, x.dtype), dtype)
    return _many_rows(x, weight, dtype)


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether a card multiplies numbers in fp8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def unpack(weight: CardWeight, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight. [out, in]"""
    if weight.bits == 0:
        whole = weight.data.to(dtype)
        return whole if weight.scales is None else whole * weight.scales.to(dtype).unsqueeze(-1)
    return _unpack(weight, None, torch.empty(*weight.data.shape[:-1], weight.inputs, dtype=dtype, device=weight.data.device))


def take_outputs(weight: CardWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of some outputs of a matrix in bf16 or codes, such as the rows of an embedding. ids [R] -> [R, in]"""
    if weight.bits == 0:
        return weight.data.index_select(0, ids).to(dtype)
    return _unpack(weight, ids, torch.empty(len(ids), weight.inputs, dtype=dtype, device=ids.device))


def _unpack(weight: CardWeight, ids: Tensor | None, out: Tensor) -> Tensor:
    assert weight.scales is not None
    quads = 64
    kernels.unpack[(out.numel() // weight.inputs, triton.cdiv(weight.data.shape[-1], 4 * quads))](
        weight.data, weight.scales, weight.scales if weight.minima is None else weight.minima,
        weight.data if ids is None else ids, out, weight.inputs,
        BITS=weight.bits, ZERO=weight.zero, MINIMA=weight.minima is not None, SOME=ids is not None, QUADS=quads, num_warps=2,
    )  # fmt: skip
    return out


def round_to_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs in e4m3, and their scales [T, 1] in fp32."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    kernels.round_rows[(len(x),)](x, out, scales, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return out, scales


def _in_numbers(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cuda and dtype != x.dtype:
        return torch.mm(x, weight.t(), out_dtype=dtype)  # sums leave as they are
    return F.linear(x.to(dtype), weight.to(dtype))


def _one_row(x: Tensor, weight: CardWeight, dtype: torch.dtype) -> Tensor:
    out = torch.empty(1, weight.outputs, dtype=dtype, device=x.device)
    # a few whole outputs, as long as that leaves each thread some 64 bytes of registers for them
    block = triton.next_power_of_2(weight.inputs) if weight.inputs <= 8192 else 2048
    outputs = min(16, 16384 // block) if weight.inputs <= 8192 else 2
    kernels.one_row_plain[(triton.cdiv(weight.outputs, outputs),)](
        x, weight.data, weight.scales, out, weight.outputs,
        WIDTH=weight.inputs, OUTPUTS=outputs, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _few_rows(x: Tensor, weight: CardWeight, dtype: torch.dtype) -> Tensor:
    rows, padded = len(x), triton.next_power_of_2(len(x))
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    out = torch.empty(padded, weight.outputs, dtype=dtype, device=x.device)
    kernels.few_rows_coded[(triton.cdiv(weight.outputs, 4),)](
        x, weight.data, weight.scales, weight.scales if weight.minima is None else weight.minima, out,
        weight.outputs, weight.data.shape[-1] // 4,
        BITS=weight.bits, ZERO=weight.zero, MINIMA=weight.minima is not None, ROWS=padded, OUTPUTS=4, QUADS=64, num_warps=2,
    )  # fmt: skip
    return out[:rows]


def _many_rows(x: Tensor, weight: CardWeight, dtype: torch.dtype) -> Tensor:
    rows, width, count = len(x), weight.inputs, weight.outputs
    out = torch.empty(rows, count, dtype=dtype, device=x.device)
    if not x.is_cuda:
        x = x.float()  # Triton's interpreter has no products in bf16
    # Triton 3.6 cannot compile tiles of 64 rows, for which it takes other instructions, with weights out of codes
    tile = 16 if rows <= 16 else 32
    outputs, block = (64, 128) if rows > 16 else (32, 128 if weight.bits else 256)
    kernels.many_rows[(triton.cdiv(rows, tile), triton.cdiv(count, outputs))](
        x, weight.data, weight.scales, weight.scales if weight.minima is None else weight.minima, out, rows, count, width,
        BITS=weight.bits, ZERO=weight.zero, SCALED=not weight.bits, MINIMA=weight.minima is not None,
        ROWS=tile, OUTPUTS=outputs, BLOCK=block, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def _in_fp8(x: Tensor, weight: CardWeight, dtype: torch.dtype) -> Tensor:
    assert weight.scales is not None
    rounded, scales = round_to_fp8_rows(x)
    out = torch._scaled_mm(
        rounded,
        weight.data.t(),
        scale_a=scales,
        scale_b=weight.scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.to(dtype)
