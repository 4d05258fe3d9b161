"""Triton kernels for products with weights in bf16, fp8, or codes of 8 or 4 bits.

Unsigned codes lie in words of 32 bits, 4 or 8 to a word (PER). Four words hold 4 * PER inputs: code j of word w is input 4 j + w,
so that the inputs of a thread's four words lie side by side. A code becomes a number by two instructions, as the first bits
behind the point of 1.xxx, since cards convert integers slowly.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(32)


@triton.jit
def _place(words, j: tl.constexpr, BITS: tl.constexpr):
    """Code j of each word as 1 + code / 2**BITS, in fp32."""
    FIRST: tl.constexpr = 23 - BITS
    if BITS * j <= FIRST:
        moved = words << (FIRST - BITS * j)
    else:
        moved = words >> (BITS * j - FIRST)
    mask: tl.constexpr = ((1 << BITS) - 1) << FIRST
    return ((moved & mask) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _coded_row(x, word, inside, code, BITS: tl.constexpr, ZERO: tl.constexpr):
    """One row of inputs times the codes less ZERO, word by word; also the inputs of each word, added up."""
    PER: tl.constexpr = 32 // BITS
    ONE: tl.constexpr = 1 << BITS
    part = tl.zeros(code.shape, tl.float32)
    inputs = tl.zeros(word.shape, tl.float32)
    for j in tl.static_range(PER):
        xs = tl.load(x + word // 4 * (4 * PER) + 4 * j + word % 4, mask=inside, other=0.0).to(tl.float32)
        part += _place(code, j, BITS) * xs[None, :]
        inputs += xs
    return part * ONE - (inputs * (ONE + ZERO))[None, :], inputs


@triton.jit
def _coded_block(
    x, word, inside, code, scale, least,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr, OUTPUTS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    part, inputs = _coded_row(x, word, inside, code, BITS, ZERO)
    found = tl.sum(tl.reshape(part, (OUTPUTS, QUADS, 4)), axis=2) * scale
    if MINIMA:
        found += tl.sum(tl.reshape(inputs, (QUADS, 4)), axis=1)[None, :] * least
    return found


@triton.jit
def few_rows_coded(
    x, words, scales, minima, out, count, quads,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """out [ROWS, count] = x times the transpose of coded weights; ROWS is 1, 2 or 4. quads: words of an output, divided by 4.

    A thread has four words at a time of all OUTPUTS, so that inputs are loaded once for these.
    """
    PER: tl.constexpr = 32 // BITS
    n = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    width = quads * 4 * PER
    a = tl.zeros((OUTPUTS, QUADS), tl.float32)
    b = a
    c = a
    d = a
    for start in range(0, quads, QUADS):
        word = start * 4 + tl.arange(0, QUADS * 4)
        inside = word < quads * 4
        code = tl.load(
            words + n[:, None] * (quads * 4) + word[None, :], mask=(n < count)[:, None] & inside[None, :], other=0,
            eviction_policy="evict_first",
        )  # fmt: skip
        quad = start + tl.arange(0, QUADS)
        some = (n < count)[:, None] & (quad < quads)[None, :]
        group = (n[:, None] * quads + quad[None, :]) * (4 * PER) // GROUP
        scale = tl.load(scales + group, mask=some, other=0.0).to(tl.float32)
        least = scale
        if MINIMA:
            least = tl.load(minima + group, mask=some, other=0.0).to(tl.float32)
        a += _coded_block(x, word, inside, code, scale, least, BITS, ZERO, MINIMA, OUTPUTS, QUADS)
        if ROWS > 1:
            b += _coded_block(x + width, word, inside, code, scale, least, BITS, ZERO, MINIMA, OUTPUTS, QUADS)
        if ROWS > 2:
            c += _coded_block(x + 2 * width, word, inside, code, scale, least, BITS, ZERO, MINIMA, OUTPUTS, QUADS)
            d += _coded_block(x + 3 * width, word, inside, code, scale, least, BITS, ZERO, MINIMA, OUTPUTS, QUADS)
    tl.store(out + n, tl.sum(a, axis=1).to(out.dtype.element_ty), mask=n < count)
    if ROWS > 1:
        tl.store(out + count + n, tl.sum(b, axis=1).to(out.dtype.element_ty), mask=n < count)
    if ROWS > 2:
        tl.store(out + 2 * count + n, tl.sum(c, axis=1).to(out.dtype.element_ty), mask=n < count)
        tl.store(out + 3 * count + n, tl.sum(d, axis=1).to(out.dtype.element_ty), mask=n < count)


@triton.jit
def one_row_plain(x, weights, scales, out, count, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row, with weights that are numbers and have a scale for each output. All of a program's loads begin at once."""
    n = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    total = tl.zeros((OUTPUTS, BLOCK), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        some = (n < count)[:, None] & (k < WIDTH)[None, :]
        w = tl.load(weights + n[:, None] * WIDTH + k[None, :], mask=some, other=0.0, eviction_policy="evict_first")
        xs = tl.load(x + k, mask=k < WIDTH, other=0.0)
        total += w.to(tl.float32) * xs.to(tl.float32)[None, :]
    found = tl.sum(total, axis=1) * tl.load(scales + n, mask=n < count, other=0.0)
    tl.store(out + n, found.to(out.dtype.element_ty), mask=n < count)


@triton.jit
def _number(code, scale, shift, j: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    return (_place(code, j, BITS) * scale + shift).to(dtype)


@triton.jit
def _spread(code, scale, shift, BITS: tl.constexpr, dtype: tl.constexpr):
    """The numbers of words [N, Q, 4] in the order of inputs: [N, Q, .., 4]."""
    if BITS == 8:
        even = tl.join(_number(code, scale, shift, 0, BITS, dtype), _number(code, scale, shift, 2, BITS, dtype))
        odd = tl.join(_number(code, scale, shift, 1, BITS, dtype), _number(code, scale, shift, 3, BITS, dtype))
        found = tl.permute(tl.join(even, odd), (0, 1, 3, 4, 2))
    else:
        a = tl.join(_number(code, scale, shift, 0, BITS, dtype), _number(code, scale, shift, 4, BITS, dtype))
        b = tl.join(_number(code, scale, shift, 2, BITS, dtype), _number(code, scale, shift, 6, BITS, dtype))
        c = tl.join(_number(code, scale, shift, 1, BITS, dtype), _number(code, scale, shift, 5, BITS, dtype))
        d = tl.join(_number(code, scale, shift, 3, BITS, dtype), _number(code, scale, shift, 7, BITS, dtype))
        found = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 1, 3, 4, 5, 2))
    return found


@triton.jit
def tile_product(
    x, weights, scales, minima, source, present, n, count, width,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Products of the rows `source` of x with outputs n. BITS: 0 for weights that are numbers."""
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    if BITS == 0:
        for start in range(0, width, BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = (k < width)[None, :]
            w = tl.load(weights + n[:, None] * width + k[None, :], mask=(n < count)[:, None] & inside, other=0.0)
            xs = tl.load(x + source[:, None] * width + k[None, :], mask=present[:, None] & inside, other=0.0)
            total = tl.dot(xs, tl.trans(w.to(xs.dtype)), total, input_precision="ieee")
    else:
        PER: tl.constexpr = 32 // BITS
        QUADS: tl.constexpr = BLOCK // (4 * PER)
        ONE: tl.constexpr = 1 << BITS
        four = tl.arange(0, 4)
        for start in range(0, width, BLOCK):
            k = start + tl.arange(0, BLOCK)
            xs = tl.load(x + source[:, None] * width + k[None, :], mask=present[:, None] & (k < width)[None, :], other=0.0)
            quad = start // (4 * PER) + tl.arange(0, QUADS)
            some = (n < count)[:, None] & (quad < width // (4 * PER))[None, :]
            place = n[:, None] * (width // (4 * PER)) + quad[None, :]
            code = tl.load(weights + place[:, :, None] * 4 + four[None, None, :], mask=some[:, :, None], other=0)
            group = place * (4 * PER) // GROUP
            scale = tl.load(scales + group, mask=some, other=0.0).to(tl.float32)
            shift = -scale * (ONE + ZERO)
            if MINIMA:
                shift += tl.load(minima + group, mask=some, other=0.0).to(tl.float32)
            w = _spread(code, scale[:, :, None] * ONE, shift[:, :, None], BITS, xs.dtype)
            total = tl.dot(xs, tl.trans(tl.reshape(w, (OUTPUTS, BLOCK))), total, input_precision="ieee")
    return total


@triton.jit
def many_rows(
    x, weights, scales, minima, out, rows, count, width,
    BITS: tl.constexpr, ZERO: tl.constexpr, SCALED: tl.constexpr, MINIMA: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, count] = x [rows, width] times the transpose of weights [count, width]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = (tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    found = tile_product(x, weights, scales, minima, row, row < rows, n, count, width, BITS, ZERO, MINIMA, ROWS, OUTPUTS, BLOCK)
    if SCALED:
        found *= tl.load(scales + n, mask=n < count, other=0.0)[None, :]
    at = row[:, None] * count + n[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (n < count)[None, :])


@triton.jit
def unpack(
    words, scales, minima, ids, out, width,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINIMA: tl.constexpr, SOME: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of one output's codes. SOME: of those that `ids` names, not of all."""
    PER: tl.constexpr = 32 // BITS
    ONE: tl.constexpr = 1 << BITS
    row = tl.program_id(0).to(tl.int64)
    n = row
    if SOME:
        n = tl.load(ids + row).to(tl.int64)
    quad = tl.program_id(1) * QUADS + tl.arange(0, QUADS)
    inside = (quad < width // (4 * PER))[None, :]
    place = (n * (width // (4 * PER)) + quad)[None, :]
    code = tl.load(words + place[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], mask=inside[:, :, None], other=0)
    group = place * (4 * PER) // GROUP
    scale = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    shift = -scale * (ONE + ZERO)
    if MINIMA:
        shift += tl.load(minima + group, mask=inside, other=0.0).to(tl.float32)
    values = _spread(code, scale[:, :, None] * ONE, shift[:, :, None], BITS, out.dtype.element_ty)
    k = tl.program_id(1) * (QUADS * 4 * PER) + tl.arange(0, QUADS * 4 * PER)
    tl.store(out + row * width + k, tl.reshape(values, (QUADS * 4 * PER,)), mask=k < width)


@triton.jit
def round_rows(x, out, scales, width, BLOCK: tl.constexpr):
    """Round rows to e4m3, each with a scale of its own: its largest magnitude becomes 448."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + row * width + k, mask=k < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value)), 1e-30) / 448.0
    tl.store(scales + row, scale)
    tl.store(out + row * width + k, (value / scale).to(out.dtype.element_ty), mask=k < width)
