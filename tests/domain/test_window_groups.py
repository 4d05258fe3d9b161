"""Groups of layers by their windows: which layers share blocks, and how much memory a range of layers needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.topology import LayerRange
from penstock.domain.window_groups import MAX_GROUPS, group_layers

CONTEXT = 32_768


def every(count: int, layers: int, window: int = 512) -> tuple[int | None, ...]:
    """Every `count`-th layer sees all of a text."""
    return tuple(None if (layer + 1) % count == 0 else window for layer in range(layers))


@pytest.mark.parametrize("window", [None, 4096, CONTEXT])
def test_layers_that_see_equally_far_are_one_group(window: int | None) -> None:
    groups = group_layers((window,) * 28, CONTEXT)
    assert groups.windows == (4096 if window == 4096 else None,)
    assert groups.of_layers == (0,) * 28
    assert groups.parts_within(LayerRange(3, 9), 100) == 100


@pytest.mark.parametrize(
    "layers, groups, size",
    [(26, 7, 4), (34, 7, 5), (48, 6, 8), (62, 6, 11)],  # Gemma 3 1B, 4B, 12B, 27B
)
def test_gemma_3_has_groups_about_as_large_as_its_layers_without_a_window(layers: int, groups: int, size: int) -> None:
    found = group_layers(every(6, layers), CONTEXT)
    assert (found.count, found.windows.count(None)) == (groups, 1)
    assert max(found.places(LayerRange(0, layers))) + 1 == size


def test_alternating_layers_are_two_groups() -> None:
    assert group_layers(every(2, 24, 128), CONTEXT).windows == (128, None)


def test_there_are_few_groups_even_if_one_layer_is_alone() -> None:
    groups = group_layers((None, *[512] * 60), CONTEXT)
    assert groups.count <= MAX_GROUPS
    assert groups.windows.count(None) == 1


def test_a_part_of_the_layers_has_the_groups_of_all() -> None:
    groups = group_layers(every(6, 48), CONTEXT)
    assert groups.places(LayerRange(0, 6)) == [0] * 6
    assert groups.parts_within(LayerRange(0, 6), 100) == 600
    assert groups.parts_within(LayerRange(5, 17), 100) == 600
    assert groups.parts_within(LayerRange(5, 6), 100) == 100, "it may hold the whole of a long text"


@given(windows=st.lists(st.sampled_from([None, 8, 64, 10**6]), min_size=1, max_size=40), data=st.data())
def test_layers_at_one_place_are_of_different_groups_and_no_memory_is_taken_twice(
    windows: list[int | None], data: st.DataObject
) -> None:
    groups = group_layers(tuple(windows), 1000)
    for window, group in zip(windows, groups.of_layers, strict=True):
        assert groups.windows[group] == (None if window == 10**6 else window)
    start = data.draw(st.integers(0, len(windows) - 1))
    layers = LayerRange(start, data.draw(st.integers(start + 1, len(windows))))
    places = groups.places(layers)
    assert len({(place, groups.of_layers[layer]) for place, layer in zip(places, layers.layers(), strict=True)}) == layers.size
    parts = groups.parts_within(layers, 50)
    assert parts * (1 + max(places)) <= 50 * layers.size, "within the memory of its layers"


def test_a_table_of_whole_blocks_has_a_part_of_each_for_every_group() -> None:
    assert group_layers(every(2, 4), CONTEXT).table_of([3, 1]) == [5, 6, 1, 2]
