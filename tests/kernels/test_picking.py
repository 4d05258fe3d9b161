"""Tokens that the native kernels choose are those of the sampler, and it is rarely asked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.sampling import SamplingParams
from penstock.kernels.library import CHOICE, KernelsError
from penstock.model.sampling.picker import NativePicker
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import sample
from tests.model.sampling.plain_sampler import plain_sample
from tests.model.sampling.test_stored_draws import FILE, VOCABULARIES, by_name, draws

VOCAB = 5003
USUAL: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9, "temperature": 0.7},
    "top_k": {"top_k": 40},
    "top_k and top_p": {"top_k": 50, "top_p": 0.95, "temperature": 0.6},
    "min_p": {"min_p": 0.05},
}


def likely_logits(random: np.random.Generator, rows: int) -> torch.Tensor:
    """As of a language model: some tokens stand out of the many."""
    return torch.from_numpy((random.gumbel(0.0, 2.0, (rows, VOCAB))).astype(np.float32))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_same_seeds_draw_the_stored_tokens(context, vocab: int) -> None:
    stored, chosen = json.loads(FILE.read_text(encoding="utf-8")), list(draws(vocab))
    samples = sample(torch.cat([draw.logits for draw in chosen]), [draw.row for draw in chosen], NativePicker(context()))
    found = by_name(chosen, [one.token_id for one in samples])
    for name, tokens in found.items():
        assert [None if e is None else t for t, e in zip(tokens, stored[name], strict=True)] == stored[name], name


@pytest.mark.parametrize("usual", USUAL)
def test_most_tokens_are_picked_and_are_the_samplers(context, paths: list[str], usual: str) -> None:
    logits = likely_logits(np.random.default_rng(3), 64)
    rows = [SampleRow(SamplingParams(**USUAL[usual]), seed, 0, [1, 2, 3], 2) for seed in range(64)]
    wanted = [plain_sample(logits[i], row, 2) for i, row in enumerate(rows)]
    for path in paths:
        picked = NativePicker(context(path)).certain(logits, rows)
        assert (picked >= 0).mean() > 0.95
        assert [token for token, plain in zip(picked, wanted, strict=True) if token not in (-1, plain)] == []
    assert [one.token_id for one in sample(logits.clone(), rows, NativePicker(context()))] == wanted


@pytest.mark.parametrize("top_k", [VOCAB, 1 << 31, 1 << 40, 10**30])
def test_any_number_of_likely_tokens_may_be_asked_for(context, top_k: int) -> None:
    logits = likely_logits(np.random.default_rng(4), 16)
    of = [[SampleRow(SamplingParams(top_k=k, top_p=0.9), seed, 0, [1], 1) for seed in range(16)] for k in (0, top_k)]
    without, found = (sample(logits.clone(), rows, NativePicker(context())) for rows in of)
    assert found == without


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 96, 127, 128, 1300]),
    spread=st.sampled_from([0.0, 1e-7, 1.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    top_k=st.sampled_from([0, 1, 5, 5000]),
    top_p=st.sampled_from([1.0, 0.999999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    masked=st.booleans(),
)
def test_what_is_picked_is_what_the_plain_sampler_draws(
    context, seed: int, vocab: int, spread: float, masked: bool, **params: Any
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy((random.standard_normal((3, vocab)) * spread).astype(np.float32))
    if masked and vocab > 1:
        logits[:, random.permutation(vocab)[: vocab // 2]] = float("-inf")
    rows = [SampleRow(SamplingParams(**params), seed, output, [1, 2, 3], 2) for output in range(3)]
    picked = NativePicker(context()).certain(logits, rows)
    for i, row in enumerate(rows):
        assert picked[i] in (-1, plain_sample(logits[i], row, 2))


def test_of_equal_logits_the_lowest_token_is_best(context) -> None:
    logits = np.zeros((2, 400), np.float32)
    logits[0, [7, 21, 300]] = 1.0
    logits[1, [399]] = 1.0
    assert context().pick(logits, np.zeros(2, CHOICE)).tolist() == [7, 399]


def test_rows_of_no_numbers_are_left_to_the_sampler(context) -> None:
    logits = np.full((3, 300), np.nan, np.float32)
    logits[1:] = -np.inf
    choices = np.zeros(3, CHOICE)
    choices["temperature"], choices["top_p"] = 1.0, [0.5, 0.5, 1.0]
    assert context().pick(logits, choices).tolist() == [-1, -1, -1]
    choices["temperature"][0] = -1.0
    with pytest.raises(KernelsError, match="Row 0 has a temperature below 0"):
        context().pick(logits, choices)
