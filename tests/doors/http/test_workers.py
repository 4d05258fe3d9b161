"""Threads are shared fairly between owners, whatever each of them sends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.doors.http.workers import Workers
from penstock.errors import QueueFull

PATIENCE = 20.0
STEPS = ["start", "end", "cancel", "end and cancel", "cancel and end"]


def scene(make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(make(), PATIENCE))


async def work(workers: Workers, owner: str, make: Callable[[], object]) -> None:
    async with workers.worker(owner) as worker:
        await worker.run(make)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_slow_work_of_one_owner_leaves_threads_to_another() -> None:
    async def run() -> None:
        workers, blocked = Workers(threads=3, per_owner=2), threading.Event()
        flood = [asyncio.create_task(work(workers, "a", blocked.wait)) for _ in range(10)]
        await settle()
        await work(workers, "b", lambda: None)
        assert not any(one.done() for one in flood)
        blocked.set()
        await asyncio.gather(*flood)

    scene(run)


def test_owners_that_wait_take_turns() -> None:
    async def run() -> None:
        workers, blocked, order = Workers(threads=1, per_owner=1), threading.Event(), list[str]()
        tasks = [asyncio.create_task(work(workers, "first", blocked.wait))]
        for owner in "aaabc":
            await settle()
            tasks.append(asyncio.create_task(work(workers, owner, lambda owner=owner: order.append(owner))))  # type: ignore[misc]
        await settle()
        blocked.set()
        await asyncio.gather(*tasks)
        assert "".join(order) == "abcaa"

    scene(run)


def test_a_request_keeps_its_place_between_its_steps() -> None:
    """What the first step has made would otherwise wait in memory for the second."""

    async def run() -> None:
        workers, begun = Workers(threads=1, per_owner=1), list[str]()
        async with workers.worker("a") as worker:
            await worker.run(lambda: None)
            other = asyncio.create_task(work(workers, "b", lambda: begun.append("b")))
            await settle()
            await worker.run(lambda: begun.append("a"))
        await other
        assert begun == ["a", "b"]

    scene(run)


def test_a_request_that_needs_no_thread_takes_none() -> None:
    async def run() -> None:
        workers, blocked, here = Workers(threads=1, per_owner=1), threading.Event(), threading.get_ident()
        busy = asyncio.create_task(work(workers, "a", blocked.wait))
        await settle()
        async with workers.worker("a") as worker:
            assert await worker.run(threading.get_ident, enabled=False) == here
        blocked.set()
        await busy

    scene(run)


def test_too_many_waiting_requests_of_one_owner_are_refused() -> None:
    async def run() -> None:
        workers, blocked = Workers(threads=2, per_owner=1, max_waiting=2), threading.Event()
        tasks = [asyncio.create_task(work(workers, "a", blocked.wait)) for _ in range(3)]
        await settle()
        with pytest.raises(QueueFull, match="2 large requests of this key"):
            await work(workers, "a", lambda: None)
        await work(workers, "b", lambda: None)
        blocked.set()
        await asyncio.gather(*tasks)
        await work(workers, "a", lambda: None)

    scene(run)


def test_an_aborted_request_gives_its_place_back_when_its_thread_is_done() -> None:
    async def run() -> None:
        workers, blocked = Workers(threads=1, per_owner=1), threading.Event()
        aborted = asyncio.create_task(work(workers, "a", blocked.wait))
        await settle()
        aborted.cancel()
        later = asyncio.create_task(work(workers, "b", lambda: None))
        await settle()
        assert aborted.done()
        assert not later.done(), "the thread is still at work"
        blocked.set()
        await later

    scene(run)


def test_a_thread_passes_a_request_that_was_cancelled_a_moment_ago() -> None:
    async def run() -> None:
        workers = Workers(threads=1, per_owner=1)
        await workers.take("a")
        cancelled, waiting = (asyncio.create_task(workers.take(owner)) for owner in "bc")
        await settle()
        cancelled.cancel()
        workers.release("a")
        await waiting
        assert cancelled.cancelled()
        workers.release("c")
        await workers.take("d")

    scene(run)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.sampled_from("abc")), max_size=60))
def test_no_thread_is_lost_or_given_twice(steps: list[tuple[str, int, str]]) -> None:
    async def run() -> None:
        workers = Workers(threads=3, per_owner=2, max_waiting=100)
        held: list[str] = []
        waiting: list[tuple[str, asyncio.Task[None]]] = []

        async def take(owner: str) -> None:
            await workers.take(owner)
            held.append(owner)

        async def check() -> None:
            await settle()
            waiting[:] = [(owner, task) for owner, task in waiting if not task.done()]
            assert len(held) <= 3
            assert all(held.count(owner) <= 2 for owner in "abc")
            idle = [owner for owner, _ in waiting if len(held) < 3 and held.count(owner) < 2]
            assert not idle, "an owner waits although a thread is free"

        for kind, at, owner in steps:
            for step in kind.split(" and "):  # of which the second does not know yet what came of the first
                if step == "start":
                    waiting.append((owner, asyncio.create_task(take(owner))))
                elif step == "end" and held:
                    workers.release(held.pop(at % len(held)))
                elif step == "cancel" and waiting:
                    waiting[at % len(waiting)][1].cancel()
            await check()
        while held:
            workers.release(held.pop())
            await check()
        assert not waiting

    scene(run)
