"""Triton kernels that choose tokens: adjusted logits, weights, and a draw among those that top_k, top_p and min_p leave.

A weight is e^((logit - largest) / temperature), from 0 to 1. Sums of weights are integers: a weight counts as its multiple of
2**-44, so that a sum has one value in any order, on any card. Nothing is sorted: the smallest weight that may be drawn is found
by bisection over the bits of weights, whose order is that of the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

# columns of SamplingTable.wholes, and of .numbers, which is the same memory
NOISE_KEY = tl.constexpr(0)
TOP_K = tl.constexpr(1)
HISTORY = tl.constexpr(2)  # the row's place in the history, plus one; 0 where nothing is penalised
BIASES = tl.constexpr(3)
BANS = tl.constexpr(4)
BANNED_UNTIL = tl.constexpr(5)
LAST = tl.constexpr(6)  # the token that was counted last
TEMPERATURE = tl.constexpr(8)
TOP_P = tl.constexpr(9)
MIN_P = tl.constexpr(10)
REPETITION = tl.constexpr(11)
FREQUENCY = tl.constexpr(12)
PRESENCE = tl.constexpr(13)
COLUMNS = tl.constexpr(16)

UNIT = tl.constexpr(float(2**44))  # one divided by the weight that sums count
ONE_BITS = tl.constexpr(0x3F800000)  # the largest weight
TILE = tl.constexpr(128)
LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below every key


@triton.jit
def order_key(values, ids):
    """int64 keys whose order is that of fp32 values, the lower id first among equals."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # no -0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_id(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def key_value(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exp(x):
    """e^x for x <= 0 to a few units of 2**-24: the product with log2(e) keeps what fp32 would round off."""
    high = x * 1.4426950408889634
    low = tl.fma(x, 1.4426950216293335, -high) + x * 1.925963033500011e-08
    return tl.where(x > -104.0, tl.exp2(high) * (1.0 + low * 0.6931471805599453), 0.0)


@triton.jit
def _fixed(weights):
    return (weights * UNIT).to(tl.int64)


@triton.jit
def adjust(
    logits, adjusted, best, wholes, numbers, edits, edit_values, history, slots, positions, masks, mask_rows,
    vocab, words, chunks, edit_room, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalties, biases, bans and masks of one chunk of a row, and its best token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    wholes += slot * COLUMNS
    numbers += slot * COLUMNS
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    x = tl.load(logits + row * vocab + ids, mask=inside, other=float("-inf")).to(tl.float32)
    counts = tl.load(wholes + HISTORY)
    if counts > 0:
        seen = tl.load(history + (counts - 1) * vocab + ids, mask=inside, other=0)
        factor = tl.load(numbers + REPETITION).to(tl.float32)
        count = (seen >> 1).to(tl.float64)
        loss = count * tl.load(numbers + FREQUENCY) + tl.load(numbers + PRESENCE)
        loss = tl.where(seen > 1, loss, 0.0).to(tl.float32)
        x = tl.where(seen != 0, tl.where(x > 0, tl.math.div_rn(x, factor), x * factor) - loss, x)
    biases = tl.load(wholes + BIASES)
    count = biases
    if tl.load(positions + row) < tl.load(wholes + BANNED_UNTIL):
        count += tl.load(wholes + BANS)
    edits += slot * edit_room
    edit_values += slot * edit_room
    for i in range(count):
        x = tl.where(ids == tl.load(edits + i), x + tl.load(edit_values + i), x)
    if MASKED:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        if mask_row >= 0:
            bits = tl.load(masks + mask_row * words + ids // 32, mask=inside, other=0)
            x = tl.where(((bits >> (ids % 32)) & 1) != 0, x, float("-inf"))
    if tl.load(numbers + TEMPERATURE) > 0.0:
        tl.store(adjusted + row * vocab + ids, x, mask=inside)
    keys = tl.where(inside, order_key(x, ids), LOWEST)
    tl.store(best + row * chunks + chunk, tl.max(keys))


@triton.jit
def weigh(adjusted, best, peaks, sums, numbers, slots, vocab, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the adjusted logits of a chunk into weights, in place; also the largest of each tile, and the chunk's sum."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(numbers + tl.load(slots + row).to(tl.int64) * COLUMNS + TEMPERATURE).to(tl.float32)
    if temperature > 0.0:
        at = tl.arange(0, CHUNKS)
        key = tl.max(tl.load(best + row * chunks + at, mask=at < chunks, other=LOWEST))
        largest = tl.math.div_rn(key_value(key), temperature)
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(adjusted + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
        weights = _exp(tl.math.div_rn(x, temperature) - largest)
        tl.store(adjusted + row * vocab + ids, weights, mask=ids < vocab)
        tl.store(sums + row * chunks + chunk, tl.sum(_fixed(weights)))
        tiles = tl.max(tl.reshape(weights, (BLOCK // TILE, TILE)), axis=1)
        at_tile = chunk * (BLOCK // TILE) + tl.arange(0, BLOCK // TILE)
        tl.store(peaks + row * chunks * (BLOCK // TILE) + at_tile, tiles)


@triton.jit
def _measure(weights, count, low, high, BLOCK: tl.constexpr):
    """How many of the weights lie within [low, high), by their bits, and their sum."""
    number = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        some = tl.load(weights + at, mask=at < count, other=0.0)
        bits = some.to(tl.int32, bitcast=True)
        within = (bits >= low) & (bits < high) & (at < count)
        number += within.to(tl.int32)
        total += tl.where(within, _fixed(some), 0)
    return tl.sum(number).to(tl.int64), tl.sum(total)


@triton.jit
def _bisect(some, present, low, high, need, above, COUNTED: tl.constexpr):
    """The largest number of bits within [low, high) from which on the weights measure `need`, as they do from low on.

    above: the measure of the weights from `high` on, which need not be among these.
    """
    bits = tl.where(present, some.to(tl.int32, bitcast=True), -1)
    value = present.to(tl.int64) if COUNTED else _fixed(some)
    while high - low > 1:
        middle = low + (high - low) // 2
        more = tl.sum(tl.where((bits >= middle) & (bits < high), value, 0))
        if above + more >= need:
            low = middle
        else:
            high = middle
            above += more
    return low


@triton.jit
def _floor_bits(weights, vocab, few, low, need, COUNTED: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """`_bisect` over a whole row: first until few weights lie between the bounds, then over a list of these.

    low: bits from which on the weights measure `need`.
    """
    high = tl.full((), ONE_BITS + 1, tl.int32)
    above = tl.zeros((), tl.int64)
    between, _ = _measure(weights, vocab, low, high, BLOCK)
    while (high - low > 1) & (between > ROOM):
        middle = low + (high - low) // 2
        number, mass = _measure(weights, vocab, middle, high, BLOCK)
        more = number if COUNTED else mass
        if above + more >= need:
            low = middle
            between = number
        else:
            high = middle
            above += more
            between -= number
    if high - low > 1:
        size = tl.zeros((), tl.int32)
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            some = tl.load(weights + at, mask=at < vocab, other=0.0)
            bits = some.to(tl.int32, bitcast=True)
            chosen = ((bits >= low) & (bits < high) & (at < vocab)).to(tl.int32)
            tl.store(few + size + tl.cumsum(chosen) - chosen, some, mask=chosen != 0)
            size += tl.sum(chosen)
        tl.debug_barrier()
        at = tl.arange(0, ROOM)
        low = _bisect(tl.load(few + at, mask=at < size, other=0.0), at < size, low, high, need, above, COUNTED)
        tl.debug_barrier()
    return low


@triton.jit
def _limit(
    weights, peaks, tiles, few, total, top_k, top_p, min_p, vocab,
    TILES: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The smallest weight that may be drawn after top_k, top_p and min_p, applied in this order."""
    floor = tl.zeros((), tl.int32)
    end = tl.full((), ONE_BITS + 1, tl.int32)
    whole = total
    if (top_k > 0) & (top_k < vocab):
        low = tl.zeros((), tl.int32)
        if top_k <= tiles:  # the k-th largest of the tiles' peaks has k weights from it on
            at = tl.arange(0, TILES)
            some = tl.load(peaks + at, mask=at < tiles, other=0.0)
            low = _bisect(some, at < tiles, low, end, top_k, tl.zeros((), tl.int64), True)
        floor = _floor_bits(weights, vocab, few, low, top_k, True, BLOCK, ROOM)
        more, mass = _measure(weights, vocab, floor + 1, end, BLOCK)
        # of several equal weights at the end, top_k counts some, though all may be drawn
        whole = mass + (top_k - more) * _fixed(floor.to(tl.float32, bitcast=True))
    if top_p < 1.0:
        need = (top_p * whole.to(tl.float64)).to(tl.int64)
        low = floor
        if (top_k <= 0) | (top_k >= vocab):  # all smaller weights together are half of what may be left out
            bound = (1.0 - top_p) * whole.to(tl.float64) / (2.0 * UNIT * vocab)
            low = tl.minimum(bound, 1.0).to(tl.float32).to(tl.int32, bitcast=True)
        floor = tl.maximum(floor, _floor_bits(weights, vocab, few, low, need, False, BLOCK, ROOM))
    return tl.maximum(floor, min_p.to(tl.float32).to(tl.int32, bitcast=True))


@triton.jit
def _noise_bits(key, position):
    """The addressed number of a position, as uint64 whose upper 53 bits count: splitmix64, as in model/sampling/noise.py."""
    z = (key.to(tl.uint64, bitcast=True) ^ position.to(tl.uint64)) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 11) << 11


@triton.jit
def _draw(weights, floor, noise, sums, chunks, vocab, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The token at which the sum of the weights from `floor` on, in the order of ids, passes noise * their total."""
    at = tl.arange(0, CHUNKS)
    running = tl.cumsum(tl.load(sums + at, mask=at < chunks, other=0))
    target = tl.umulhi(noise, tl.max(running).to(tl.uint64)).to(tl.int64)
    chunk = tl.minimum(tl.sum((running <= target).to(tl.int32)), chunks - 1)
    before = tl.max(tl.where(at < chunk, running, 0))
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    some = tl.load(weights + ids, mask=ids < vocab, other=0.0)
    some = tl.where(some.to(tl.int32, bitcast=True) >= floor, some, 0.0)
    passed = before + tl.cumsum(_fixed(some)) > target
    return tl.min(tl.where(passed & (ids < vocab), ids, vocab - 1))


@triton.jit
def limit(
    weights, peaks, sums, few, floors, wholes, numbers, slots, vocab, chunks,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The bits of the smallest weight of one row that may be drawn."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wholes += slot * COLUMNS
    numbers += slot * COLUMNS
    top_k, top_p, min_p = tl.load(wholes + TOP_K), tl.load(numbers + TOP_P), tl.load(numbers + MIN_P)
    floor = tl.zeros((), tl.int32)
    if (tl.load(numbers + TEMPERATURE) > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        tiles = chunks * (BLOCK // TILE)
        at = tl.arange(0, CHUNKS)
        total = tl.sum(tl.load(sums + row * chunks + at, mask=at < chunks, other=0))
        weights += row * vocab
        floor = _limit(
            weights, peaks + row * tiles, tiles, few + row * ROOM, total, top_k, top_p, min_p, vocab,
            CHUNKS * (BLOCK // TILE), BLOCK, ROOM,
        )  # fmt: skip
    tl.store(floors + row, floor)


@triton.jit
def cut(weights, sums, floors, numbers, slots, vocab, chunks, BLOCK: tl.constexpr):
    """Add up the weights of a chunk that may be drawn, where limits leave some out."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floor = tl.load(floors + row)
    if (floor > 0) & (tl.load(numbers + tl.load(slots + row).to(tl.int64) * COLUMNS + TEMPERATURE) > 0.0):
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        some = tl.load(weights + row * vocab + ids, mask=ids < vocab, other=0.0)
        kept = tl.where(some.to(tl.int32, bitcast=True) >= floor, _fixed(some), 0)
        tl.store(sums + row * chunks + chunk, tl.sum(kept))


@triton.jit
def choose(
    weights, best, sums, floors, wholes, numbers, history, slots, positions, tokens, vocab, chunks,
    DRAWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's token."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    wholes += slot * COLUMNS
    numbers += slot * COLUMNS
    at = tl.arange(0, CHUNKS)
    token = key_id(tl.max(tl.load(best + row * chunks + at, mask=at < chunks, other=LOWEST)))
    if DRAWS:
        if tl.load(numbers + TEMPERATURE) > 0.0:
            noise = _noise_bits(tl.load(wholes + NOISE_KEY), tl.load(positions + row))
            token = _draw(
                weights + row * vocab, tl.load(floors + row), noise, sums + row * chunks, chunks, vocab, CHUNKS, BLOCK
            )  # fmt: skip
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)  # rows that are not numbers choose something
    counts = tl.load(wholes + HISTORY)
    if counts > 0:
        seen = history + (counts - 1) * vocab + token
        tl.store(seen, tl.load(seen) + 2)
        tl.store(wholes + LAST, token.to(tl.int64))
    tl.store(tokens + row, token)
