"""Layers are shared among the cards of a machine by the memory that these have."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.errors import NotEnoughMemory
from penstock.model.architecture.spec import spec_from_config
from penstock.model.backend import Backend
from penstock.pipes.loading import gpu_memory, model_manager
from penstock.pipes.loading.layer_shares import cut_ranges, share_layers
from penstock.pipes.loading.model_manager import FoundModel, ModelManager

GB = 10**9
CARDS = tuple(torch.device("cuda", index) for index in range(3))


@pytest.mark.parametrize(
    "rooms, sizes",
    [
        ([80, 80], [16, 16]),
        ([80, 40], [21, 11]),
        ([70, 80], [15, 17]),  # the ends are on the first
        ([80, 80, 80, 80], [8, 8, 8, 8]),
        ([80, 10, 80], [15, 2, 15]),
    ],
)
def test_each_card_gets_layers_by_its_room(rooms: list[int], sizes: list[int]) -> None:
    assert share_layers([1] * 32, rooms, kv_block=1) == sizes


def test_a_card_gets_a_layer_even_if_the_others_have_room() -> None:
    assert share_layers([1] * 3, [100, 100, 1], kv_block=1) == [1, 1, 1]


@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=9),
    st.lists(st.integers(-20, 500), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_no_other_cut_leaves_more_kv_on_the_poorest_card(weights: list[int], rooms: list[int], kv_block: int) -> None:
    def least(ends: tuple[int, ...]) -> float:
        ranges = list(pairwise((0, *ends, len(weights))))
        left = [room - sum(weights[a:b]) for room, (a, b) in zip(rooms, ranges, strict=True)]
        return min(left) if min(left) <= 0 else min(n / (kv_block * (b - a)) for n, (a, b) in zip(left, ranges, strict=True))

    sizes = share_layers(weights, rooms, kv_block)
    assert sum(sizes) == len(weights)
    assert min(sizes) > 0
    ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
    assert least(ends) == max(map(least, combinations(range(1, len(weights)), len(rooms) - 1)))


def test_ranges_are_cut_where_a_card_ends() -> None:
    ranges = [LayerRange(0, 4), LayerRange(4, 10), LayerRange(20, 22)]
    assert cut_ranges(ranges, [12]) == [ranges]
    assert cut_ranges(ranges, [4, 8]) == [[(0, 4)], [(4, 10), (20, 22)]]
    assert cut_ranges(ranges, [6, 6]) == [[(0, 4), (4, 6)], [(6, 10), (20, 22)]]


# ---- a model on several cards ----


SPEC = spec_from_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
)
ALL = [LayerRange(0, 32)]
MANAGER = ModelManager(EngineConfig(gpu_memory=1.0))


def on_cards(free: list[int], devices: tuple[torch.device, ...], patch: pytest.MonkeyPatch) -> FoundModel:
    """A model of 16 GB on cards with so many free bytes, all of which may be used."""
    for module, name in ((model_manager, "available_memory"), (gpu_memory, "total_memory")):
        patch.setattr(module, name, lambda device: free[device.index])
    return FoundModel("m", Path(), SPEC, torch.bfloat16, devices[0], devices=devices, backend=Backend(triton=True))


def test_the_first_card_has_the_ends_and_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cards([12 * GB] * 2, CARDS[:2], monkeypatch)
    first, second = MANAGER._deal(found, ALL, ends=True)
    assert (first.device, second.device) == CARDS[:2]
    assert first.size < second.size
    assert first.weights == first.size * found.layer_bytes(0) + found.end_bytes()
    assert second.weights == second.size * found.layer_bytes(0)
    assert [*first.ranges, *second.ranges] == [(0, first.size), (first.size, 32)]


def test_a_card_that_is_named_twice_has_two_ranges_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cards([80 * GB] * 2, (CARDS[0], CARDS[1], CARDS[0]), monkeypatch)
    first, second = MANAGER._deal(found, ALL, ends=True)
    assert (len(first.ranges), len(second.ranges)) == (2, 1)
    assert first.size + second.size == 32
    assert abs(first.size - second.size) <= 2
    assert found.place == "cuda:0,cuda:1"
    (alone,) = MANAGER._deal(on_cards([80 * GB], (CARDS[0],) * 2, monkeypatch), ALL, ends=True)
    assert alone.ranges == ((0, 16), (16, 32))


def test_each_card_has_kv_from_its_own_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [15 * GB, 20 * GB]
    found = on_cards(free, CARDS[:2], monkeypatch)
    parts, footprint = MANAGER._deal(found, ALL, ends=True), MANAGER.footprint(found)
    for part, blocks in zip(parts, MANAGER._kv_blocks(found, parts, None, None), strict=True):
        left = free[part.device.index] - part.weights - footprint.peak
        assert blocks == footprint.blocks_within(left, part.size) < footprint.max_blocks
    assert MANAGER._kv_blocks(found, parts, GB, None) == [GB // (footprint.kv_block * 32)] * 2
    assert MANAGER.kv_blocks(found, None, None, None) == min(MANAGER._kv_blocks(found, parts, None, None))


def test_the_card_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cards([9 * GB, 6 * GB], CARDS[:2], monkeypatch)
    with pytest.raises(NotEnoughMemory, match=r"layers 0:17 need .* free on cuda:0\."):
        MANAGER.kv_blocks(found, None, None, None)
    found = on_cards([30 * GB] * 2, CARDS[:2], monkeypatch)
    with pytest.raises(NotEnoughMemory, match=r"max_memory is .* on cuda:0, but the weights take"):
        MANAGER.kv_blocks(found, None, None, 10 * GB)


def test_a_card_without_room_for_a_layer_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = on_cards([30 * GB, GB, 30 * GB], CARDS, monkeypatch)
    assert [part.device for part in MANAGER._deal(found, ALL, ends=True)] == [CARDS[0], CARDS[2]]
    assert "cuda:1 has no room for a layer of m, and is not used" in caplog.text


def test_a_model_has_no_more_cards_than_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_cards([20 * GB] * 3, CARDS, monkeypatch)
    parts = MANAGER._deal(found, [LayerRange(4, 6)], ends=False)
    assert [(part.device, part.ranges) for part in parts] == [(CARDS[0], ((4, 5),)), (CARDS[1], ((5, 6),))]
