"""When jobs of a key may begin: they wait for tokens of the minute, and none is refused for good or cut short."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.keys import KeyLimits
from penstock.doors.access.job_meter import MAX_RETRY_S, JobMeter
from penstock.errors import KeyLimit
from tests.clock import Clock

LIMIT = 1000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> JobMeter:
    limits = {"ada": KeyLimits(tokens_per_minute=LIMIT), "bob": KeyLimits(tokens_per_minute=LIMIT)}
    return JobMeter(lambda owner: limits.get(owner or "", KeyLimits()), clock)


def wait_of(meter: JobMeter, owner: str, tokens: int) -> int:
    with pytest.raises(KeyLimit) as refused:
        meter.admit(owner, tokens)
    return refused.value.retry_after


def test_a_job_waits_until_the_tokens_of_others_are_a_minute_old(meter: JobMeter, clock: Clock) -> None:
    first = meter.admit("ada", 700)
    first.count(600)
    assert wait_of(meter, "ada", 400) == 1, "how much of the rest will be used is unknown"
    first.close()
    meter.admit("ada", 400).close()
    waits = 0
    for _ in range(12):
        wait = wait_of(meter, "ada", 500)
        assert 1 <= wait <= MAX_RETRY_S, "the limit may be raised meanwhile"
        waits += wait
        clock.now += wait
    assert waits == 60
    clock.now += 0.2  # tokens count until the end of their tick
    meter.admit("ada", 500)


def test_a_job_larger_than_a_minutes_tokens_begins_alone_and_is_not_cut_short(meter: JobMeter, clock: Clock) -> None:
    small = meter.admit("ada", 10)
    assert wait_of(meter, "ada", 50 * LIMIT) == 1
    small.close()
    large = meter.admit("ada", 50 * LIMIT)
    for _ in range(5):
        large.count(LIMIT)
    large.close()
    clock.now += 59
    wait_of(meter, "ada", 10)  # what it has used counts
    clock.now += 2
    meter.admit("ada", 10)


def test_keys_do_not_wait_for_each_other_nor_the_operator_at_all(meter: JobMeter) -> None:
    meter.admit("ada", LIMIT)
    meter.admit("bob", LIMIT)
    for _ in range(3):
        meter.admit(None, 100 * LIMIT)
        meter.admit("without limits", 100 * LIMIT)


@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 1500), st.integers(0, 40)), min_size=1, max_size=30))
def test_whoever_waits_as_told_is_admitted_and_small_jobs_keep_to_the_limit(jobs: list[tuple[int, int, int]]) -> None:
    """Each may use less than it said, and takes a while."""
    clock = Clock()
    meter = JobMeter(lambda owner: KeyLimits(tokens_per_minute=LIMIT), clock)
    used: list[tuple[float, int]] = []
    for needed, wanted, seconds in jobs:
        for _ in range(20):
            try:
                ticket = meter.admit("ada", needed)
                break
            except KeyLimit as error:
                clock.now += error.retry_after
        else:
            pytest.fail("it was told to wait again and again")
        ticket.count(min(needed, wanted))
        used.append((clock.now, min(needed, wanted, LIMIT)))
        window = sum(count for at, count in used if clock.now - at < 59.9)
        assert window <= LIMIT or min(needed, wanted) > LIMIT
        clock.now += seconds
        ticket.close()


def test_many_threads_reserve_no_more_than_there_is(meter: JobMeter) -> None:
    admitted: list[object] = []

    def attempt() -> None:
        for _ in range(20):
            try:
                admitted.append(meter.admit("ada", 90))
            except KeyLimit:
                continue

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == LIMIT // 90
