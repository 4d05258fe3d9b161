"""Attention over paged KV, for single tokens and for chunks of prompts, without gathering it first.

A layer's KV is [slots, 2, kv_heads, head_dim], in the numbers of the queries or in fp8; position p of a text lies in slot
table[p // block_size] * block_size + p % block_size. The query heads that share a key head are rows of one product.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SMALLEST_DOT = 16  # rows that a product on tensor cores has at least
KEYS = 64  # positions that are looked at together
CHUNK_ROWS = 64  # of (token, head), in one program
LONG_ROWS = 128  # ... where a long chunk looks at keys that lie side by side
GATHERED = 16  # positions that one program gathers


def chunk_tokens(heads: int, kv_heads: int) -> int:
    """How many tokens of a chunk one program computes."""
    rows: int = triton.next_power_of_2(heads // kv_heads)
    return max(1, CHUNK_ROWS // rows)


class Paged(NamedTuple):
    """The KV of a layer, and where the texts of a pass lie in it.

    kv: [slots, 2, kv_heads, head_dim]
    tables: in int32, a row for each Span, from the first block of the layer's group on; stride: [1] in int32, the width of
        these rows.
    window: how many positions back a token sees, its own included; None for all.
    groups: of layers; each has every `groups`-th block of a row.
    """

    kv: Tensor
    tables: Tensor
    stride: Tensor
    block_size: int
    window: int | None = None
    groups: int = 1


def attend_decodes(q: Tensor, paged: Paged, rows: Tensor, lengths: Tensor, out: Tensor, *, splits: int) -> None:
    """Attention of the newest token of each text to all of it, or to its window.

    q: [T, heads, head_dim], with any distance between its rows.
    out: [T, heads * head_dim]
    rows, lengths: [spans] in int32, the row of q and out, -1 for none, and the positions of its text, its own included; 0 for
        none.
    splits: parts of a text that are looked at side by side.
    """
    _, heads, head_dim = q.shape
    kv_heads = paged.kv.shape[2]
    group, spans = heads // kv_heads, len(rows)
    fixed = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": triton.next_power_of_2(head_dim),
    }
    partial = out
    weights = out
    if splits > 1:
        partial = torch.empty(spans, heads, splits, head_dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(spans, heads, splits, dtype=torch.float32, device=q.device)
    _decode[(spans, kv_heads, splits)](
        q,
        q.stride(0),
        paged.kv,
        rows,
        lengths,
        paged.tables,
        paged.stride,
        partial,
        weights,
        1 / math.sqrt(head_dim),
        paged.window or 0,
        **fixed,
        GROUP_BLOCK=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        BLOCK_SIZE=paged.block_size,
        GROUPS=paged.groups,
        KEYS=KEYS,
        SPLITS=splits,
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,
    )
    if splits > 1:
        _combine[(spans, heads)](
            partial, weights, rows, out, HEADS=heads, HEAD_DIM=head_dim, DIM_BLOCK=fixed["DIM_BLOCK"], SPLITS=splits, num_warps=2
        )


@triton.jit
def _decode(
    q, q_stride, kv, rows, lengths, tables, stride, out, weights, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    span, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.load(rows + span).to(tl.int64)
    length = tl.load(lengths + span)
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    # parts begin at multiples of KEYS, so that they do not depend on the window's edge
    origin = first // KEYS * KEYS
    part = tl.cdiv(tl.cdiv(length - origin, KEYS), SPLITS) * KEYS
    begin = origin + split * part
    end = tl.minimum(length, begin + part)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    mine = (g < tl.where(row >= 0, group, 0))[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + row * q_stride + (head * group + g[:, None]) * HEAD_DIM + d[None, :], mask=mine, other=0.0)
    table = tables + span.to(tl.int64) * tl.load(stride)
    best = tl.full([GROUP_BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for at in range(begin, end, KEYS):
        position = at + tl.arange(0, KEYS)
        seen = (position < end) & (position >= first)
        block = tl.load(table + position // BLOCK_SIZE * GROUPS, mask=seen, other=0).to(tl.int64)
        base = kv + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (2 * KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        keys = tl.load(base[None, :] + d[:, None], mask=seen[None, :] & (d < HEAD_DIM)[:, None], other=0.0).to(query.dtype)
        scores = tl.where(seen[None, :], tl.dot(query, keys, input_precision="ieee") * scale, -1.0e30)
        most = tl.maximum(best, tl.max(scores, 1))
        share = tl.exp(scores - most[:, None])
        share = tl.where(seen[None, :], share, 0.0)
        shrink = tl.exp(best - most)
        values = tl.load(
            base[:, None] + KV_HEADS * HEAD_DIM + d[None, :], mask=seen[:, None] & (d < HEAD_DIM)[None, :], other=0.0
        ).to(query.dtype)
        acc = acc * shrink[:, None] + tl.dot(share.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(share, 1)
        best = most
    divisor = tl.where(total == 0.0, 1.0, total)
    answer = acc / divisor[:, None]
    if SPLITS == 1:
        place = out + row * HEADS * HEAD_DIM + (head * group + g[:, None]) * HEAD_DIM + d[None, :]
        tl.store(place, answer.to(out.dtype.element_ty), mask=mine)
    else:
        number = (span.to(tl.int64) * HEADS + head * group + g) * SPLITS + split
        tl.store(out + number[:, None] * HEAD_DIM + d[None, :], answer, mask=mine)
        tl.store(weights + number, tl.where(total == 0.0, -1.0e30, best + tl.log(divisor)), mask=g < group)


@triton.jit
def _combine(
    partial, weights, rows, out,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + span).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM_BLOCK)
    number = (span.to(tl.int64) * HEADS + head) * SPLITS + s
    logs = tl.load(weights + number)
    share = tl.exp(logs - tl.max(logs))
    share = tl.where(logs <= -1.0e30, 0.0, share)  # a part that saw nothing
    share = share / tl.maximum(tl.sum(share), 1.0e-30)
    used = (share > 0.0)[:, None] & (d < HEAD_DIM)[None, :]
    parts = tl.load(partial + number[:, None] * HEAD_DIM + d[None, :], mask=used, other=0.0)
    answer = tl.sum(parts * share[:, None], 0)
    place = out + (row * HEADS + head) * HEAD_DIM + d
    tl.store(place, answer.to(out.dtype.element_ty), mask=d < tl.where(row >= 0, HEAD_DIM, 0))


def attend_chunks(q: Tensor, paged: Paged, tiles: Tensor, out: Tensor) -> None:
    """Attention of each token of some chunks to all before it, or to its window.

    q: [T, heads, head_dim], with any distance between its rows.
    out: [T, heads * head_dim]
    tiles: [tiles, 4] in int32: the number of a Span, and of its next tokens, at most `chunk_tokens`, the first row, the first
        position, and how many they are.
    """
    _, heads, head_dim = q.shape
    kv_heads = paged.kv.shape[2]
    group_block = triton.next_power_of_2(heads // kv_heads)
    wide = head_dim > 128 or q.dtype == torch.float32
    _chunks[(kv_heads, len(tiles))](
        q,
        q.stride(0),
        paged.kv,
        tiles,
        paged.tables,
        paged.stride,
        out,
        math.log2(math.e) / math.sqrt(head_dim),
        paged.window or 0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        GROUP_BLOCK=group_block,
        ROWS=max(SMALLEST_DOT, chunk_tokens(heads, kv_heads) * group_block),
        BLOCK_SIZE=paged.block_size,
        GROUPS=paged.groups,
        KEYS=32 if wide else KEYS,
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _chunks(
    q, q_stride, kv, tiles, tables, stride, out, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    span = tl.load(tiles + tile * 4).to(tl.int64)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    start = tl.load(tiles + tile * 4 + 2)
    count = tl.load(tiles + tile * 4 + 3)
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    token, g = r // GROUP_BLOCK, r % GROUP_BLOCK
    exists = (token < count) & (g < group)
    mine = exists[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(
        q + (first_row + token[:, None]) * q_stride + (head * group + g[:, None]) * HEAD_DIM + d[None, :], mask=mine, other=0.0
    )
    table = tables + span * tl.load(stride)
    own = start + token
    end = start + count
    first = 0
    clear = start // KEYS * KEYS  # what lies before is seen by all rows
    if window > 0:
        first = tl.maximum(start + 1 - window, 0) // KEYS * KEYS
        clear = first
    best = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    for at in range(first, clear, KEYS):
        best, total, acc = _look(
            query, kv + head * HEAD_DIM, table, at, own, start, end, window, best, total, acc, scale, d,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, GROUPS, KEYS, False,
        )  # fmt: skip
    for at in range(clear, end, KEYS):
        best, total, acc = _look(
            query, kv + head * HEAD_DIM, table, at, own, start, end, window, best, total, acc, scale, d,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, GROUPS, KEYS, True,
        )  # fmt: skip
    answer = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + ((first_row + token[:, None]) * HEADS + head * group + g[:, None]) * HEAD_DIM + d[None, :]
    tl.store(place, answer.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _look(
    query, kv, table, at, own, start, end, window, best, total, acc, scale, d,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Take the next KEYS positions into account. SOME: not all of them are there, or not all rows see them."""
    position = at + tl.arange(0, KEYS)
    held = position >= 0
    if SOME:
        held = position < end
        if window > 0:
            held &= position > start - window  # blocks before the window may be gone
    block = tl.load(table + position // BLOCK_SIZE * GROUPS, mask=held, other=0).to(tl.int64)
    base = kv + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (2 * KV_HEADS * HEAD_DIM)
    keys = tl.load(base[None, :] + d[:, None], mask=held[None, :] & (d < HEAD_DIM)[:, None], other=0.0).to(query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee") * scale  # of powers of 2
    if SOME:
        seen = position[None, :] <= own[:, None]
        if window > 0:
            seen &= position[None, :] > own[:, None] - window
        scores = tl.where(seen, scores, -1.0e30)
    most = tl.maximum(best, tl.max(scores, 1))
    share = tl.exp2(scores - most[:, None])
    if SOME:
        share = tl.where(seen, share, 0.0)
    shrink = tl.exp2(best - most)
    values = tl.load(base[:, None] + KV_HEADS * HEAD_DIM + d[None, :], mask=held[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    values = values.to(query.dtype)
    acc = tl.dot(share.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return most, total * shrink + tl.sum(share, 1), acc


def can_attend_long(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `attend_long` can compute this: it needs the shared memory, and the copies in tiles, of an H100 or B200."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim in (64, 128) and torch.cuda.get_device_capability(device)[0] in (9, 10)


def attend_long(q: Tensor, paged: Paged, span: int, start: int, out: Tensor) -> None:
    """Attention of each token of a long chunk to all before it. The keys and values of its text are gathered first, which takes
    little of the time and makes the rest half as long.

    q: [n, heads, head_dim], with any distance between its rows.
    span: its row of the tables. start: the position of its first token.
    out: [n, heads * head_dim]
    """
    n, heads, head_dim = q.shape
    kv_heads = paged.kv.shape[2]
    group_block = triton.next_power_of_2(heads // kv_heads)
    length, width = start + n, 2 * kv_heads * head_dim
    text = torch.empty(length, width, dtype=q.dtype, device=q.device)
    _gather[(triton.cdiv(length, GATHERED),)](
        paged.kv, paged.tables, paged.stride, text, span, length,
        WIDTH=width, WIDTH_BLOCK=triton.next_power_of_2(width), BLOCK_SIZE=paged.block_size, GROUPS=paged.groups,
        POSITIONS=GATHERED, num_warps=8,
    )  # fmt: skip
    tokens, keys = max(1, LONG_ROWS // group_block), 128
    _long[(kv_heads, triton.cdiv(n, tokens))](
        q,
        q.stride(0),
        TensorDescriptor.from_tensor(text, [keys, head_dim]),
        out,
        math.log2(math.e) / math.sqrt(head_dim),
        start,
        n,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        GROUP_BLOCK=group_block,
        TOKENS=tokens,
        KEYS=keys,
        num_warps=8,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["span", "length"])  # or it would be compiled again for some numbers
def _gather(
    kv, tables, stride, text, span, length,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, GROUPS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    table = tables + span * tl.load(stride)
    at = tl.arange(0, WIDTH_BLOCK)
    inside = at < WIDTH
    for i in range(POSITIONS):
        position = tl.program_id(0) * POSITIONS + i
        if position < length:
            block = tl.load(table + position // BLOCK_SIZE * GROUPS).to(tl.int64)
            source = kv + (block * BLOCK_SIZE + position % BLOCK_SIZE) * WIDTH
            found = tl.load(source + at, mask=inside)
            tl.store(text + position.to(tl.int64) * WIDTH + at, found.to(text.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["start", "n"])
def _long(
    q, q_stride, text, out, scale, start, n,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS  # the longest look-back first
    group: tl.constexpr = HEADS // KV_HEADS
    r, d = tl.arange(0, TOKENS * GROUP_BLOCK), tl.arange(0, HEAD_DIM)
    token, g = first + r // GROUP_BLOCK, r % GROUP_BLOCK
    mine = ((token < n) & (g < group))[:, None]
    column = (head * group + g[:, None]) * HEAD_DIM + d[None, :]
    query = tl.load(q + token[:, None].to(tl.int64) * q_stride + column, mask=mine, other=0.0)
    own = start + token
    end = start + tl.minimum(n, first + TOKENS)
    clear = (start + first) // KEYS * KEYS  # what lies before is seen by all rows
    best = tl.full([TOKENS * GROUP_BLOCK], -1.0e30, tl.float32)
    total = tl.zeros([TOKENS * GROUP_BLOCK], tl.float32)
    acc = tl.zeros([TOKENS * GROUP_BLOCK, HEAD_DIM], tl.float32)
    for at in range(0, clear, KEYS):
        keys = text.load([at, head * HEAD_DIM])
        values = text.load([at, (KV_HEADS + head) * HEAD_DIM])
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        most = tl.maximum(best, tl.max(scores, 1) * scale)
        share = tl.exp2(scores * scale - most[:, None])
        shrink = tl.exp2(best - most)
        acc = tl.dot(share.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(share, 1)
        best = most
    for at in range(clear, end, KEYS):
        keys = text.load([at, head * HEAD_DIM])  # zeros behind its end
        values = text.load([at, (KV_HEADS + head) * HEAD_DIM])
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where((at + tl.arange(0, KEYS))[None, :] <= own[:, None], scores, -1.0e30)
        most = tl.maximum(best, tl.max(scores, 1))
        share = tl.exp2(scores - most[:, None])
        shrink = tl.exp2(best - most)
        acc = tl.dot(share.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(share, 1)
        best = most
    place = out + token[:, None].to(tl.int64) * (HEADS * HEAD_DIM) + column
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
