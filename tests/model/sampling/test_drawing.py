"""Drawing from candidates and sums of tiles: the tokens that sorting and adding up the whole vocabulary gives, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.sampling import SamplingParams
from penstock.model.sampling import drawing
from penstock.model.sampling.sample_row import Penalties, SampleRow
from penstock.model.sampling.sampler import launch, sample
from tests.model.sampling.plain_sampler import plain_sample

VOCABULARIES = [5, 128, 1000, 1024, 1025, 4096, 5003, 9000]


@st.composite
def settings_of_a_row(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0, 9.0, 100.0]))}
    options: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.sampled_from([1, 2, 20, 60, 1100, 5000, 10**6]),
        "top_p": st.floats(1e-4, 0.99999),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, 9100), st.floats(-100, 100, width=16), max_size=6),
    }
    for name in draw(st.sets(st.sampled_from(sorted(options)))):
        found[name] = draw(options[name])
    return found


def logits_like(shape: str, vocab: int, random: np.random.Generator) -> np.ndarray:
    """Rows that are easy to get wrong: flat, peaked, full of ties, mostly impossible."""
    match shape:
        case "ties":
            found = random.integers(0, 6, vocab).astype(np.float32)
        case "equal":
            found = np.zeros(vocab, dtype=np.float32)
        case "peaked":
            found = random.standard_normal(vocab) * 8
        case "masked":
            found = np.where(random.random(vocab) < 0.99, -np.inf, random.standard_normal(vocab))
            found[random.integers(vocab)] = 1.0
        case _:
            found = random.standard_normal(vocab) * 2
    return found.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from(VOCABULARIES),
    rows=st.lists(
        st.tuples(settings_of_a_row(), st.sampled_from(["ties", "equal", "peaked", "masked", "usual"])), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**63),
    banned=st.lists(st.integers(0, 4), max_size=2),
    grammar=st.booleans(),
)
def test_every_mixture_draws_what_the_plain_sampler_draws(
    vocab: int, rows: list[tuple[dict[str, Any], str]], seed: int, banned: list[int], grammar: bool
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(np.stack([logits_like(shape, vocab, random) for _, shape in rows]))
    made, prompt_len = [], 7
    for i, (params, shape) in enumerate(rows):
        tokens = random.integers(0, vocab, 20).tolist()
        allowed = random.integers(1 << 16, 1 << 32, -(-vocab // 32), dtype=np.uint32) if grammar and shape != "masked" else None
        if allowed is not None:
            allowed[0] |= 1  # a grammar always allows something
        ban = banned if vocab > 5 and shape != "masked" else ()
        made.append(SampleRow(SamplingParams(**params), seed + i, i, tokens, prompt_len, ban, allowed))
    expected = [plain_sample(logits[i], row, prompt_len) for i, row in enumerate(made)]
    assert [one.token_id for one in sample(logits.clone(), made)] == expected


@pytest.mark.parametrize("vocab", [4096, 4099])
@pytest.mark.parametrize("shift", [-1e-15, 0.0, 1e-15])
def test_a_draw_on_the_edge_of_a_token_is_decided_as_by_the_whole_sum(vocab: int, shift: float) -> None:
    random = np.random.default_rng(vocab)
    weights = torch.softmax(torch.from_numpy(random.standard_normal((1, vocab)).astype(np.float32)) * 9, dim=-1).numpy()
    running = weights[0].cumsum(dtype=np.float64)
    for edge in (0, 1, 127, 128, 129, 2000, vocab - 2, vocab - 1):
        noise = np.clip(np.array([running[edge] / running[-1] + shift]), 0.0, 1 - 2.0**-53)
        assert drawing._pick_by_tiles(weights, noise) == drawing._pick(weights, noise)


def test_a_wide_nucleus_in_one_row_sorts_that_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    plain = drawing._min_probability

    def counted(candidates: np.ndarray, *others: Any) -> np.ndarray:
        sizes.append(candidates.shape)
        return plain(candidates, *others)

    monkeypatch.setattr(drawing, "_min_probability", counted)
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((16, 20_000)).astype(np.float32) * 5)
    params = [SamplingParams(top_p=0.95)] * 15 + [SamplingParams(top_p=0.9999, temperature=50.0)]
    sample(logits, [SampleRow(p, i, 0, [1], 1) for i, p in enumerate(params)])
    assert [rows for rows, _ in sizes] == [15, 1]
    assert all(candidates <= drawing.MAX_SORTED for _, candidates in sizes)


def test_a_row_of_which_every_token_is_masked_harms_no_other() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((7, 3000)).astype(np.float32))
    masked = np.zeros(-(-3000 // 32), dtype=np.uint32)
    limits: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_k": 2000}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0}]
    rows = [SampleRow(SamplingParams(**limit), 1, 0, [1], 1, (), masked) for limit in limits]
    alone = sample(logits[6:].clone(), [SampleRow(SamplingParams(), 3, 0, [1], 1)])
    found = sample(logits, [*rows, SampleRow(SamplingParams(), 3, 0, [1], 1)])
    assert found[6] == alone[0]
    assert all(0 <= one.token_id < 3000 for one in found)


def test_penalties_are_counted_on_by_the_tokens_that_came_since() -> None:
    tokens = [5, 6, 5]
    kept = Penalties(SamplingParams(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5), 2)
    for _ in range(200):
        tokens.append(len(tokens) % 90)
        ids, losses = kept.update(tokens)
        fresh = Penalties(SamplingParams(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5), 2)
        expected = fresh.update(tokens)
        assert dict(zip(ids.tolist(), losses.tolist(), strict=True)) == dict(zip(*map(np.ndarray.tolist, expected), strict=True))
    assert dict(zip(ids.tolist(), losses.tolist(), strict=True))[5] == 0.25 + 0.5 * tokens[2:].count(5)
    assert dict(zip(ids.tolist(), losses.tolist(), strict=True))[6] == 0.25 + 0.5 * tokens[2:].count(6)


class _CountedTokens(list[int]):
    """A list that counts which of its items are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
        return super().__getitem__(index)


def test_a_step_reads_only_the_token_that_is_new() -> None:
    tokens = _CountedTokens(range(5000))
    row = SampleRow(SamplingParams(temperature=0, repetition_penalty=1.1), 1, 0, tokens, 4990)
    sample(torch.zeros(1, 6000), [row])
    tokens.read = 0
    for _ in range(3):
        tokens.append(sample(torch.zeros(1, 6000), [row])[0].token_id)
    assert tokens.read == 2


def test_what_was_launched_is_waited_for_once() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 3], logits[1, 4] = 9.0, 9.0
    rows = [
        SampleRow(SamplingParams(temperature=0, logprobs=1), 1, 0, [1], 1),
        SampleRow(SamplingParams(temperature=0), 1, 0, [1], 1),
    ]
    pending = launch(logits, rows)
    assert pending.tokens.tolist() == [3, 4]
    first, second = pending.wait()
    assert first.logprob is not None
    assert [token for token, _ in first.logprob.top] == [3]
    assert second.logprob is None


@settings(max_examples=40, deadline=None)
@given(params=settings_of_a_row(), vocab=st.sampled_from([128, 1500]), seed=st.integers(0, 1000))
def test_the_way_for_gpus_draws_the_same(params: dict[str, Any], vocab: int, seed: int) -> None:
    """Here on a CPU. Sums in another order may move the edge of a nucleus, so probabilities are far apart."""
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.permutation(vocab).astype(np.float32) / 37)[None]
    row = SampleRow(SamplingParams(**{**params, "temperature": params["temperature"] or 1.0}), seed, 0, [1, 2, 3], 2)
    assert drawing._draw_on_device(logits.clone(), [row], 0).tolist() == drawing.draw(logits.clone(), [row]).tolist()
