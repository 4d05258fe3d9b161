"""Choose the next token of every sequence of a batch from its logits and its request's sampling settings.

Randomness is addressed, not drawn: the random number of a step is a hash of (seed, output, position), so a sequence that
was preempted, moved or resumed continues as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import TokenLogprob
from penstock.model.candidates import argmax

CANDIDATES = 1024  # top_p and min_p search these first; sorting the whole vocabulary costs far more


class SampleRow(NamedTuple):
    """A row of the batch for which a token is chosen, at position len(tokens)."""

    params: SamplingParams
    seed: int
    output: int  # index among the request's outputs
    tokens: Sequence[int]  # prompt and output so far
    prompt_len: int
    banned: Sequence[int] = ()  # ids that must not be chosen now (the end of text before min_tokens)
    allowed: np.ndarray | None = None  # if set, only these may be chosen: uint32 words, token t is bit t % 32 of word t // 32


class Sample(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sample]:
    """Choose a token for each row of logits [R, vocab] in fp32, which are changed in place."""
    if logits.device.type == "mps":
        logits = logits.cpu()  # Apple's GPUs have no fp64, which cumulative sums over a vocabulary need
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    # logprobs are the model's own, so before penalties, bias and temperature
    raw = torch.log_softmax(logits[wanted], dim=-1) if wanted else None
    adjust_(logits, rows)
    constrain_(logits, rows)
    chosen = argmax(logits).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        picked = _draw(logits if len(drawn) == len(rows) else logits[drawn], [rows[i] for i in drawn])
        for i, token in zip(drawn, picked, strict=True):
            chosen[i] = token
    samples = [Sample(token) for token in chosen]
    if raw is not None:
        found = _logprobs(raw, [rows[i].params.logprobs or 0 for i in wanted], [chosen[i] for i in wanted])
        for i, logprob in zip(wanted, found, strict=True):
            samples[i] = Sample(chosen[i], logprob)
    return samples


def adjust_(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply penalties, bias and bans, each as one scatter over all rows that have any."""
    at_row: list[np.ndarray] = []
    at_token: list[np.ndarray] = []
    repetition: list[np.ndarray] = []
    subtract: list[np.ndarray] = []
    bias_at: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        p = row.params
        if p.penalised:
            tokens = np.asarray(row.tokens, dtype=np.int64)
            ids = np.unique(tokens)
            generated, counts = np.unique(tokens[row.prompt_len :], return_counts=True)
            in_output = np.zeros(len(ids), dtype=np.int64)
            in_output[np.searchsorted(ids, generated)] = counts
            at_row.append(np.full(len(ids), i))
            at_token.append(ids)
            repetition.append(np.full(len(ids), p.repetition_penalty, dtype=np.float32))
            subtract.append((in_output * p.frequency_penalty + (in_output > 0) * p.presence_penalty).astype(np.float32))
        for token, bias in p.logit_bias.items():
            if token < logits.shape[1]:
                bias_at.append((i, token, float(bias)))
        bias_at.extend((i, token, float("-inf")) for token in row.banned if token < logits.shape[1])
    if at_row:

        def joined(parts: list[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(logits.device)

        where = (joined(at_row), joined(at_token))
        found, factor = logits[where], joined(repetition)
        logits[where] = torch.where(found > 0, found / factor, found * factor) - joined(subtract)
    if bias_at:
        at, token_ids, amounts = (torch.tensor(column, device=logits.device) for column in zip(*bias_at, strict=True))
        logits.index_put_((at, token_ids), amounts, accumulate=True)


def constrain_(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Mask the tokens that a row's grammar does not allow."""
    for i, row in enumerate(rows):
        if row.allowed is not None:
            bits = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")
            masked = torch.from_numpy(bits[: logits.shape[1]] == 0).to(logits.device)
            logits[i].masked_fill_(masked, float("-inf"))


@torch.inference_mode()
def score(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log probability of each target in its row of logits [R, vocab], with the `top` most likely tokens."""
    return _logprobs(torch.log_softmax(logits, dim=-1), [top] * len(targets), targets)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Draw by temperature among the tokens that top_k, top_p and min_p leave, in order of ids, so that no sort decides."""
    device = logits.device
    temperature = torch.tensor([row.params.temperature for row in rows], device=device).unsqueeze(1)
    address = ([row.seed for row in rows], [row.output for row in rows], [len(row.tokens) for row in rows])
    noise = torch.from_numpy(uniform(*address)).to(device)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    limited = [i for i, row in enumerate(rows) if row.params.top_k or row.params.top_p < 1.0 or row.params.min_p > 0.0]
    if limited:
        floor = torch.zeros(len(rows), 1, device=device)
        floor[limited] = _min_probability(probabilities[limited], [rows[i].params for i in limited])
        probabilities.masked_fill_(probabilities < floor, 0.0)
    tokens: list[int] = _pick_by_running_sum(probabilities, noise).tolist()
    return tokens


def _min_probability(probabilities: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest probability that may be drawn after top_k, top_p and min_p, applied in this order. [R, V] -> [R, 1]"""
    vocab, device = probabilities.shape[1], probabilities.device
    reach = min(vocab, max(CANDIDATES, *(p.top_k for p in params)))
    best = torch.topk(probabilities, reach, dim=-1).values
    if reach < vocab and any(_needs_full_sort(best[i], p) for i, p in enumerate(params)):
        best = torch.sort(probabilities, dim=-1, descending=True).values

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device).unsqueeze(1)

    rank = torch.arange(best.shape[1], device=device)
    best = best.masked_fill(rank >= column([p.top_k or vocab for p in params]), 0.0)
    before = best.cumsum(dim=-1) - best  # probability mass of the tokens before this one
    # top_p is a share of what top_k leaves; without top_k, of everything, also what is not among the candidates
    whole = torch.where(column([p.top_k for p in params]) > 0, best.sum(dim=-1, keepdim=True), 1.0)
    keep = before < whole * column([p.top_p if p.top_p < 1.0 else float("inf") for p in params])
    keep &= (best > 0) & (best >= column([p.min_p for p in params]) * best[:, :1])
    keep[:, 0] = True
    return best.masked_fill(~keep, float("inf")).amin(dim=-1, keepdim=True)


def _needs_full_sort(best: Tensor, p: SamplingParams) -> bool:
    """Whether tokens beyond the candidates could be drawn: a wide top_p or a low min_p, without top_k."""
    if p.top_k:
        return False
    return bool(best.sum() < p.top_p) if p.top_p < 1.0 else bool(best[-1] >= p.min_p * best[0])


def _pick_by_running_sum(weights: Tensor, noise: Tensor) -> Tensor:
    """The index at which the cumulative sum passes noise * total; never one of weight 0. [R, C], [R] -> [R]"""
    running = weights.double().cumsum(dim=-1)
    place = torch.searchsorted(running, (noise * running[:, -1]).unsqueeze(1), right=True).squeeze(1)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.minimum(place, last)


def _logprobs(raw: Tensor, top: Sequence[int], chosen: Sequence[int]) -> list[TokenLogprob]:
    own = raw.gather(1, torch.tensor(chosen, device=raw.device).unsqueeze(1)).squeeze(1).tolist()
    max_top = max(top)
    if not max_top:
        return [TokenLogprob(token, value) for token, value in zip(chosen, own, strict=True)]
    values, ids = torch.topk(raw, min(max_top, raw.shape[1]), dim=-1)
    return [
        TokenLogprob(token, value, tuple(zip(i[:count], v[:count], strict=True)))
        for token, value, i, v, count in zip(chosen, own, ids.tolist(), values.tolist(), top, strict=True)
    ]


def uniform(seeds: Sequence[int], outputs: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (seed, output, position): three rounds of the splitmix64 finaliser."""
    with np.errstate(over="ignore"):
        state = np.array([s & (2**64 - 1) for s in seeds], dtype=np.uint64)
        for part in (outputs, positions):
            state = _mix(state + np.uint64(0x9E3779B97F4A7C15))
            state = state ^ np.asarray(part, dtype=np.uint64)
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: np.ndarray = z ^ (z >> np.uint64(31))
    return out
