"""Draw tokens by their probabilities among those that top_k, top_p and min_p leave, in order of ids, so that no sort decides.

On a CPU all rows share the passes over the logits; what comes after works on candidates, and a row with many of them is
treated by itself. The result is that of sorting and adding up the whole vocabulary in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling.noise import noise_at
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.transfer import upload

TILE = 128
SMALL_VOCAB = 1024  # up to here, all tokens are candidates
SAMPLE = 1024  # tokens of a row from which the bounds of its nucleus are estimated
BIN_SHIFT = 18  # bits of a probability that do not tell bins apart: a bin spans 3 %
MAX_SORTED = 4096  # a row with more tokens between its bounds is treated by itself
MARGIN = 1e-6  # of probability: more than the error of a sum in fp32
EPSILON = 2.0**-52


def draw(logits: Tensor, rows: Sequence[SampleRow], ahead: int = 0) -> Tensor:
    """Draw a token for each row of contiguous logits [R, vocab] in fp32, which are overwritten. Waits for nothing on a GPU.

    ahead: tokens of each row that the host does not know yet.
    """
    if logits.device.type != "cpu":
        return _draw_on_device(logits, rows, ahead)
    noise = _noise(rows, ahead)
    temperature = torch.from_numpy(np.array([row.temperature for row in rows], dtype=np.float32))
    torch.softmax(logits.div_(temperature.unsqueeze(1)), dim=-1, out=logits)
    probabilities = logits.numpy()
    limited = [i for i, row in enumerate(rows) if row.limited]
    if not limited:
        return torch.from_numpy(_pick_by_tiles(probabilities, noise))
    if len(limited) == len(rows):
        return torch.from_numpy(_pick_limited(probabilities, [row.params for row in rows], noise))
    tokens = np.empty(len(rows), dtype=np.int64)
    others = [i for i, row in enumerate(rows) if not row.limited]
    tokens[limited] = _pick_limited(probabilities[limited], [rows[i].params for i in limited], noise[limited])
    tokens[others] = _pick_by_tiles(probabilities[others], noise[others])
    return torch.from_numpy(tokens)


def _pick(weights: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The index at which the cumulative sum passes noise * total; never one of weight 0. [R, C], [R] -> [R]"""
    running = torch.from_numpy(weights).double().cumsum(dim=-1).numpy()
    place = (running <= (noise * running[:, -1])[:, None]).sum(axis=1)
    last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    found: np.ndarray = np.minimum(place, last)
    return found


def _pick_by_tiles(weights: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """`_pick` in two levels: add up the sums of tiles, then the weights of one tile.

    fp64 rounds these sums differently. A row so close to the edge of a token that this could matter is left to `_pick`.
    """
    count, vocab = weights.shape
    if vocab <= SMALL_VOCAB:
        return _pick(weights, noise)
    running = _tile_sums(weights).cumsum(axis=1)
    target = noise * running[:, -1]
    tile = np.minimum((running <= target[:, None]).sum(axis=1), running.shape[1] - 1)
    rows = np.arange(count)
    ids = tile[:, None] * TILE + np.arange(TILE)
    inside = np.where(ids < vocab, weights[rows[:, None], np.minimum(ids, vocab - 1)], 0.0)
    before = np.where(tile > 0, running[rows, tile - 1], 0.0)
    edges = np.concatenate([before[:, None], inside], axis=1).cumsum(axis=1)  # [R, TILE + 1]
    place = np.minimum((edges[:, 1:] <= target[:, None]).sum(axis=1), TILE - 1)
    tokens: np.ndarray = ids[rows, place]
    error = vocab * EPSILON * running[:, -1]
    certain = (target - edges[rows, place] > error) & (edges[rows, place + 1] - target > error)
    for i in np.flatnonzero(~certain):
        tokens[i] = _pick(weights[i : i + 1], noise[i : i + 1])[0]
    return tokens


def _pick_from_lists(weights: np.ndarray, ends: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """`_pick` for rows that lie one behind the other and end at `ends`; edges of tokens are treated as above. -> places"""
    running = np.concatenate([[0.0], weights.cumsum(dtype=np.float64)])
    starts = np.concatenate([[0], ends[:-1]])
    target = running[starts] + noise * (running[ends] - running[starts])
    places: np.ndarray = np.clip(np.searchsorted(running, target, side="right") - 1, starts, ends - 1)
    error = len(weights) * EPSILON * running[-1]
    certain = (target - running[places] > error) & (running[places + 1] - target > error)
    for i in np.flatnonzero(~certain):
        start, end = starts[i], ends[i]
        places[i] = start + _pick(weights[None, start:end], noise[i : i + 1])[0]
    return places


def _pick_limited(probabilities: np.ndarray, params: Sequence[SamplingParams], noise: np.ndarray) -> np.ndarray:
    """Draw from rows of which all have top_k, top_p or min_p.

    Of most rows, the tokens that could be drawn are listed; a row with very many of them is treated by itself.
    """
    count, vocab = probabilities.shape
    if vocab <= SMALL_VOCAB:
        floors = _min_probability(probabilities, params, np.zeros(count))
        return _pick(np.where(probabilities >= floors[:, None], probabilities, np.float32(0.0)), noise)
    bounds = _bounds(probabilities, params)
    flat = np.flatnonzero(probabilities >= np.where(bounds.few, bounds.low, np.inf)[:, None])
    values = probabilities.reshape(-1)[flat]
    ends = np.searchsorted(flat, np.arange(1, count + 1) * vocab)
    sizes = np.diff(ends, prepend=0)
    owner = np.repeat(np.arange(count), sizes)
    edge, above, mass = _edges(values, owner, params)
    middle = np.flatnonzero(edge)
    widths = np.bincount(owner[middle], minlength=count)
    listed = _bounds_hold(params, above, mass) & (sizes > 0) & (widths <= MAX_SORTED)
    floors = np.where(listed, np.float32(0.0), np.float32(np.inf))
    rows = np.flatnonzero(listed & (widths > 0))
    if len(rows):
        between = np.zeros((len(rows), widths[rows].max()), dtype=np.float32)
        between[np.arange(between.shape[1]) < widths[rows][:, None]] = values[middle[listed[owner[middle]]]]
        floors[rows] = _min_probability(between, [params[i] for i in rows.tolist()], above[rows])
    kept = np.flatnonzero(values >= floors[owner])
    tokens = np.empty(count, dtype=np.int64)
    rows = np.flatnonzero(listed)
    if len(rows):
        last = np.searchsorted(kept, ends[rows])
        tokens[rows] = flat[kept[_pick_from_lists(values[kept], last, noise[rows])]] - rows * vocab
    rows = np.flatnonzero(~listed)
    if len(rows):
        floors[rows] = [_floor_of_row(probabilities[i], params[i], bounds.low[i], bounds.high[i]) for i in rows.tolist()]
        left = np.where(probabilities[rows] >= floors[rows, None], probabilities[rows], np.float32(0.0))
        tokens[rows] = _pick_by_tiles(left, noise[rows])
    return tokens


def _edges(values: np.ndarray, owner: np.ndarray, params: Sequence[SamplingParams]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mark the listed tokens that the limits of their row may cut: all with top_k; with top_p those about as likely (within a few
    percent) as the last of the nucleus. Also, for each row, the probability of the likelier ones, and of both together."""
    count = len(params)
    sorted_whole = np.array([p.top_k > 0 for p in params])
    top_p = np.array([p.top_p if p.top_p < 1.0 and not p.top_k else np.inf for p in params])
    above, mass, last = np.zeros(count), np.full(count, np.inf), np.where(sorted_whole, -2, -1)
    if not len(values) or np.isinf(top_p).all():
        return sorted_whole[owner], above, mass
    bins = values.view(np.int32) >> BIN_SHIFT  # the order of positive floats is that of their bits
    highest = int(bins.max())
    np.subtract(highest, bins, out=bins)
    width = int(bins.max()) + 1
    sums = np.bincount(owner * width + bins, weights=values, minlength=count * width).reshape(count, width)
    upto = sums.cumsum(axis=1)
    rows = np.flatnonzero(np.isfinite(top_p))
    found = np.minimum((upto[rows] < top_p[rows, None]).sum(axis=1), width - 1)
    last[rows] = found
    mass[rows] = upto[rows, found]
    above[rows] = np.where(found > 0, upto[rows, found - 1], 0.0)
    return (bins == last[owner]) | sorted_whole[owner], above, mass


class _Bounds(NamedTuple):
    """Guesses for each row: `low`, below which nothing is drawn; `high`, from which everything may be drawn (only for rows with
    many tokens above `low`); and whether few tokens lie above `low`."""

    low: np.ndarray
    high: np.ndarray
    few: np.ndarray


def _bounds(probabilities: np.ndarray, params: Sequence[SamplingParams]) -> _Bounds:
    """Guess from the best token of each tile and from a sample of evenly spaced tokens."""
    vocab = probabilities.shape[1]
    maxima = _tiles(probabilities).amax(dim=-1).numpy()  # of all tokens but those behind the last whole tile
    best = np.maximum(maxima.max(axis=1), probabilities[:, maxima.shape[1] * TILE :].max(axis=1, initial=0.0))
    low = best * np.array([p.min_p for p in params], dtype=np.float32)
    high = np.full(len(params), np.inf, dtype=np.float32)
    for i, p in enumerate(params):
        if p.top_k:  # the k best tiles have k tokens that are at least as likely as the k-th maximum
            low[i] = np.partition(maxima[i], -p.top_k)[-p.top_k] if p.top_k <= maxima.shape[1] else 0.0
    stride = -(-vocab // SAMPLE)
    some = np.sort(probabilities[:, ::stride], axis=1)
    nucleus = np.array([p.top_p < 1.0 and not p.top_k for p in params])
    if nucleus.any():
        rest = np.array([1.0 - p.top_p for p in params], dtype=np.float32)[:, None]
        tail = some.cumsum(axis=1) * np.float32(stride)  # the probability of all tokens up to this one, as estimated
        error = np.sqrt(np.square(some).cumsum(axis=1)) * np.float32(3 * stride)  # three standard deviations of that
        under = (tail + error <= rest).sum(axis=1)
        guess = np.where(nucleus & (under > 0), some[np.arange(len(some)), under - 1], np.float32(0.0))
        low = np.maximum(low, guess)
    few = (some >= low[:, None]).sum(axis=1) * stride <= vocab // 8
    for i in np.flatnonzero(nucleus & ~few).tolist():
        over = tail[i] - error[i] >= rest[i]
        if over.any():
            high[i] = max(low[i], some[i, over.argmax()])
    return _Bounds(low, high, few)


def _bounds_hold(params: Sequence[SamplingParams], above: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Whether each row's nucleus ends between its bounds, where it has one."""
    top_p = np.array([p.top_p if p.top_p < 1.0 and not p.top_k else np.inf for p in params])
    found: np.ndarray = (above < top_p - MARGIN) & ((mass > top_p + MARGIN) | np.isinf(top_p))
    return found


def _floor_of_row(probabilities: np.ndarray, p: SamplingParams, low: np.float32, high: np.float32) -> np.float32:
    """The smallest probability that may be drawn from one row, however many tokens that leaves. [V] -> one"""
    if p.top_k:
        rank = max(len(probabilities) - p.top_k, 0)
        floor = np.partition(probabilities, rank)[rank]
        if p.top_p == 1.0:
            return max(floor, np.float32(p.min_p) * probabilities.max())
        return np.float32(_min_probability(probabilities[None, probabilities >= floor], [p], np.zeros(1))[0])
    if p.top_p == 1.0:
        return low
    below = probabilities[probabilities < high]
    between = below[below >= low]
    above = probabilities.sum(dtype=np.float64) - below.sum(dtype=np.float64)  # of the tokens that are certainly kept
    if not _bounds_hold([p], above, above + between.sum(dtype=np.float64)):
        above, between = 0.0, probabilities[probabilities > 0]
    while len(between) > SMALL_VOCAB:
        some = np.sort(between[:: len(between) // 64])
        upper = between >= some[len(some) // 2]
        likelier = between[upper]
        mass = above + likelier.sum(dtype=np.float64)
        if len(likelier) == len(between) or abs(mass - p.top_p) <= MARGIN:
            break
        if mass > p.top_p:
            between = likelier
        else:
            above, between = mass, between[~upper]
    if not len(between):
        return low  # no probability is a number: all tokens were masked
    floor = np.float32(_min_probability(between[None], [p], np.array([above]))[0])
    return max(floor, np.float32(p.min_p) * probabilities.max())


def _min_probability(candidates: np.ndarray, params: Sequence[SamplingParams], above: np.ndarray) -> np.ndarray:
    """The smallest probability that may be drawn after top_k, top_p and min_p, applied in this order. [R, C] -> [R]

    above: probability of each row's tokens that are likelier than all its candidates. [R]
    """
    best = -np.sort(-candidates, axis=1)
    top_k = np.array([p.top_k or best.shape[1] for p in params])
    if (top_k < best.shape[1]).any():
        best[np.arange(best.shape[1]) >= top_k[:, None]] = 0.0
    upto = np.concatenate([above[:, None], best], axis=1).cumsum(axis=1)[:, 1:].astype(np.float32)
    top_p = np.array([p.top_p if p.top_p < 1.0 else np.inf for p in params], dtype=np.float32)
    keep = upto - best < (top_p * _whole(best, params))[:, None]
    keep &= best > 0
    keep[:, 0] = True
    floors = np.where(keep, best, np.float32(np.inf)).min(axis=1)
    found: np.ndarray = np.maximum(floors, np.array([p.min_p for p in params], dtype=np.float32) * best[:, 0])
    return found


def _whole(best: np.ndarray, params: Sequence[SamplingParams]) -> np.ndarray:
    """What top_p is a share of: the probability that top_k leaves; without top_k, everything."""
    whole = np.ones(len(params), dtype=np.float32)
    rows = [i for i, p in enumerate(params) if p.top_k and p.top_p < 1.0]
    if rows:
        padded = np.zeros((len(rows), max(SMALL_VOCAB, best.shape[1])), dtype=np.float32)
        padded[:, : best.shape[1]] = best[rows]
        whole[rows] = torch.from_numpy(padded).sum(dim=-1).numpy()
    return whole


def _tiles(rows: np.ndarray) -> Tensor:
    """[R, V] -> [R, V // TILE, TILE]; what is behind the last whole tile is left out."""
    count = rows.shape[1] // TILE
    return torch.from_numpy(rows)[:, : count * TILE].view(len(rows), count, TILE)


def _tile_sums(rows: np.ndarray) -> np.ndarray:
    """The sum of each tile in fp64, the last one perhaps of fewer tokens. [R, V] -> [R, tiles]"""
    sums: np.ndarray = _tiles(rows).sum(dim=-1, dtype=torch.float64).numpy()
    rest = rows[:, rows.shape[1] // TILE * TILE :]
    return np.concatenate([sums, rest.sum(axis=1, dtype=np.float64)[:, None]], axis=1) if rest.shape[1] else sums


def _noise(rows: Sequence[SampleRow], ahead: int) -> np.ndarray:
    return noise_at([row.noise_key for row in rows], [len(row.tokens) + ahead for row in rows])


def _draw_on_device(logits: Tensor, rows: Sequence[SampleRow], ahead: int) -> Tensor:
    """Draw with sorts and sums over the whole vocabulary, which on a GPU is faster than finding out what to leave out."""
    device = logits.device

    def column(values: Sequence[float]) -> Tensor:
        return upload(np.array(values, dtype=np.float32), device).unsqueeze(1)

    noise = upload(_noise(rows, ahead), device)
    weights = torch.softmax(logits.div_(column([row.temperature for row in rows])), dim=-1)
    limited = [i for i, row in enumerate(rows) if row.limited]
    if limited:
        at = upload(np.array(limited), device)
        some = weights.index_select(0, at)
        params = [rows[i].params for i in limited]
        best = torch.sort(some, dim=-1, descending=True).values
        rank = torch.arange(best.shape[1], device=device)
        top_k = column([p.top_k for p in params])
        best.masked_fill_((top_k > 0) & (rank >= top_k), 0.0)
        whole = torch.where(top_k > 0, best.sum(dim=-1, keepdim=True), 1.0)
        keep = best.cumsum(dim=-1) - best < whole * column([p.top_p if p.top_p < 1.0 else float("inf") for p in params])
        keep &= (best > 0) & (best >= column([p.min_p for p in params]) * best[:, :1])
        keep |= rank == 0
        floor = best.masked_fill(~keep, float("inf")).amin(dim=-1, keepdim=True)
        weights.index_copy_(0, at, some.masked_fill(some < floor, 0.0))
    running = weights.double().cumsum(dim=-1)
    place = torch.searchsorted(running, (noise * running[:, -1]).unsqueeze(1), right=True).squeeze(1)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(place, last)
