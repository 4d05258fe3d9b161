"""Rotary position embedding: tables of cosines and sines, with the scalings of long-context models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.model.architecture.spec import RopeSpec


class RopeTable:
    """Cosines and signed sines by position, computed as far as needed. Rotation is `x * cos + roll(x, half) * sin`."""

    def __init__(self, rope: RopeSpec, head_dim: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._context = context
        width = rope.width(head_dim)
        self._inverse, self._scale = inverse_frequencies(rope, width)
        self._cos = self._sin = torch.empty(0, width, dtype=dtype, device=device)

    def rows(self, positions: Tensor, end_position: int) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of the positions, all below `end_position`: [T, 1, width] each."""
        if end_position > self._cos.shape[0]:
            self._grow(end_position)
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)

    def _grow(self, end_position: int) -> None:
        size = min(max(1024, 1 << (end_position - 1).bit_length()), max(self._context, end_position))
        angles = torch.outer(torch.arange(size, dtype=torch.float32), self._inverse)  # [size, width / 2]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos = torch.cat((cos, cos), dim=-1).to(self._device, self._dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(self._device, self._dtype)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the heads of x [T, heads, head_dim] in place; only the front of each head where cos and sin are narrower."""
    if cos.shape[-1] < x.shape[-1]:
        x = x[..., : cos.shape[-1]]
    rolled = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(rolled, sin)


def distinct(ropes: Sequence[RopeSpec]) -> list[RopeSpec]:
    return [rope for number, rope in enumerate(ropes) if rope not in ropes[:number]]


def inverse_frequencies(rope: RopeSpec, width: int) -> tuple[Tensor, float]:
    """Return the frequencies [width / 2], and the factor that yarn and longrope put on cosines and sines."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    plain = 1.0 / (rope.theta**exponents)
    p = rope.params
    match rope.kind:
        case "linear":
            return plain / float(p["factor"]), 1.0
        case "llama3":
            return _llama3(
                plain,
                float(p["factor"]),
                float(p["low_freq_factor"]),
                float(p["high_freq_factor"]),
                int(p["original_max_position_embeddings"]),
            ), 1.0
        case "yarn":
            return _yarn(plain, rope, width)
        case "longrope":
            return 1.0 / (torch.tensor(p["factors"]) * rope.theta**exponents), float(p["attention_factor"])
        case _:
            return plain, 1.0


def _llama3(plain: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Stretch long wavelengths, leave short ones, blend those between."""
    wavelength = 2 * math.pi / plain
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * plain / factor + blend * plain
    out = torch.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, smooth, out)


def _yarn(plain: Tensor, rope: RopeSpec, width: int) -> tuple[Tensor, float]:
    p = rope.params
    factor, original = float(p["factor"]), int(p["original_max_position_embeddings"])
    fast, slow = float(p.get("beta_fast") or 32), float(p.get("beta_slow") or 1)

    def dimension(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(fast), dimension(slow)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - first) / max(last - first, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)

    def magnitude(scale: float, m: float) -> float:
        return 0.1 * m * math.log(scale) + 1.0 if scale > 1 else 1.0

    scale = p.get("attention_factor")
    if scale is None:
        m, m_all = p.get("mscale"), p.get("mscale_all_dim")
        scale = magnitude(factor, float(m)) / magnitude(factor, float(m_all)) if m and m_all else magnitude(factor, 1.0)
    return frequencies, float(scale)
