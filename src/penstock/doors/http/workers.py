"""Workers: threads for work that would hold up the event loop, shared fairly between the keys that cause it."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

from penstock.errors import QueueFull

THREADS = 4  # more would only wait for each other, and each may hold a large request in memory
THREADS_PER_OWNER = 2
MAX_WAITING = 32  # requests of one key; each waits with its whole body in memory
OPERATOR_FACTOR = 8  # ... times this for the operator, which is every client if no key is required
RETRY_AFTER_S = 2
TRIM_DELAY_S = 1.0  # after the last work, when its requests have been answered and freed

Result = TypeVar("Result")


class Workers:
    """Used on the event loop only.

    An owner uses at most `per_owner` of the threads, and waiting owners take turns. So however many or slow the requests of one
    owner are, the others wait for at most one piece of work.

    max_waiting: requests of one owner that may wait; None for any number.
    trims: return freed memory to the system after the last work.
    """

    def __init__(
        self,
        threads: int = THREADS,
        per_owner: int = THREADS_PER_OWNER,
        max_waiting: int | None = MAX_WAITING,
        *,
        trims: bool = True,
    ) -> None:
        self._threads = threads
        self._per_owner = per_owner
        self._max_waiting = max_waiting
        self._trims = trims
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="worker")
        self._busy = Counter[str | None]()
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}  # the owner whose turn is next first
        self._trim_scheduled = False

    def worker(self, owner: str | None) -> Worker:
        """A worker for one request of an owner, to use in an `async with` block."""
        return Worker(self, self._executor, owner)

    async def take(self, owner: str | None) -> None:
        """Wait for a thread. Raises QueueFull if too many requests of this owner wait already."""
        if self._is_free(owner):
            self._busy[owner] += 1
            return
        line = self._waiting.setdefault(owner, deque())
        if self._max_waiting is not None and len(line) >= self._max_waiting * (OPERATOR_FACTOR if owner is None else 1):
            raise QueueFull(
                f"{len(line)} large requests of this key are waiting already.",
                retry_after=RETRY_AFTER_S,
                hint="Send fewer at once.",
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(owner, turn)
            else:
                self.release(owner)  # it got a thread just before
            raise

    def release(self, owner: str | None) -> None:
        self._busy[owner] -= 1
        if not self._busy[owner]:
            del self._busy[owner]
        for waiting in list(self._waiting):
            if self._is_free(waiting) and (turn := self._next_turn(waiting)) is not None:
                self._busy[waiting] += 1
                turn.set_result(None)
                return
        if self._trims and not self._busy and not self._trim_scheduled:
            self._trim_scheduled = True
            asyncio.get_running_loop().call_later(TRIM_DELAY_S, self._trim)

    def _next_turn(self, owner: str | None) -> asyncio.Future[None] | None:
        """Take the first turn of an owner that was not cancelled a moment ago. What is left stands behind the other owners."""
        line = self._waiting.pop(owner)
        while line:
            turn = line.popleft()
            if not turn.done():
                if line:
                    self._waiting[owner] = line
                return turn
        return None

    def _is_free(self, owner: str | None) -> bool:
        return self._busy.total() < self._threads and self._busy[owner] < self._per_owner

    def _leave(self, owner: str | None, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(owner, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[owner]

    def _trim(self) -> None:
        self._trim_scheduled = False
        if not self._busy:
            with suppress(RuntimeError):  # the interpreter is exiting
                self._executor.submit(return_free_memory)


class Worker:
    """Runs the steps of one request in threads. Takes a thread for the first step that needs one, and keeps its slot until the
    end of the block: otherwise the result of one step would sit in memory until the next step gets a thread."""

    def __init__(self, workers: Workers, executor: ThreadPoolExecutor, owner: str | None) -> None:
        self._workers = workers
        self._executor = executor
        self._owner = owner
        self._running: Future[object] | None = None
        self._holds = False

    async def __aenter__(self) -> Self:
        return self

    async def run(self, make: Callable[[], Result], *, enabled: bool = True) -> Result:
        """Run `make` in a thread; in this one if not `enabled`."""
        if not enabled:
            return make()
        if not self._holds:
            await self._workers.take(self._owner)
            self._holds = True
        running = self._executor.submit(make)
        self._running = running  # type: ignore[assignment]
        return await asyncio.wrap_future(running)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._holds:
            return
        self._holds = False
        if self._running is None or self._running.done():
            self._workers.release(self._owner)
            return
        loop = asyncio.get_running_loop()  # the request was aborted, but its thread is not done

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(self._workers.release, self._owner)

        self._running.add_done_callback(release)


def return_free_memory() -> None:
    """Return freed memory to the system: glibc keeps what a flood of small objects has used."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none, and keep less
        if trim is not None:
            trim(0)
