"""The sampler in plain steps: one row, sorted and added up as a whole. What the real one must draw, token for token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling.noise import noise_at
from penstock.model.sampling.sample_row import SampleRow

CANDIDATES = 1024


def plain_sample(logits: Tensor, row: SampleRow, prompt_len: int) -> int:
    """Choose a token from the logits [vocab] of one row."""
    logits, p, vocab = logits.clone(), row.params, len(logits)
    if p.penalised:
        tokens = np.asarray(row.tokens, dtype=np.int64)
        ids = np.unique(tokens)
        generated, counts = np.unique(tokens[prompt_len:], return_counts=True)
        in_output = np.zeros(len(ids), dtype=np.int64)
        in_output[np.searchsorted(ids, generated)] = counts
        losses = (in_output * p.frequency_penalty + (in_output > 0) * p.presence_penalty).astype(np.float32)
        found, factor = logits[ids], torch.tensor(p.repetition_penalty)
        logits[ids] = torch.where(found > 0, found / factor, found * factor) - torch.from_numpy(losses)
    for token, bias in p.logit_bias.items():
        if token < vocab:
            logits[token] += float(bias)
    for token in row.banned:
        if token < vocab:
            logits[token] = float("-inf")
    if row.allowed is not None:
        bits = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")[:vocab]
        logits[torch.from_numpy(bits == 0)] = float("-inf")
    if p.greedy:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / torch.tensor(p.temperature), dim=-1)
    if p.top_k or p.top_p < 1.0 or p.min_p > 0.0:
        probabilities[probabilities < _floor(probabilities, p)] = 0.0
    running = probabilities.double().cumsum(dim=0)
    target = torch.from_numpy(noise_at([row.noise_key], [len(row.tokens)])) * running[-1]
    place = int(torch.searchsorted(running, target, right=True))
    return min(place, int(probabilities.nonzero()[-1]))


def _floor(probabilities: Tensor, p: SamplingParams) -> Tensor:
    """The smallest probability that may be drawn."""
    vocab = len(probabilities)
    best = torch.sort(probabilities, descending=True).values
    whole = torch.tensor(1.0)
    if p.top_k:
        best = best[: max(CANDIDATES, p.top_k)].clone()
        best[p.top_k :] = 0.0
        whole = best.sum()
    before = best.cumsum(dim=0) - best
    keep = before < whole * torch.tensor(p.top_p if p.top_p < 1.0 else float("inf"))
    keep &= (best > 0) & (best >= torch.tensor(p.min_p) * best[0])
    keep[0] = True
    assert len(best) <= vocab
    return best[keep].min()
