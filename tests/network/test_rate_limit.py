"""RateLimit: a burst, then a rate, for each sender on its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.network import rate_limit
from penstock.network.rate_limit import RateLimit
from tests.clock import Clock


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 3)), max_size=200))
def test_no_sender_gets_more_than_its_burst_and_rate_nor_less_than_the_rate(sent: list[tuple[str, float]]) -> None:
    clock = Clock()
    limit = RateLimit(2.0, 5, clock)
    allowed: dict[str, list[float]] = {"a": [], "b": []}
    last: dict[str, float] = {}
    for sender, later in sent:
        clock.now += later
        if limit.allows(sender):
            allowed[sender].append(clock.now)
        else:
            assert clock.now - last[sender] < 0.5, "one that is slower than the rate is never refused"
        last[sender] = clock.now
    for times in allowed.values():
        for first in range(len(times)):
            for end in range(first, len(times)):
                assert end - first + 1 <= 2 * 5 + 2.0 * (times[end] - times[first]), (
                    "a burst, and another if it was silent before"
                )


def test_one_sender_takes_nothing_of_another() -> None:
    limit = RateLimit(1.0, 3, Clock())
    assert [limit.allows("a") for _ in range(5)] == [True, True, True, False, False]
    assert limit.allows("b")


def test_made_up_names_fill_no_memory() -> None:
    limit = RateLimit(1.0, 3, Clock())
    for number in range(2 * rate_limit.MAX_SENDERS):
        limit.allows(f"n{number}")
    assert len(limit._tokens) <= len(limit._filled) <= rate_limit.MAX_SENDERS
