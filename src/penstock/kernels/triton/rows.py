"""What a layer does to each row between its products: norms on the residual stream, rotation of heads, gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS_AT_ONCE = 8  # of a row, that one program rotates
GATE_BLOCK = 1024
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


def add_norm(
    x: Tensor, added: Tensor | None, weight: Tensor | None, eps: float, dtype: torch.dtype, post: Tensor | None = None
) -> Tensor:
    """Add to the residual stream in place, and return its RMS norm. x [T, hidden] in fp32 -> [T, hidden] in dtype

    added: [T, hidden], or None to add nothing.
    weight: of the norm; None for no norm: then x itself is returned.
    post: weight of a norm on what is added.
    """
    rows, width = x.shape
    out = x if weight is None else torch.empty(rows, width, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x,
        x if added is None else added,
        x if post is None else post,
        x if weight is None else weight,
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=added is not None,
        POST=post is not None,
        NORM=weight is not None,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


@triton.jit
def _add_norm(
    x, added, post, weight, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        more = tl.load(added + row + at, mask=inside, other=0.0).to(tl.float32)
        if POST:
            more *= tl.rsqrt(tl.sum(more * more) / WIDTH + eps) * tl.load(post + at, mask=inside, other=0.0)
        value += more
        tl.store(x + row + at, value, mask=inside)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value) / WIDTH + eps) * tl.load(weight + at, mask=inside, other=0.0)
        tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


def rotate_and_store(
    qkv: Tensor, kv: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, heads: int, qk_norm: Tensor | None, eps: float
) -> None:
    """Norm and rotate queries and keys in place, and write keys and values to their slots.

    qkv [T, (heads + 2 kv_heads) * head_dim], slots [T] in int32, -1 to write nothing.
    kv: [slots, 2, kv_heads, head_dim], in the numbers of qkv or in fp8.
    cos, sin: [T, width / 2] in fp32; where width is less than head_dim, the rest of each head is not rotated.
    qk_norm: [heads + kv_heads, head_dim]
    """
    _, _, kv_heads, head_dim = kv.shape
    every = heads + 2 * kv_heads
    half = cos.shape[1]
    rest = head_dim - 2 * half
    _rotate[(len(qkv), triton.cdiv(every, HEADS_AT_ONCE))](
        qkv,
        kv,
        slots,
        cos,
        sin,
        qkv if qk_norm is None else qk_norm,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST=rest,
        REST_BLOCK=triton.next_power_of_2(max(rest, 1)),
        AT_ONCE=HEADS_AT_ONCE,
        NORM=qk_norm is not None,
        num_warps=4,
    )


@triton.jit
def _rotate(
    qkv, kv, slots, cos, sin, weights, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST: tl.constexpr, REST_BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    turned = head < HEADS + KV_HEADS
    exists = head < HEADS + 2 * KV_HEADS
    at = tl.arange(0, HALF_BLOCK)
    inside = exists[:, None] & (at < HALF)[None, :]
    own = qkv + row * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head * HEAD_DIM
    a = tl.load(own[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(own[:, None] + HALF + at[None, :], mask=inside, other=0.0).to(tl.float32)
    behind = tl.arange(0, REST_BLOCK)
    has_rest = exists[:, None] & (behind < REST)[None, :]
    if REST > 0:
        c = tl.load(own[:, None] + 2 * HALF + behind[None, :], mask=has_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if REST > 0:
            squares += tl.sum(c * c, 1)
        scale = tl.where(turned, tl.rsqrt(squares / HEAD_DIM + eps), 1.0)[:, None]
        normed = inside & turned[:, None]
        a *= scale * tl.load(weights + head[:, None] * HEAD_DIM + at[None, :], mask=normed, other=1.0)
        b *= scale * tl.load(weights + head[:, None] * HEAD_DIM + HALF + at[None, :], mask=normed, other=1.0)
        if REST > 0:
            normed = has_rest & turned[:, None]
            c *= scale * tl.load(weights + head[:, None] * HEAD_DIM + 2 * HALF + behind[None, :], mask=normed, other=1.0)
    angle = row * HALF + at
    co = tl.where(turned[:, None], tl.load(cos + angle, mask=at < HALF, other=1.0)[None, :], 1.0)
    si = tl.where(turned[:, None], tl.load(sin + angle, mask=at < HALF, other=0.0)[None, :], 0.0)
    x = (a * co - b * si).to(qkv.dtype.element_ty)
    y = (b * co + a * si).to(qkv.dtype.element_ty)
    changed = turned[:, None]
    tl.store(own[:, None] + at[None, :], x, mask=inside & changed)
    tl.store(own[:, None] + HALF + at[None, :], y, mask=inside & changed)
    slot = tl.load(slots + row).to(tl.int64)
    kept = (tl.where(slot >= 0, head, -1) >= HEADS)[:, None]
    place = kv + slot * (2 * KV_HEADS * HEAD_DIM) + (head - HEADS) * HEAD_DIM
    tl.store(place[:, None] + at[None, :], x.to(kv.dtype.element_ty), mask=inside & kept)
    tl.store(place[:, None] + HALF + at[None, :], y.to(kv.dtype.element_ty), mask=inside & kept)
    if REST > 0:
        z = c.to(qkv.dtype.element_ty)
        if NORM:
            tl.store(own[:, None] + 2 * HALF + behind[None, :], z, mask=has_rest & changed)
        tl.store(place[:, None] + 2 * HALF + behind[None, :], z.to(kv.dtype.element_ty), mask=has_rest & kept)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Activate the first half of each row and multiply it by the second. [T, 2 inner] -> [T, inner]"""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(rows, triton.cdiv(inner, GATE_BLOCK))](
        gate_up, out, INNER=inner, BLOCK=GATE_BLOCK, ACTIVATION=ACTIVATIONS[activation], num_warps=4
    )
    return out


@triton.jit
def _gated(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(gate_up + row * 2 * INNER + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + at, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = gate * tl.sigmoid(gate)
    else:
        # gelu by tanh: x * (1 + tanh(z)) / 2 is x * sigmoid(2 z)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * INNER + at, (active * up).to(out.dtype.element_ty), mask=inside)
