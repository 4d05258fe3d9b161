"""Refusals of a client that asks without a pause are answered at a steady pace, and those of others at once."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from penstock.doors.access.gate import Gate
from penstock.doors.access.keys import Keys
from penstock.doors.access.refusal_pace import BURST, MAX_CLIENTS, MAX_DELAY_S, PER_SECOND, RefusalPace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_refusals_are_sent_at_once_and_later_ones_at_a_steady_pace() -> None:
    clock = Clock()
    pace = RefusalPace(clock)
    assert [pace.delay("key a") for _ in range(BURST + 1)] == [0.0] * (BURST + 1)
    assert abs(pace.delay("key a") - 1 / PER_SECOND) < 1e-9
    assert abs(pace.delay("key a") - 2 / PER_SECOND) < 1e-9
    assert pace.delay("key b") == 0.0
    clock.now += 1000
    assert [pace.delay("key a") for _ in range(BURST)] == [0.0] * BURST


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=300))
def test_a_client_that_waits_for_its_answers_is_refused_at_most_so_often(pauses: list[float]) -> None:
    clock = Clock()
    pace, began = RefusalPace(clock), clock.now
    for number, pause in enumerate(pauses, 1):
        clock.now += pause
        clock.now += pace.delay("key a")
        assert number <= BURST + 1 + PER_SECOND * (clock.now - began) + 1e-6


def test_no_refusal_waits_long_however_many_there_are() -> None:
    pace = RefusalPace(Clock())
    assert max(pace.delay("key a") for _ in range(1000)) == MAX_DELAY_S


def test_only_so_many_clients_are_remembered() -> None:
    pace = RefusalPace(Clock())
    for number in range(BURST + 10):
        pace.delay("key a")
        assert number <= BURST or pace.delay("key a") > 0
    for number in range(MAX_CLIENTS):
        pace.delay(f"address {number}")
    assert pace.delay("key a") == 0.0


def test_the_gate_paces_refusals_by_key_and_nothing_else() -> None:
    slept: list[float] = []
    statuses = iter([429] * (BURST + 2) + [200, 400, 429])

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": next(statuses)})

    async def main() -> None:
        gate = Gate(answer, Keys(None, None), None, (), 1000, {}, _refuse, set(), RefusalPace(Clock()))
        for client in ["a"] * (BURST + 4) + ["b"]:
            scope = {"type": "http", "path": "/v1/x", "headers": [], "state": {"log": {}}, "client": (client, 1)}
            await gate(scope, _never, _ignore)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    with patch("asyncio.sleep", sleep):
        asyncio.run(main())
    assert [pause > 0 for pause in slept] == [False] * (BURST + 1) + [True, False]


async def _never(*_: Any) -> Any:
    raise AssertionError


async def _refuse(scope: Any, send: Any, error: Exception) -> None:
    raise error


async def _ignore(message: Any) -> None:
    pass
