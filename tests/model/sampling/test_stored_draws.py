"""The same seeds draw the same tokens as ever: draws of an earlier sampler, stored for many mixtures of settings.

`python -m tests.model.sampling.test_stored_draws` makes the file anew, from the sampler as it is. A draw so close to the edge
of a token that the exponential of another processor may move it is stored as null and not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import sample

FILE = Path(__file__).with_name("stored_draws.json")
VOCABULARIES = (96, 1000, 5003, 49152)
OUTPUTS = 6
NUDGES = 8  # copies of the logits that must give the same token
NUDGE = 3e-6  # of logits: some units in the last place of their exponentials

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, all penalties": {
        "temperature": 0,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.7,
    },
    "greedy, bias": {"temperature": 0, "logit_bias": {3: 4.5, 90: 20.0, 4000: 30.0, 10**6: 100.0}},
    "temperature 1": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 40": {"temperature": 40.0},
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5},
    "top_k 50, hot": {"top_k": 50, "temperature": 3.0},
    "top_k 2000": {"top_k": 2000, "temperature": 5.0},
    "top_p 0.5": {"top_p": 0.5},
    "top_p 0.95": {"top_p": 0.95, "temperature": 0.8},
    "top_p 0.95, hot": {"top_p": 0.95, "temperature": 4.0},
    "top_p 0.999, flat": {"top_p": 0.999, "temperature": 50.0},
    "top_p 0.001": {"top_p": 0.001},
    "min_p 0.1": {"min_p": 0.1},
    "min_p 0.001, hot": {"min_p": 0.001, "temperature": 3.0},
    "min_p 1": {"min_p": 1.0},
    "top_k, top_p": {"top_k": 40, "top_p": 0.9},
    "top_k, min_p": {"top_k": 40, "min_p": 0.02, "temperature": 2.0},
    "top_p, min_p": {"top_p": 0.98, "min_p": 0.01, "temperature": 1.5},
    "top_k, top_p, min_p": {"top_k": 300, "top_p": 0.9, "min_p": 0.005, "temperature": 2.0},
    "repetition 1.2": {"repetition_penalty": 1.2},
    "repetition 0.8, top_p": {"repetition_penalty": 0.8, "top_p": 0.9},
    "presence, frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "presence -2, top_k": {"presence_penalty": -2.0, "top_k": 20},
    "all penalties, bias, top_p": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {1: -100, 2: 6.0, 70: -3.5, 900: 7.25},
        "top_p": 0.95,
        "temperature": 1.4,
    },
    "bias": {"logit_bias": {i: 5.0 + i / 8 for i in range(40)}, "temperature": 1.2},
}


class Draw(NamedTuple):
    name: str
    logits: torch.Tensor  # [1, vocab]
    row: SampleRow


def draws(vocab: int) -> Iterator[Draw]:
    """Every mixture for several outputs of a request, some of them with a grammar's mask or banned tokens.

    All numbers come from integers, so that they are the same everywhere.
    """
    random = np.random.RandomState(vocab)
    logits = random.randint(0, 1 << 16, (OUTPUTS, 4, vocab)).sum(axis=1).astype(np.float32) / (1 << 12) - 32.0
    texts = random.randint(0, vocab, (OUTPUTS, 60))
    words = random.randint(0, 1 << 16, (OUTPUTS, 2, -(-vocab // 32))).astype(np.uint32)
    masks = (words[:, 0] << np.uint32(16)) | words[:, 1]
    for number, (name, settings) in enumerate(SETTINGS.items()):
        for output in range(OUTPUTS):
            tokens = [*texts[output, : 40 + number % 20].tolist(), *texts[output, :9].tolist()]
            row = SampleRow(
                SamplingParams(n=OUTPUTS, **settings),
                1000 * number + vocab,
                output,
                tokens,
                30,
                (5, 6, 7) if output % 3 == 1 else (),
                masks[output] if output % 3 == 2 else None,
            )
            yield Draw(f"{vocab}: {name}", torch.from_numpy(logits[output : output + 1].copy()), row)


def by_name(chosen: list[Draw], tokens: list[int | None]) -> dict[str, list[int | None]]:
    found: dict[str, list[int | None]] = {}
    for draw, token in zip(chosen, tokens, strict=True):
        found.setdefault(draw.name, []).append(token)
    return found


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("together", [False, True])
def test_the_same_seeds_draw_the_stored_tokens(vocab: int, together: bool) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    chosen = list(draws(vocab))
    if together:
        samples = sample(torch.cat([draw.logits for draw in chosen]), [draw.row for draw in chosen])
    else:
        samples = [sample(draw.logits, [draw.row])[0] for draw in chosen]
    found = by_name(chosen, [one.token_id for one in samples])
    expected = {name: stored[name] for name in found}
    compared = {name: [None if e is None else t for t, e in zip(found[name], expected[name], strict=True)] for name in found}
    assert compared == expected
    assert sum(tokens.count(None) for tokens in expected.values()) < 0.05 * len(chosen)


def _robust(draw: Draw) -> int | None:
    """The token of a draw, if logits that differ in their last digits give the same."""
    generator = torch.Generator().manual_seed(1)
    nudges = [torch.zeros_like(draw.logits)]
    nudges += [torch.randn(draw.logits.shape, generator=generator) * NUDGE for _ in range(NUDGES)]
    found = {sample(draw.logits + nudge, [draw.row])[0].token_id for nudge in nudges}
    return found.pop() if len(found) == 1 else None


if __name__ == "__main__":
    everything = [draw for vocab in VOCABULARIES for draw in draws(vocab)]
    stored = by_name(everything, [_robust(draw) for draw in everything])
    lines = [f"{json.dumps(name)}: {json.dumps(tokens)}" for name, tokens in stored.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
