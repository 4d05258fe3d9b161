"""The attacks succeed where they must, and fail on numbers that hold nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.audit.attacks import Dictionary, LinearMap, fit, share
from penstock.audit.cut_model import CutModel, kept_layers, load_cut
from penstock.audit.search import BATCH_GROWTH, FIRST_BATCH, MAX_BATCH, Known, Search, ranking_flops, try_flops
from penstock.model.architecture.shapes import max_layer_params
from penstock.model.decoder.attention import BatchPiece
from tests.hardware import needs_bf16

KNOWN, SOUGHT = 16, 24


@pytest.fixture(scope="module")
def dictionary(model: CutModel) -> Dictionary:
    return Dictionary(model.ends)


@pytest.fixture(scope="module")
def text(model: CutModel, sample: list[int]) -> dict[int, Tensor]:
    return model.read(sample, range(1, len(sample) + 1))


@pytest.fixture(scope="module")
def public_states(model: CutModel, public: list[int]) -> dict[int, Tensor]:
    """No deeper than these tests look."""
    pieces = [BatchPiece(0, len(public), range(1, len(public) + 1))]
    states = {0: model.ends.compute_embed(public)}
    for start, end in pairwise([0, 1, 2, 6]):
        states[end] = model.run(states[start], pieces, start, end)
    return states


def noise(rows: int, model: CutModel) -> Tensor:
    return torch.randn(rows, model.spec.hidden, generator=torch.Generator().manual_seed(7))


def mapped(dictionary: Dictionary, states: Tensor, ids: list[int]) -> LinearMap:
    return fit(states[1:], dictionary.directions(ids[1:]))


# ---- the nearest embedding, and a linear map ----


def test_embeddings_give_every_token_away(dictionary: Dictionary, text: dict[int, Tensor], sample: list[int]) -> None:
    assert share(dictionary.nearest(text[0], 1), sample) == 1.0


@pytest.mark.slow
def test_one_layer_is_enough_against_the_nearest_embedding_and_not_against_a_linear_map(
    dictionary: Dictionary, text: dict[int, Tensor], sample: list[int], public_states: dict[int, Tensor], public: list[int]
) -> None:
    attack = mapped(dictionary, public_states[1], public)
    assert share(dictionary.nearest(text[1], 1), sample) < 0.05
    assert share(dictionary.nearest(attack(text[1]), 1), sample) > 0.8


def test_random_states_give_nothing_away(
    model: CutModel, dictionary: Dictionary, sample: list[int], public_states: dict[int, Tensor], public: list[int]
) -> None:
    states = noise(len(sample), model)
    assert share(dictionary.nearest(states, 10), sample) <= 0.05
    assert share(dictionary.nearest(mapped(dictionary, public_states[2], public)(states), 1), sample) <= 0.1


def test_a_map_that_was_fitted_to_noise_reads_nothing(
    model: CutModel, dictionary: Dictionary, text: dict[int, Tensor], sample: list[int], public: list[int]
) -> None:
    attack = mapped(dictionary, noise(len(public), model), public)
    assert share(dictionary.nearest(attack(text[2]), 1), sample) <= 0.1


def test_the_fit_finds_a_linear_map_where_there_is_one() -> None:
    random = torch.Generator().manual_seed(1)
    states = torch.nn.functional.rms_norm(torch.randn(400, 12, generator=random), (12,))
    truth = torch.randn(12, 12, generator=random)
    torch.testing.assert_close(fit(states, states @ truth + 3)(states), states @ truth + 3, rtol=0, atol=0.05)


def test_the_fit_does_not_depend_on_how_long_states_are() -> None:
    random = torch.Generator().manual_seed(1)
    states, targets = torch.randn(100, 8, generator=random), torch.randn(100, 8, generator=random)
    longer = states * torch.logspace(-2, 3, 100).unsqueeze(1)
    torch.testing.assert_close(fit(longer, targets)(longer), fit(states, targets)(states), rtol=1e-3, atol=1e-3)


def test_a_share_counts_tokens_that_are_among_their_guesses() -> None:
    assert share(torch.tensor([[1, 2], [3, 4], [5, 6]]), [2, 9, 5]) == pytest.approx(2 / 3)
    assert share(torch.tensor([4, 5]), [4, 4]) == 0.5


# ---- norm and head ----


def test_states_of_the_last_layer_give_every_answer_away(model: CutModel, sample: list[int]) -> None:
    table = range(1, 1 + len(sample) + 3 * 5)
    answer = model.answer(table, [1, 40, len(sample)], model.read(sample, table), 5)
    assert model.likeliest(answer.states[model.layers]).tolist() == list(answer.ids)
    assert share(model.likeliest(answer.states[model.layers // 2 + 3]), answer.ids) < 1.0


def test_an_answer_has_the_states_that_its_text_has_when_it_is_read_at_once(model: CutModel, sample: list[int]) -> None:
    table = range(1, 1 + len(sample) + 2 * 4)
    answer = model.answer(table, [20, 50], model.read(sample, table), 4)
    second = answer.ids[1::2]  # step by step, all starts in turn
    whole = model.read([*sample[:50], *second], table)
    for depth, states in answer.states.items():
        torch.testing.assert_close(states[1::2], whole[depth][49:53], rtol=1e-3, atol=1e-2)


# ---- the search ----


def known(model: CutModel, ids: list[int]) -> Known:
    blocks = range(1, len(ids) + 1)
    last = model.read(ids, blocks)[model.layers][-1:]
    return Known(blocks, last, range(len(ids) + 1, len(ids) + 1 + MAX_BATCH + SOUGHT))


def search_at(depth: int, model: CutModel, dictionary: Dictionary, states: dict[int, Tensor], public: list[int]) -> Search:
    return Search(model, depth, dictionary, mapped(dictionary, states[depth], public))


@pytest.mark.parametrize("depth", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_the_search_recovers_a_text_token_by_token(
    depth: int,
    model: CutModel,
    dictionary: Dictionary,
    text: dict[int, Tensor],
    sample: list[int],
    public_states: dict[int, Tensor],
    public: list[int],
) -> None:
    search = search_at(depth, model, dictionary, public_states, public)
    found = search.recover(known(model, sample[:KNOWN]), text[depth][KNOWN : KNOWN + SOUGHT])
    assert list(found.ids) == sample[KNOWN : KNOWN + SOUGHT]
    assert found.tries >= SOUGHT * FIRST_BATCH
    assert found.passes >= 2 * SOUGHT


@needs_bf16
@pytest.mark.slow
def test_the_search_recovers_what_a_node_computes_in_bfloat16(
    default_model_folder: Path, public: list[int], sample: list[int]
) -> None:
    model = load_cut(str(default_model_folder), dtype="bfloat16", device="cpu")
    dictionary = Dictionary(model.ends)
    states = model.read(public, range(1, len(public) + 1))
    seen = model.read(sample, range(1, len(sample) + 1))[2][KNOWN : KNOWN + 8]
    found = search_at(2, model, dictionary, states, public).recover(known(model, sample[:KNOWN]), seen)
    assert list(found.ids) == sample[KNOWN : KNOWN + 8]


def test_the_search_finds_nothing_in_random_states(
    model: CutModel, dictionary: Dictionary, sample: list[int], public_states: dict[int, Tensor], public: list[int]
) -> None:
    patience = FIRST_BATCH + BATCH_GROWTH * FIRST_BATCH + 7
    search = search_at(2, model, dictionary, public_states, public)
    found = search.recover(known(model, sample[:KNOWN]), noise(4, model), patience)
    assert found.ids == ()
    assert (found.tries, found.passes) == (patience, 4)  # three batches, and the pass that ranks


def test_the_search_finds_nothing_after_another_text(
    model: CutModel,
    dictionary: Dictionary,
    text: dict[int, Tensor],
    sample: list[int],
    public_states: dict[int, Tensor],
    public: list[int],
) -> None:
    search = search_at(2, model, dictionary, public_states, public)
    assert search.recover(known(model, public[:KNOWN]), text[2][KNOWN : KNOWN + 2], MAX_BATCH).ids == ()


def test_the_price_grows_with_depth_and_position_and_counts_the_weights_twice(model: CutModel) -> None:
    spec = model.spec
    assert try_flops(spec, 0, 100) == 0
    assert try_flops(spec, 4, 100) == 2 * try_flops(spec, 2, 100)
    assert try_flops(spec, 1, 200) > try_flops(spec, 1, 100) > 2 * max_layer_params(spec)
    assert ranking_flops(spec, 0, 0) > 2 * spec.num_layers * max_layer_params(spec)


# ---- the depths ----


@pytest.mark.parametrize("layers, kept", [(30, [0, 1, 2, 3, 4, 6, 8, 12]), (4, [0, 1, 2]), (1, [0])])
def test_depths_reach_half_of_the_model(layers: int, kept: list[int]) -> None:
    assert kept_layers(layers) == kept
