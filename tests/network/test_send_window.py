"""The SendWindow: little is on its way where a link is slow, enough where it is fast, and it is never stuck."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.network.parts import PART_BYTES
from penstock.network.send_window import MAX_BYTES, MIN_BYTES, PART_OVERHEAD_BYTES, START_BYTES, SendWindow, StreamPosition

MAX_WAIT_S = 0.3


@dataclass
class Run:
    seconds: float
    longest_queue: float  # bytes that waited for the link, once the window has had time to adapt
    widest: float  # the largest limit


def pour(total: int, rate: float, round_trip: float, size: int = PART_BYTES) -> Run:
    """Send parts over a simulated link that passes `rate` bytes a second, as fast as the window allows."""
    window, now, free_at, sent, longest, widest = SendWindow(MAX_WAIT_S), 0.0, 0.0, 0, 0.0, 0.0
    receipts: list[tuple[float, StreamPosition]] = []
    while sent < total or receipts:
        while sent < total and window.has_room(size):
            sent += size
            wanted = window.send(StreamPosition(1, sent), size, now)
            free_at = max(free_at, now) + size / rate
            if sent > total / 2:
                longest = max(longest, (free_at - now) * rate)
            if wanted:
                heapq.heappush(receipts, (free_at + round_trip, StreamPosition(1, sent)))
        if not receipts:
            break
        now, place = heapq.heappop(receipts)
        window.on_receipt(place, now)
        widest = max(widest, window.limit)
    return Run(now, longest, widest)


@pytest.mark.parametrize("mbits", [0.5, 1, 2, 5, 20])
@pytest.mark.parametrize("round_trip", [0.001, 0.05, 0.3])
def test_a_slow_link_is_kept_busy_with_a_short_queue(mbits: float, round_trip: float) -> None:
    rate = mbits * 125_000
    total = 100 * PART_BYTES
    run = pour(total, rate, round_trip)
    assert run.longest_queue <= 3 * PART_BYTES + (2 * MAX_WAIT_S + round_trip) * rate
    stop_and_wait = total / rate + total / PART_BYTES * round_trip
    assert run.seconds <= stop_and_wait + 1.0


@pytest.mark.parametrize("round_trip", [0.001, 0.01, 0.1, 0.6])
def test_a_fast_link_is_filled_as_far_as_the_largest_window_allows(round_trip: float) -> None:
    rate, total = 125_000_000.0, 256 << 20
    run = pour(total, rate, round_trip)
    assert total / run.seconds >= 0.4 * min(rate, MAX_BYTES / round_trip)
    assert run.widest == MAX_BYTES


@pytest.mark.parametrize("size", [10, 2000, PART_BYTES])
def test_messages_that_never_fill_the_window_do_not_widen_it(size: int) -> None:
    """They show nothing of what a link can take."""
    window = SendWindow(MAX_WAIT_S)
    receipts = 0
    for number in range(1000):
        assert window.has_room(size)
        if window.send(StreamPosition(number, size), size, float(number)):
            window.on_receipt(StreamPosition(number, size), number + 0.001)
            receipts += 1
    assert receipts
    assert window.limit == START_BYTES


def test_one_delay_reduces_the_window_once() -> None:
    window, now = SendWindow(MAX_WAIT_S), 0.0
    for number in range(20):  # as on a fast link
        while window.has_room(PART_BYTES):
            now += 0.0001
            window.send(StreamPosition(number, 0), PART_BYTES, now)
        window.on_receipt(StreamPosition(number, 0), now)
    for number in range(100, 110):
        window.send(StreamPosition(number, 0), PART_BYTES, now)
    before = window.limit
    for number in range(100, 110):
        window.on_receipt(StreamPosition(number, 0), now + 1.0)
    assert window.limit == before / 2


class AnyEvents(RuleBasedStateMachine):
    """Whatever is sent, whenever receipts come, and however many are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.now, self.number = SendWindow(MAX_WAIT_S), 0.0, 0
        self.due: list[StreamPosition] = []
        self.unconfirmed: dict[StreamPosition, int] = {}

    @rule(size=st.integers(0, PART_BYTES), times=st.integers(1, 60))
    def send(self, size: int, times: int) -> None:
        for _ in range(times):
            if not self.window.has_room(size):
                return
            self.number += 1
            place = StreamPosition(self.number, size)
            self.unconfirmed[place] = size + PART_OVERHEAD_BYTES
            if self.window.send(place, size, self.now):
                self.due.append(place)

    @rule(which=st.integers(0))
    def receive(self, which: int) -> None:
        if self.due:
            place = self.due[which % len(self.due)]  # earlier ones may be lost, or come later
            self.due.remove(place)
            self.window.on_receipt(place, self.now)
            self.unconfirmed = {sent: size for sent, size in self.unconfirmed.items() if sent > place}
            self.due = [sent for sent in self.due if sent > place] + [sent for sent in self.due if sent < place][:1]

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def give_up(self) -> None:
        self.window.give_up()
        self.unconfirmed.clear()
        self.due.clear()

    @invariant()
    def counts_what_is_on_its_way(self) -> None:
        assert self.window.in_flight == sum(self.unconfirmed.values())
        assert MIN_BYTES <= self.window.limit <= MAX_BYTES

    @invariant()
    def is_not_stuck(self) -> None:
        assert self.window.has_room(PART_BYTES) or any(place in self.unconfirmed for place in self.due)

    @invariant()
    def keeps_within_the_largest_window(self) -> None:
        assert self.window.in_flight <= MAX_BYTES + PART_BYTES


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
