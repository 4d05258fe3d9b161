"""How many NetworkJobs to keep in flight: as many as make the answers faster, found by measuring, whatever is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.engine.routing.origin.window import LinearFit, Window
from penstock.simulate.node import Machine
from tests.engine.world import GREEDY, World


def measured(hops: float, nodes: dict[str, tuple[float, float]], sizes: tuple[int, ...] = (1, 2, 4, 8, 16) * 4) -> Window:
    """A window that has seen NetworkJobs of these sizes; a node takes `fixed + each * tokens` seconds."""
    window = Window()
    for tokens in sizes:
        services = {node: fixed + each * tokens for node, (fixed, each) in nodes.items()}
        window.observe(tokens, hops + sum(services.values()), services, decodes=True)
    return window


def settled(window: Window, decodes: int, chunk: int = 0, limit: int = 32) -> int:
    for _ in range(200):
        before = window.size
        window.aim(decodes, chunk, limit)
        assert abs(window.size - before) <= max(1, before), "it at most doubles"
    return window.size


# ---- the line ----


@given(a=st.floats(0, 1), b=st.floats(0, 0.1), sizes=st.lists(st.integers(1, 300), min_size=3, max_size=20, unique=True))
def test_a_line_is_found_again(a: float, b: float, sizes: list[int]) -> None:
    line = LinearFit()
    for tokens in sizes:
        line.observe(tokens, a + b * tokens)
    assert line.at(sizes[0]) == pytest.approx(a + b * sizes[0], rel=1e-3, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 1e9)), max_size=50), st.floats(0, 1e4))
def test_no_prediction_is_below_zero(seen: list[tuple[int, float]], tokens: float) -> None:
    line = LinearFit()
    for size, seconds in seen:
        line.observe(size, seconds)
    assert line.at(tokens) >= 0.0


# ---- the size ----


def test_one_answer_alone_needs_one_in_flight() -> None:
    assert settled(measured(0.1, {"a": (0.01, 0.0), "b": (0.01, 0.0)}), decodes=1) == 1


def test_decodes_are_not_split_where_a_pass_costs_the_same_however_few_it_carries() -> None:
    assert settled(measured(0.0, {"a": (0.02, 0.0), "b": (0.02, 0.0)}), decodes=16) <= 2


def test_two_equal_nodes_are_both_kept_busy_where_each_token_costs() -> None:
    assert settled(measured(0.0, {"a": (0.0, 0.01), "b": (0.0, 0.01)}), decodes=16) == 2


def test_long_hops_are_filled_with_more() -> None:
    near = settled(measured(0.0, {"a": (0.0, 0.01), "b": (0.0, 0.01)}), decodes=16)
    far = settled(measured(0.2, {"a": (0.0, 0.01), "b": (0.0, 0.01)}), decodes=16)
    assert far > near


def test_chunks_of_a_prompt_keep_the_slowest_node_busy() -> None:
    window = measured(0.0, {"a": (0.0, 0.001), "b": (0.0, 0.001), "c": (0.0, 0.001)})
    assert settled(window, decodes=0, chunk=64) == 3


def test_a_window_becomes_small_again_when_there_is_little_to_do() -> None:
    window = measured(0.2, {"a": (0.0, 0.01), "b": (0.0, 0.01)})
    assert settled(window, decodes=16) > 1
    assert settled(window, decodes=1) == 1


def test_queues_do_not_count_as_hops() -> None:
    """Counted in, they would make the window larger, which makes the queues longer."""
    window = measured(0.01, {"a": (0.01, 0.0)})
    for _ in range(30):
        window.observe(4, 3.0, {"a": 0.01}, decodes=True)
    assert window.hops == pytest.approx(0.01)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 1e9), st.floats(0, 1e9), st.booleans()), max_size=40),
    st.integers(0, 300),
    st.integers(0, 4096),
    st.integers(1, 64),
)
def test_the_size_stays_within_its_limits_whatever_was_measured(
    seen: list[tuple[int, float, float, bool]], decodes: int, chunk: int, limit: int
) -> None:
    window = Window()
    for tokens, elapsed, seconds, plain in seen:
        window.observe(tokens, elapsed, {"a": seconds, "b": seconds / 2}, decodes=plain)
    for _ in range(60):
        window.aim(decodes, chunk, limit)
        assert 1 <= window.size <= limit
    assert window.predicted(64) >= 0.0


# ---- over the network, on simulated time ----


def seconds_for(window: int | None) -> float:
    config = EngineConfig(block_size=4, chunk=16, policy="fcfs", window=window)
    cost = {"per_token": 0.01, "blocks": 200}
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 2),), **cost), Machine("c", ((2, 4),), **cost), config=config)  # type: ignore[arg-type]
    world.open_routes("a")
    started = world.now
    asked = [world.ask("a", [1 + i, 2, 3], replace(GREEDY, max_tokens=40)) for i in range(16)]
    world.run_until(lambda: all(one.final for one in asked), 600.0)
    took = world.now - started
    world.finish()
    return took


def test_two_nodes_that_work_at_the_same_time_are_faster_than_one_after_the_other() -> None:
    assert seconds_for(None) < 0.75 * seconds_for(1)
