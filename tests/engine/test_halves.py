"""Failed passes are repeated in halves: only items that fail alone are lost; all others are computed, in order."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.run_in_halves import all_finite, run_in_halves, to_compute_error
from penstock.errors import ComputeFailed, PromptTooLong


def pass_over(sizes: list[int], bad: set[int], limit: int, calls: list[tuple[int, int]]) -> Callable[[int, int], list[int]]:
    """A pass that fails if it has a bad item, or if its items' total size exceeds `limit`."""

    def run(start: int, end: int) -> list[int]:
        calls.append((start, end))
        if bad & set(range(start, end)) or sum(sizes[start:end]) > limit:
            raise RuntimeError(f"cannot do {start} to {end}")
        return list(range(start, end))

    return run


@given(sizes=st.lists(st.integers(1, 9), max_size=20), bad=st.sets(st.integers(0, 19)), limit=st.integers(0, 60))
def test_everything_that_can_be_computed_alone_is_computed_in_order(sizes: list[int], bad: set[int], limit: int) -> None:
    calls: list[tuple[int, int]] = []
    result = run_in_halves(len(sizes), pass_over(sizes, bad, limit, calls))
    hopeless = {number for number, size in enumerate(sizes) if number in bad or size > limit}
    assert set(result.errors) == hopeless
    assert [number for output in result.outputs for number in output] == sorted(set(range(len(sizes))) - hopeless)
    assert len(calls) <= max(0, 2 * len(sizes) - 1)
    assert bool(result.trace) == (len(calls) > 1 or bool(hopeless))


@pytest.mark.parametrize("count", [2, 16, 64])
def test_one_bad_item_costs_two_more_passes_for_each_halving(count: int) -> None:
    calls: list[tuple[int, int]] = []
    result = run_in_halves(count, pass_over([1] * count, {count // 3}, count, calls))
    assert set(result.errors) == {count // 3}
    assert len(calls) == 2 * count.bit_length() - 1


def test_the_trace_is_of_the_first_error_and_each_item_has_its_own() -> None:
    result = run_in_halves(2, pass_over([1, 1], {0, 1}, 9, []))
    assert "cannot do 0 to 2" in result.trace
    assert "Traceback" in result.trace
    assert {number: error.message for number, error in result.errors.items()} == {
        0: "The computation failed: RuntimeError: cannot do 0 to 1.",
        1: "The computation failed: RuntimeError: cannot do 1 to 2.",
    }


def test_an_error_of_ours_is_reported_as_it_is() -> None:
    ours = PromptTooLong("too long")
    assert to_compute_error(ours) is ours
    assert isinstance(to_compute_error(ValueError("odd")), ComputeFailed)


class Activation:
    """Stands for the memory of a pass."""


@pytest.mark.parametrize("kind", [RuntimeError, PromptTooLong])
def test_what_a_failed_pass_had_in_memory_is_gone_before_it_is_repeated(kind: type[Exception]) -> None:
    activations: list[weakref.ref[Activation]] = []
    still_held: list[int] = []

    def run(start: int, end: int) -> None:
        still_held.append(sum(ref() is not None for ref in activations))
        activation = Activation()
        activations.append(weakref.ref(activation))
        raise kind("no memory")

    gc.disable()  # no reference cycles that only the collector would free
    try:
        run_in_halves(4, run)
    finally:
        gc.enable()
    assert still_held == [0] * 7


@pytest.mark.parametrize("error,freed", [(torch.OutOfMemoryError("CUDA out of memory"), True), (RuntimeError("else"), False)])
def test_memory_that_torch_keeps_is_freed_before_a_pass_that_ran_out_of_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch, error: Exception, freed: bool
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("freed"))

    def run(start: int, end: int) -> None:
        events.append("run")
        if end - start > 1:
            raise error

    run_in_halves(2, run)
    assert events == (["run", "freed", "run", "run"] if freed else ["run", "run", "run"])


@pytest.mark.parametrize(
    "numbers,finite",
    [
        ([], True),
        ([0.0, -1.5], True),
        ([3e38, 3e38, -3e38], True),
        ([1.0, math.nan], False),
        ([math.inf, 1.0], False),
        ([math.inf, -math.inf], False),
    ],
)
def test_one_number_that_is_not_finite_is_seen_among_others(numbers: list[float], finite: bool) -> None:
    assert all_finite(torch.tensor([numbers])) is finite


def test_a_gpu_without_memory_names_the_setting() -> None:
    output = to_compute_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))
    assert output.message == "The GPU ran out of memory."
    assert "--gpu-memory" in output.hint
