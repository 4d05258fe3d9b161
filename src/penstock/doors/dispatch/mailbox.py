"""Mailbox: hands updates from the compute thread to the event loop, with one wake-up for all streams of a step."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from penstock.domain.updates import JobUpdate

NumberedUpdate = tuple[int, JobUpdate]


class Mailbox:
    """Create it on the event loop. Waking the loop costs a system call, so a step with 32 tokens wakes it once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[Updates, NumberedUpdate]] = deque()
        self._woken = False

    def open(self) -> Updates:
        return Updates(self._put)

    def _put(self, updates: Updates, update: NumberedUpdate) -> None:
        """Runs on the compute thread."""
        self._arrived.append((updates, update))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first, so that an update that arrives now wakes the loop again
        while self._arrived:
            updates, update = self._arrived.popleft()
            updates.add(update)


class Updates:
    """The unread updates of one HTTP request, each with the number of its job."""

    def __init__(self, put: Callable[[Updates, NumberedUpdate], None]) -> None:
        self._put = put
        self._waiting: list[NumberedUpdate] = []
        self._reader: asyncio.Future[None] | None = None

    def sink(self, job: int) -> Callable[[JobUpdate], None]:
        """Make the sink of a job. It is called on the compute thread."""
        return lambda update: self._put(self, (job, update))

    def add(self, update: NumberedUpdate) -> None:
        self._waiting.append(update)
        self.wake()

    def wake(self) -> None:
        """Let a waiting `read` return, even if there are no updates."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> list[NumberedUpdate]:
        """Wait for at least one update and return all; an empty list after `wake`."""
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        found, self._waiting = self._waiting, []
        return found
