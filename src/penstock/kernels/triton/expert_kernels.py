"""Triton kernels for a mixture of experts: choice of experts, rows by expert, and products of each row with its own experts."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.product_kernels import tile_product
from penstock.kernels.triton.sampling_kernels import LOWEST, key_id, key_value, order_key


@triton.jit
def route(scores, shares, chosen, experts, PER_TOKEN: tl.constexpr, NORMALISED: tl.constexpr, BLOCK: tl.constexpr):
    """The best experts of one token, best first, and their shares: softmax of all scores, divided by their sum if NORMALISED."""
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(scores + token * experts + at, mask=at < experts, other=float("-inf"))
    largest = tl.max(x)
    whole = tl.sum(tl.exp(x - largest))
    keys = tl.where(at < experts, order_key(x, at), LOWEST)
    if NORMALISED:
        rest = keys
        whole = tl.zeros((), tl.float32)
        for _ in range(PER_TOKEN):
            key = tl.max(rest)
            whole += tl.exp(key_value(key) - largest)
            rest = tl.where(rest == key, LOWEST, rest)
    for i in range(PER_TOKEN):
        key = tl.max(keys)
        tl.store(shares + token * PER_TOKEN + i, tl.exp(key_value(key) - largest) / whole)
        tl.store(chosen + token * PER_TOKEN + i, key_id(key))
        keys = tl.where(keys == key, LOWEST, keys)


@triton.jit
def group(chosen, order, tiles, pairs, experts, slots, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """List the pairs (token, expert) of one expert, and the tiles of up to TILE of them: expert, first and end in the list.

    Each expert's tiles have places that depend only on the pairs before it; places that stay free have expert -1.
    """
    expert = tl.program_id(0)
    before = tl.zeros((), tl.int32)
    count = tl.zeros((), tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        one = tl.load(chosen + at, mask=at < pairs, other=0x7FFFFFFF)
        before += tl.sum((one < expert).to(tl.int32))
        count += tl.sum((one == expert).to(tl.int32))
    place = before
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        own = (tl.load(chosen + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own) - own, at, mask=own != 0)
        place += tl.sum(own)
    first = tl.minimum(before, before // TILE + expert)
    used = tl.cdiv(count, TILE)
    after = before + count
    end = tl.minimum(after, after // TILE + expert + 1)
    if expert == experts - 1:
        end = slots
    for i in range(end - first):
        tile = tiles + (first + i) * 3
        tl.store(tile, tl.where(i < used, expert, -1))
        tl.store(tile + 1, before + i * TILE)
        tl.store(tile + 2, tl.minimum(before + i * TILE + TILE, after))


@triton.jit
def grouped_product(
    x, weights, scales, minima, shares, out, order, tiles, count, width, per_row,
    BITS: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr, MINIMA: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of one tile times their expert's weights [count, width]. out: a row for each pair, in the order of tokens.

    per_row: pairs that share a row of x. SHARED: multiply with the pair's share.
    """
    tile = tiles + tl.program_id(0) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        at = tl.load(tile + 1) + tl.arange(0, ROWS)
        present = at < tl.load(tile + 2)
        pair = tl.load(order + at, mask=present, other=0).to(tl.int64)
        n = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
        if BITS == 0:
            weights += expert * count * width
            scales += expert * count
        else:
            weights += expert * count * (width * BITS // 32)
            scales += expert * count * (width // 32)
            minima += expert * count * (width // 32)
        found = tile_product(
            x, weights, scales, minima, pair // per_row, present, n, count, width, BITS, ZERO, MINIMA, ROWS, OUTPUTS, BLOCK
        )  # fmt: skip
        if SCALED:
            found *= tl.load(scales + n, mask=n < count, other=0.0)[None, :]
        if SHARED:
            found *= tl.load(shares + pair, mask=present, other=0.0)[:, None]
        where = pair[:, None] * count + n[None, :]
        tl.store(out + where, found.to(out.dtype.element_ty), mask=present[:, None] & (n < count)[None, :])


@triton.jit
def gate(x, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """activation(x[:, :width]) * x[:, width:], of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    a = tl.load(x + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    else:
        a = a * tl.sigmoid(a)
    tl.store(out + row * width + at, (a * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_up(x, out, width, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the rows of a token's experts, best first."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(PER_TOKEN):
        total += tl.load(x + (token * PER_TOKEN + i) * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total, mask=at < width)
