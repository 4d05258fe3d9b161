"""How long messages are on a link, measured with two clocks that differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.network.link_meter import WINDOW_S, LinkMeter

sends = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), min_size=1, max_size=30)


@given(sends, st.floats(-1e6, 1e6), st.floats(0, 0.5))
def test_a_queue_on_the_link_is_not_taken_for_transfer(
    messages: list[tuple[float, float]], offset: float, latency: float
) -> None:
    """Messages are handed over at any time, and the link carries one after the other."""
    meter, now, free = LinkMeter(), 0.0, 0.0
    meter.observe(0.0, latency + offset)  # one without a size, such as a Mark
    for pause, seconds in messages:
        now += pause
        free = max(now, free) + seconds
        if free < WINDOW_S:  # afterwards, the quickest may be another
            assert meter.observe(now, free + latency + offset) == pytest.approx(seconds, abs=1e-3)


def test_a_clock_that_jumps_is_followed() -> None:
    meter = LinkMeter()
    meter.observe(100.0, 1.0)
    later = 1.0 + 3 * WINDOW_S
    for step in range(5):  # the sender's clock has jumped back by an hour
        meter.observe(100.0 - 3600 + step * WINDOW_S, later + step * WINDOW_S)
    assert meter.observe(0.0, later + 5 * WINDOW_S) < 3600
    assert meter.observe(0.5 + 0.0, later + 5 * WINDOW_S + 0.6) == pytest.approx(0.1, abs=0.02)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=20))
def test_nothing_that_a_sender_claims_gives_less_than_nothing(claims: list[tuple[float, float]]) -> None:
    meter = LinkMeter()
    assert all(meter.observe(sent, arrived) >= 0.0 for sent, arrived in sorted(claims, key=lambda claim: claim[1]))
