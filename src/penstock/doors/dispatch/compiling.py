"""CompileTurns: runs the translation of requests with grammars, one at a time for each key, until the client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

MAX_THREADS = 64  # each waits for the process of a grammar

Result = TypeVar("Result")


class CompileTurns:
    """Belongs to an event loop. Requests of a key wait for each other here, so that they take no threads from other keys."""

    def __init__(self) -> None:
        self._turns: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="penstock-grammar")

    async def run(self, make: Callable[[], Result], owner: str | None, request: Request, aborted: threading.Event) -> Result:
        """Run `make` in a thread. Sets `aborted` and raises ClientDisconnect if the client leaves before it is done."""
        work = asyncio.create_task(self._in_turn(make, owner))
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ClientDisconnect
        finally:
            leaving.cancel()
            if not work.done():  # the client has left, or the server stops
                aborted.set()
                work.cancel()

    async def _in_turn(self, make: Callable[[], Result], owner: str | None) -> Result:
        async with self._turns[owner]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)


async def _disconnected(request: Request) -> None:
    """Wait for the client to leave: its request was read, so no other message can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
