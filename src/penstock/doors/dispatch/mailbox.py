"""From the compute thread to the event loop: one wake-up carries whatever a step has produced for all streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from penstock.domain.updates import JobUpdate

NumberedUpdate = tuple[int, JobUpdate]


class Mailbox:
    """Made on the event loop. Waking the loop costs a system call and its attention; a step with 32 tokens does it once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[Updates, NumberedUpdate]] = deque()
        self._woken = False

    def open(self) -> Updates:
        return Updates(self._put)

    def _put(self, updates: Updates, update: NumberedUpdate) -> None:
        """On the compute thread."""
        self._arrived.append((updates, update))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first: what arrives from now on wakes the loop again, if only to find an empty box
        while self._arrived:
            updates, update = self._arrived.popleft()
            updates.add(update)


class Updates:
    """What arrived for one HTTP request and was not read yet, each with the number of the job that it is about."""

    def __init__(self, put: Callable[[Updates, NumberedUpdate], None]) -> None:
        self._put = put
        self._waiting: list[NumberedUpdate] = []
        self._reader: asyncio.Future[None] | None = None

    def sink(self, job: int) -> Callable[[JobUpdate], None]:
        """For `start_job`; it runs on the compute thread."""
        return lambda update: self._put(self, (job, update))

    def add(self, update: NumberedUpdate) -> None:
        self._waiting.append(update)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self, timeout: float | None = None) -> list[NumberedUpdate]:
        """All that is there, at least one; nothing after `timeout` seconds without news."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            alarm = None if timeout is None else loop.call_later(timeout, _resolve, self._reader)
            try:
                await self._reader
            finally:
                self._reader = None
                if alarm is not None:
                    alarm.cancel()
        found, self._waiting = self._waiting, []
        return found


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
