"""CompileTurns: translates requests with grammars, one at a time for each key, and stops if the client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from penstock.errors import KeyLimit

MAX_THREADS = 64  # each only waits for a grammar process
WASTED_PAUSE_S = 1.0  # pause a key after its limits refused a request whose grammar had already been compiled

Result = TypeVar("Result")


class CompileTurns:
    """Belongs to an event loop. Requests of one key wait for each other here, before they take a thread."""

    def __init__(self) -> None:
        self._turns: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="penstock-grammar")
        self._wasted: dict[str | None, KeyLimit] = {}  # by paused owner: the error to refuse it with

    def record_wasted(self, owner: str | None, refusal: KeyLimit) -> None:
        """Refuse the requests of a key for a moment, since the last one was refused after its grammar had been compiled."""
        if owner not in self._wasted:
            asyncio.get_running_loop().call_later(WASTED_PAUSE_S, self._wasted.pop, owner)
        self._wasted[owner] = refusal

    async def run(self, make: Callable[[], Result], owner: str | None, request: Request, aborted: threading.Event) -> Result:
        """Run `make` in a thread. Sets `aborted` and raises ClientDisconnect if the client leaves before it is done. Raises
        KeyLimit while the key is paused."""
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
            if refusal := self._wasted.get(owner):
                raise KeyLimit(refusal.message, retry_after=refusal.retry_after, hint=refusal.hint)
            return await asyncio.get_running_loop().run_in_executor(self._threads, make)


async def _disconnected(request: Request) -> None:
    """Wait for the client to leave: its request was read, so no other message can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
