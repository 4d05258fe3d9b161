"""Choosing tokens: each setting does what it says, in a batch as alone, and the noise is where its address says."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.sampling import SamplingParams
from penstock.errors import InvalidSampling
from penstock.model.sampling.candidates import argmax, top
from penstock.model.sampling.noise import noise_at, noise_key
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import sample

VOCAB = 3000


def row(
    seed: int = 1, tokens: list[int] | None = None, prompt_len: int = 1, banned: tuple[int, ...] = (), **params: object
) -> SampleRow:
    return SampleRow(SamplingParams(**params), seed, 0, tokens or [0], prompt_len, banned)  # type: ignore[arg-type]


def logits_of(probabilities: dict[int, float]) -> torch.Tensor:
    logits = torch.full((1, VOCAB), -1e9)
    for token, probability in probabilities.items():
        logits[0, token] = math.log(probability)
    return logits


def drawn(probabilities: dict[int, float], count: int = 400, **params: object) -> Counter[int]:
    logits = logits_of(probabilities).repeat(count, 1)
    return Counter(s.token_id for s in sample(logits, [row(seed=i, **params) for i in range(count)]))


def test_temperature_zero_takes_the_most_likely() -> None:
    assert sample(logits_of({5: 0.4, 9: 0.6}), [row(temperature=0)])[0].token_id == 9


def test_drawing_follows_the_probabilities() -> None:
    found = drawn({5: 0.25, 9: 0.75}, count=2000)
    assert 0.21 < found[5] / 2000 < 0.29
    assert found[5] + found[9] == 2000


def test_a_low_temperature_sharpens() -> None:
    assert drawn({5: 0.4, 9: 0.6}, temperature=0.1)[9] > 380


def test_top_k_leaves_the_k_best() -> None:
    assert set(drawn({1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}, top_k=2)) == {1, 2}


def test_top_p_leaves_the_smallest_set_that_reaches_p() -> None:
    assert set(drawn({1: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}, top_p=0.7)) == {1, 2}


def test_min_p_leaves_what_is_not_too_far_below_the_best() -> None:
    assert set(drawn({1: 0.6, 2: 0.3, 3: 0.1}, min_p=0.4)) == {1, 2}


def test_a_nucleus_wider_than_the_candidates_is_found_all_the_same() -> None:
    flat = dict.fromkeys(range(VOCAB), 1 / VOCAB)
    found = drawn(flat, count=1500, top_p=0.999)
    assert len(found) > 1024


def test_the_nucleus_is_a_share_of_everything() -> None:
    """The 1,024 best hold 0.93 of the probability: 0.9 of everything reaches further than 0.9 of those."""
    share = dict.fromkeys(range(1024), 0.93 / 1024) | dict.fromkeys(range(1024, VOCAB), 0.07 / 1976)
    logits = torch.log(torch.tensor([share[token] for token in range(VOCAB)]))
    logits[:1024] -= torch.linspace(0, 1e-3, 1024)  # the first tokens are the likeliest
    found = {s.token_id for s in sample(logits.repeat(1000, 1), [row(seed=i, top_p=0.9) for i in range(1000)])}
    assert max(found) == pytest.approx(0.9 / 0.93 * 1024, abs=6)


def test_one_row_never_changes_what_another_gets() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, VOCAB, generator=generator) * 3
    rows = [
        row(temperature=0),
        row(seed=2, temperature=1.0),
        row(seed=3, temperature=0.7, top_p=0.9),
        row(seed=4, temperature=1.3, top_k=20, logprobs=3),
        row(seed=5, tokens=[1, 2, 3, 3], repetition_penalty=1.5, frequency_penalty=0.3),
        row(seed=6, temperature=0.9, min_p=0.05, logit_bias={7: 5.0}),
    ]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(len(rows))]
    assert [s.token_id for s in together] == [s.token_id for s in alone]


def test_repetition_penalty_pushes_away_from_all_that_was_seen() -> None:
    logits = logits_of({5: 0.6, 9: 0.4})
    assert sample(logits, [row(tokens=[5, 1], prompt_len=2, temperature=0, repetition_penalty=2.0)])[0].token_id == 9


def test_presence_and_frequency_count_only_what_was_generated() -> None:
    in_prompt = row(tokens=[5, 5], prompt_len=2, temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    in_output = row(tokens=[1, 5], prompt_len=1, temperature=0, presence_penalty=2.0)
    assert sample(logits_of({5: 0.6, 9: 0.4}), [in_prompt])[0].token_id == 5
    assert sample(logits_of({5: 0.6, 9: 0.4}), [in_output])[0].token_id == 9


def test_frequency_grows_with_each_repetition() -> None:
    once = row(tokens=[1, 5], prompt_len=1, temperature=0, frequency_penalty=0.3)
    thrice = row(tokens=[1, 5, 5, 5], prompt_len=1, temperature=0, frequency_penalty=0.3)
    assert sample(logits_of({5: 0.6, 9: 0.4}), [once])[0].token_id == 5
    assert sample(logits_of({5: 0.6, 9: 0.4}), [thrice])[0].token_id == 9


def test_bias_and_bans_reach_their_tokens() -> None:
    assert sample(logits_of({5: 0.6, 9: 0.4}), [row(temperature=0, logit_bias={"9": 3})])[0].token_id == 9
    assert sample(logits_of({5: 0.6, 9: 0.4}), [row(temperature=0, banned=(5,))])[0].token_id == 9


def test_logprobs_are_the_models_own_whatever_was_adjusted() -> None:
    found = sample(logits_of({5: 0.6, 9: 0.4}), [row(temperature=0, logit_bias={9: 50}, logprobs=2)])[0]
    assert found.token_id == 9
    assert found.logprob is not None
    assert found.logprob.logprob == pytest.approx(math.log(0.4), abs=1e-4)
    assert [token for token, _ in found.logprob.top] == [5, 9]


def test_noise_depends_on_seed_output_and_position_and_on_nothing_else() -> None:
    base = noise_at([noise_key(1, 0)], [5])[0]
    assert noise_at([noise_key(1, 0)] * 2, [5, 5]).tolist() == [base, base]
    others = [noise_at([noise_key(seed, output)], [position])[0] for seed, output, position in ((2, 0, 5), (1, 1, 5), (1, 0, 6))]
    assert len({base, *others}) == 4


def test_noise_is_spread_evenly() -> None:
    found = noise_at([noise_key(7, 0)] * 20_000, list(range(20_000)))
    shares = torch.histc(torch.from_numpy(found), bins=10, min=0, max=1) / 20_000
    assert shares.min() > 0.09
    assert shares.max() < 0.11
    assert found.min() >= 0
    assert found.max() < 1


@pytest.mark.parametrize("seed", [-1, 0, 2**64 - 1, -(2**63)])
def test_every_seed_that_is_accepted_works(seed: int) -> None:
    assert sample(logits_of({5: 1.0}), [row(seed=seed)])[0].token_id == 5


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 4), vocab=st.sampled_from([90, 128, 256, 1280, 1281, 2503]), k=st.integers(1, 9), data=st.data())
def test_two_levels_find_what_a_sort_finds(rows: int, vocab: int, k: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 10_000))
    # few distinct values: ties everywhere
    logits = torch.randint(0, 40, (rows, vocab), generator=torch.Generator().manual_seed(seed)).float()
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    values, ids = top(logits, k)
    assert torch.equal(values, order.values[:, :k])
    assert torch.equal(argmax(logits), order.indices[:, 0])
    assert torch.equal(logits.gather(1, ids), values)


def test_none_means_the_default_where_other_libraries_say_so() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 2},
        {"n": 0},
        {"max_tokens": 0},
        {"min_tokens": 10, "max_tokens": 5},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {1: 101}},
        {"logprobs": 51},
        {"stop": [""]},
        {"stop": ["a"] * 17},
        {"stop_token_ids": [-1]},
        {"seed": 2**64},
        {"stop": 5},
        {"logit_bias": [1]},
        {"ignore_eos": "yes"},
    ],
)
def test_a_setting_that_cannot_be_used_is_named(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.field in bad
    assert caught.value.hint
