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

from penstock.domain.updates import TokenLogprob
from penstock.model.candidates import argmax, top
from penstock.model.drawing import draw
from penstock.model.picker import Picker
from penstock.model.sample_row import SampleRow, adjust_, constrain_
from penstock.model.upload import Download, upload


class Sample(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None


class PendingSamples:
    """Tokens that were chosen, perhaps on a GPU that is still at work."""

    def __init__(self, tokens: Tensor, scored: Sequence[int], logprobs: _Logprobs | None) -> None:
        self.tokens = tokens  # [R]
        self._chosen = Download(tokens)
        self._scored = scored  # rows with logprobs
        self._logprobs = logprobs

    def wait(self) -> list[Sample]:
        """Wait for the tokens: the only time that the host does."""
        tokens: list[int] = self._chosen.wait().tolist()
        samples = [Sample(token) for token in tokens]
        if self._logprobs is not None:
            for i, logprob in zip(self._scored, self._logprobs.of([tokens[i] for i in self._scored]), strict=True):
                samples[i] = Sample(tokens[i], logprob)
        return samples


def sample(logits: Tensor, rows: Sequence[SampleRow], picker: Picker | None = None) -> list[Sample]:
    """Choose a token for each row of logits [R, vocab] in fp32, which are changed in place.

    picker: chooses the same tokens faster, where there are native kernels.
    """
    return launch(logits, rows, picker).wait()


@torch.inference_mode()
def launch(logits: Tensor, rows: Sequence[SampleRow], picker: Picker | None = None, ahead: int = 0) -> PendingSamples:
    """Begin to choose a token for each row of logits [R, vocab] in fp32, which are changed in place.

    ahead: tokens of each row that the host does not know yet. Then all rows must be `foreseeable`.
    """
    if logits.device.type == "mps":
        logits = logits.cpu()  # Apple's GPUs have no fp64, which cumulative sums over a vocabulary need
    logits = logits.contiguous()
    scored = [i for i, row in enumerate(rows) if row.logprobs is not None]
    # logprobs are the model's own, so before penalties, bias and temperature
    raw = torch.log_softmax(_select(logits, scored), dim=-1) if scored else None
    adjust_(logits, rows)
    constrain_(logits, rows)
    tokens = _choose(logits, rows, ahead) if picker is None else _pick(logits, rows, picker)
    if raw is None:
        return PendingSamples(tokens, (), None)
    return PendingSamples(tokens, scored, _Logprobs(raw, [rows[i].logprobs or 0 for i in scored], _select(tokens, scored)))


def _pick(logits: Tensor, rows: Sequence[SampleRow], picker: Picker) -> Tensor:
    tokens = torch.from_numpy(picker.pick(logits, rows))
    left = (tokens < 0).nonzero().squeeze(1).tolist()
    if left:
        tokens[left] = _choose(_select(logits, left), [rows[i] for i in left])
    return tokens


def _choose(logits: Tensor, rows: Sequence[SampleRow], ahead: int = 0) -> Tensor:
    """Greedy rows take their best token, the others draw. [R, V] -> [R]"""
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return argmax(logits)
    if len(drawn) == len(rows):
        return draw(logits, rows, ahead)
    greedy = [i for i, row in enumerate(rows) if row.greedy]
    best = argmax(_select(logits, greedy))
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    tokens.index_copy_(0, upload(np.array(greedy), logits.device), best)
    chosen = draw(_select(logits, drawn), [rows[i] for i in drawn], ahead)
    return tokens.index_copy_(0, upload(np.array(drawn), logits.device), chosen)


def _select(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(np.array(rows), tensor.device))


@torch.inference_mode()
def score(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log probability of each target in its row of logits [R, vocab], with the `top` most likely tokens."""
    chosen = upload(np.array(targets, dtype=np.int64), logits.device)
    return _Logprobs(torch.log_softmax(logits, dim=-1), [top] * len(targets), chosen).of(targets)


class _Logprobs:
    """Log probabilities of chosen tokens and of the likeliest ones: raw [R, V], chosen [R]."""

    def __init__(self, raw: Tensor, counts: Sequence[int], chosen: Tensor) -> None:
        self._counts = counts
        self._own = raw.gather(1, chosen.unsqueeze(1)).squeeze(1)
        self._best = top(raw, min(max(counts), raw.shape[1])) if max(counts) else None

    def of(self, chosen: Sequence[int]) -> list[TokenLogprob]:
        """Wait for them. `chosen`: the same tokens, on the host."""
        own = self._own.tolist()
        if self._best is None:
            return [TokenLogprob(token, value) for token, value in zip(chosen, own, strict=True)]
        values, ids = self._best
        return [
            TokenLogprob(token, value, tuple(zip(i[:count], v[:count], strict=True)))
            for token, value, i, v, count in zip(chosen, own, ids.tolist(), values.tolist(), self._counts, strict=True)
        ]
