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
from penstock.model.sampling.candidates import top
from penstock.model.sampling.choosing import choose, select
from penstock.model.sampling.picker import Picker
from penstock.model.sampling.sample_row import SampleRow, adjust_, constrain_
from penstock.model.transfer import Download, upload


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
        """Wait for the tokens: the only time that the host waits."""
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
def launch(
    logits: Tensor,
    rows: Sequence[SampleRow],
    picker: Picker | None = None,
    ahead: int = 0,
    broken: Tensor | None = None,
) -> PendingSamples:
    """Begin to choose a token for each row of logits [R, vocab] in fp32, which may be changed in place.

    ahead: tokens of each row that the host does not know yet. Then all rows must be `history_independent`,
        unless a picker knows more.
    broken: [R], True for rows whose logits are not numbers; their token is -1.
    """
    if logits.device.type == "mps":
        logits = logits.cpu()  # Apple's GPUs have no fp64, which cumulative sums over a vocabulary need
    logits = logits.contiguous()
    scored = [i for i, row in enumerate(rows) if row.logprobs is not None]
    # logprobs are the model's own, so before penalties, bias and temperature
    raw = torch.log_softmax(select(logits, scored), dim=-1) if scored else None
    if picker is None or not picker.adjusts:
        adjust_(logits, rows)
        constrain_(logits, rows)
    tokens = choose(logits, rows, ahead) if picker is None else picker.pick(logits, rows, ahead)
    logprobs = None if raw is None else _Logprobs(raw, [rows[i].logprobs or 0 for i in scored], select(tokens, scored))
    return PendingSamples(tokens if broken is None else torch.where(broken, -1, tokens), scored, logprobs)


@torch.inference_mode()
def score(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log probability of each target in its row of logits [R, vocab], with the `top` most likely tokens."""
    chosen = upload(np.array(targets, dtype=np.int64), logits.device)
    return _Logprobs(torch.log_softmax(logits, dim=-1), [top] * len(targets), chosen).of(targets)


class _Logprobs:
    """Log probabilities of chosen tokens and of the likeliest ones: raw [R, V], chosen [R]."""

    def __init__(self, raw: Tensor, counts: Sequence[int], chosen: Tensor) -> None:
        self._counts = counts
        self._own = Download(raw.gather(1, chosen.unsqueeze(1)).squeeze(1))
        best = top(raw, min(max(counts), raw.shape[1])) if max(counts) else None
        self._best = None if best is None else (Download(best[0]), Download(best[1]))

    def of(self, chosen: Sequence[int]) -> list[TokenLogprob]:
        """Wait for them. `chosen`: the same tokens, on the host."""
        own = self._own.wait().tolist()
        if self._best is None:
            return [TokenLogprob(token, value) for token, value in zip(chosen, own, strict=True)]
        values, ids = (one.wait().tolist() for one in self._best)
        return [
            TokenLogprob(token, value, tuple(zip(i[:count], v[:count], strict=True)))
            for token, value, i, v, count in zip(chosen, own, ids, values, self._counts, strict=True)
        ]
