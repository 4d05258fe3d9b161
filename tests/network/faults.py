"""A bad network: a Router that loses, repeats, delays, swaps and damages what it is told to send."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from random import Random

from penstock.errors import Unreachable
from penstock.network.router import OnChange, OnMessage, Router, join
from penstock.network.stream import Stream

Lane = tuple[str, Stream]  # a node, and a stream to it: order is kept within it

log = logging.getLogger(__name__)


class FaultyRouter:
    """Harms outgoing messages, never records. `drop`, `duplicate`, `delay`, `reorder` and `corrupt` are probabilities, and may
    be changed at any time; several may hit one message. What happens to the nth message of a stream for a node follows from
    `seed` alone.

    A delayed message holds up those of its stream, a reordered one is overtaken by them; both for a time within `hold` (seconds).
    `counts` has what was done: sent, dropped, duplicated, delayed, reordered, corrupted, unreachable (found out too late to
    raise it).
    """

    def __init__(
        self,
        router: Router,
        seed: int,
        *,
        drop: float = 0.0,
        duplicate: float = 0.0,
        delay: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        hold: tuple[float, float] = (0.001, 0.05),
    ) -> None:
        self._router, self._seed, self._hold = router, seed, hold
        self.drop, self.duplicate, self.delay, self.reorder, self.corrupt = drop, duplicate, delay, reorder, corrupt
        self.counts: Counter[str] = Counter()
        self._dice: dict[Lane, Random] = {}
        self._due: dict[Lane, float] = {}  # when the last message in order leaves
        self._later: list[tuple[float, int, Lane, bytes]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._sending: Lane | None = None  # on which the timer thread sends right now
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"faults of {router.node_id}", daemon=True)
        self._thread.start()

    @property
    def node_id(self) -> str:
        return self._router.node_id

    @property
    def seals(self) -> bool:
        return self._router.seals

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        self._router.start(on_message, on_change)

    def publish(self, record: bytes) -> None:
        self._router.publish(record)

    def records(self) -> Mapping[str, bytes]:
        return self._router.records()

    def refused(self) -> Mapping[str, int]:
        return self._router.refused()

    def heal(self) -> None:
        """From now on nothing is harmed; what was delayed still comes late."""
        self.drop = self.duplicate = self.delay = self.reorder = self.corrupt = 0.0

    def send(self, node: str, data: bytes, stream: Stream = Stream.DATA) -> None:
        with self._changed:
            at_once = self._decide((node, stream), data)
        for harmed in at_once:
            self._router.send(node, harmed, stream)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        join(self._thread)
        self._router.close()

    def _decide(self, lane: Lane, data: bytes) -> list[bytes]:
        """What is to be sent right away; the rest is left to the timer."""
        dice = self._dice.setdefault(lane, Random(f"{self._seed}/{self.node_id}/{lane[0]}/{lane[1].name}"))
        # All dice are thrown for every message, so that one probability does not change what another hits.
        drop, duplicate, delay, reorder, corrupt = (dice.random() for _ in range(5))
        hold, flips = dice.uniform(*self._hold), [(dice.random(), dice.randrange(1, 256)) for _ in range(dice.randint(1, 4))]
        if drop < self.drop:
            self.counts["dropped"] += 1
            return []
        if corrupt < self.corrupt and data:
            self.counts["corrupted"] += 1
            data = _flipped(data, flips)
        copies = [data]
        if duplicate < self.duplicate:
            self.counts["duplicated"] += 1
            copies.append(data)
        self.counts["sent"] += len(copies)
        now = time.monotonic()
        if reorder < self.reorder:
            self.counts["reordered"] += 1
            return self._put_off(now + hold, lane, copies)
        due = max(now, self._due.get(lane, 0.0))
        if delay < self.delay:
            self.counts["delayed"] += 1
            due = max(due, now + hold)
        if due == now and self._sending != lane and not any(waiting[2] == lane for waiting in self._later):
            return copies
        self._due[lane] = due
        return self._put_off(due, lane, copies)

    def _put_off(self, due: float, lane: Lane, copies: list[bytes]) -> list[bytes]:
        for data in copies:
            heapq.heappush(self._later, (due, next(self._order), lane, data))
        self._changed.notify()
        return []

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = None
                while not self._closed and (not self._later or self._later[0][0] > time.monotonic()):
                    self._changed.wait(self._later[0][0] - time.monotonic() if self._later else None)
                if self._closed:
                    return
                _, _, lane, data = heapq.heappop(self._later)
                self._sending = lane
            try:
                self._router.send(lane[0], data, lane[1])
            except Unreachable:
                with self._changed:
                    self.counts["unreachable"] += 1
            except Exception:
                log.exception("a delayed message could not be sent to %s", lane[0])


def _flipped(data: bytes, flips: list[tuple[float, int]]) -> bytes:
    """Each flip is a place, as a share of the length, and what its byte is changed by."""
    harmed = bytearray(data)
    for place, change in flips:
        harmed[int(place * len(data))] ^= change
    if harmed == data:  # two flips at one place may undo each other
        harmed[0] ^= 1
    return bytes(harmed)
