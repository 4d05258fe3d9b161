"""run_in_thread: short work of a request, such as reading files, in threads that the keys share fairly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from penstock.doors.http.workers import Workers

THREADS = 8
THREADS_PER_OWNER = 2  # listing 100,000 files takes seconds: many such requests of one key must not take all threads

Result = TypeVar("Result")


class _Turn(NamedTuple):
    threads: Workers
    owner: str | None


_turn: ContextVar[_Turn | None] = ContextVar("turn", default=None)


class SharedThreads:
    """Used on the event loop only."""

    def __init__(self) -> None:
        self._threads = Workers(THREADS, THREADS_PER_OWNER, max_waiting=None, trims=False)

    def enter(self, owner: str | None) -> None:
        """From here on, `run_in_thread` in this task is for a request of this owner."""
        _turn.set(_Turn(self._threads, owner))


async def run_in_thread(make: Callable[[], Result], *, enabled: bool = True) -> Result:
    """Run `make` in another thread, so that it does not hold up other streams; in this one if not `enabled`.

    It may wait for other work of the same owner, but hardly ever for that of other owners."""
    if not enabled:
        return make()
    turn = _turn.get()
    if turn is None:
        return await asyncio.to_thread(make)
    async with turn.threads.worker(turn.owner) as worker:
        return await worker.run(make)
