"""What has arrived on a leg, what has left it, and what is missing, whatever the order in which it happens."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.messages import MAX_LISTED
from penstock.engine.routing.host.leg_log import MAX_REMEMBERED, REORDER_TIMEOUT_S, LegLog
from tests.clock import Clock

numbers = st.integers(0, 40)
events = st.lists(st.tuples(st.sampled_from(["arrived", "marked", "left", "settle"]), numbers, st.floats(0, 0.02)), max_size=60)


@given(events)
def test_every_number_up_to_the_newest_is_here_or_gone_or_missing(history: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    log = LegLog(3, clock)
    arrived, left, newest, settled = set[int](), set[int](), -1, -1
    for what, number, later in history:
        clock.now += later
        if what == "left" and number not in arrived:
            continue
        getattr(log, what)(number)
        if what == "arrived" and (number > newest or (number not in arrived and number > settled)):
            arrived.add(number)
        if what in ("arrived", "marked"):
            newest = max(newest, number)
        if what == "left":
            left.add(number)
        if what == "settle":
            settled = max(settled, min(number, newest))
            left |= {one for one in arrived if one <= number}
    clock.now += 2 * REORDER_TIMEOUT_S
    report = log.report(7)
    assert (report.layer, report.newest, report.received) == (3, newest, 7)
    assert set(report.here) == arrived - left
    assert set(report.missing) == set(range(settled + 1, newest + 1)) - arrived


def test_what_was_overtaken_a_moment_ago_is_not_missing_yet() -> None:
    clock = Clock()
    log = LegLog(0, clock)
    log.arrived(0)
    log.arrived(2)
    assert log.missing() == ()
    clock.now += 2 * REORDER_TIMEOUT_S
    assert log.missing() == (1,)
    log.arrived(1)
    assert log.missing() == ()
    assert log.report(0).here == (0, 1, 2)


def test_a_number_far_ahead_costs_no_memory() -> None:
    log = LegLog(0, Clock())
    for number in (5, 1 << 40, 1 << 47):
        log.marked(number)
        log.arrived(number - 1)
    assert len(log._missing) <= MAX_REMEMBERED + 1
    assert len(log.report(0).missing) <= MAX_LISTED


def test_it_is_written_and_read_by_several_threads() -> None:
    log = LegLog(0, Clock())

    def arrive() -> None:
        for number in range(3000):
            log.arrived(number)

    def leave() -> None:
        for number in range(3000):
            while number not in log.report(0).here and number > log.report(0).newest:
                pass
            log.left(number)

    threads = [threading.Thread(target=arrive), threading.Thread(target=leave)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.report(0).newest == 2999
    assert log.missing() == ()
