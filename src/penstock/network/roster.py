"""The Roster: who is live, in which life, and the newest record of each; folded from what the network tells, in any order."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

MOST_SIGNS = 4096  # of life, that nobody has stood up for: an insider can make up as many as it likes
FIRST_RETRY, LONGEST_RETRY = 0.05, 30.0  # seconds until a life that has not answered is asked again: twice as long each time
REPEAT = 1.0  # seconds until a record is sent again that nobody gave a receipt for
SILENCE, INSIST = 10.0, 5.0  # seconds after which a life is asked whether it still is there, and asked again
DOUBT = 4  # questions without an answer: a busy process may hang for half a minute


class Issue(NamedTuple):
    """Places a record in time: a later life of its node, or a later record of the same life, is greater."""

    epoch: int
    counter: int


@dataclass(slots=True)
class _PeerSession:
    proven: bool = False  # it has said something that only it can have said
    heard: float = 0.0
    asked: float = -math.inf
    questions: int = 0  # since it was last heard
    counter: int = 0  # of its newest record; 0 while it has none
    record: bytes | None = None
    receipt: bool = False  # whether it waits to hear that we have that record
    told: int = 0  # the counter of the newest of our records that it has
    sent: tuple[int, float] = (0, -math.inf)  # the counter of the one that was sent to it last, and when

    @property
    def next_question(self) -> float:
        if self.proven:
            return max(self.heard + SILENCE, self.asked + INSIST)
        return self.asked + min(FIRST_RETRY * 2.0 ** min(self.questions, 10), LONGEST_RETRY)


class Roster:
    """A sign of life is a hint to ask, and its end is the end of that life. A life counts once it has proved itself, which nobody
    can do in another's name: so signs that somebody makes up hide nothing. A node that crashed and came back may be seen twice
    for a while: its life with the larger epoch counts.

    Records of lives without a sign are not kept: whoever hears of a new life must ask for its record. And since a sign may also
    be kept up by somebody else when its node has died, lives that are silent are asked again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: dict[tuple[str, int], _PeerSession] = {}
        self._newest: Mapping[str, int] = {}  # node -> the epoch that counts
        self._snapshot: Mapping[str, bytes] = MappingProxyType({})

    def records(self) -> Mapping[str, bytes]:
        return self._snapshot

    def nodes(self) -> Collection[str]:
        """All that are live, with a record or without one."""
        return self._newest.keys()

    def is_live(self, node: str) -> bool:
        return node in self._newest

    def life(self, node: str) -> int | None:
        """The epoch of its life that counts."""
        return self._newest.get(node)

    # ---- what is heard ----

    def appeared(self, node: str, epoch: int) -> None:
        with self._lock:
            if (node, epoch) in self._lives:
                return
            if len(self._lives) >= MOST_SIGNS:
                unproven = next((key for key, life in self._lives.items() if not life.proven), None)
                if unproven is None:
                    return
                del self._lives[unproven]
            self._lives[node, epoch] = _PeerSession()

    def vanished(self, node: str, epoch: int) -> None:
        with self._lock:
            if self._lives.pop((node, epoch), None) is not None:
                self._take_snapshot()

    def heard(self, node: str, issue: Issue, record: bytes | None, now: float = 0.0) -> bool:
        """A life has proved itself, and this is its record (none yet, when the counter is 0). Whether that is news."""
        with self._lock:
            life = self._lives.get((node, issue.epoch))
            if life is None:
                return False
            news = not life.proven
            life.proven, life.heard, life.questions, life.receipt = True, now, 0, True
            if issue.counter > life.counter:
                life.counter, life.record, news = issue.counter, record, True
            if news:
                self._take_snapshot()
            return news

    def spoke(self, node: str, epoch: int, now: float) -> None:
        """A life that is known has said something that is no record."""
        life = self._lives.get((node, epoch))
        if life is not None:
            life.heard, life.questions = now, 0

    def keep_only(self, node: str, epoch: int) -> None:
        with self._lock:
            self._lives = {key: life for key, life in self._lives.items() if key == (node, epoch)}
            self._take_snapshot()

    def clear(self) -> None:
        with self._lock:
            self._lives.clear()
            self._take_snapshot()

    # ---- what is to be done ----

    def due(self, now: float) -> tuple[list[tuple[str, int]], float]:
        """The lives to ask now, and the time until the next is due. One that has left too many questions open does not count
        until it answers."""
        due, wait = [], math.inf
        with self._lock:
            for key, life in self._lives.items():
                if now < life.next_question:
                    wait = min(wait, life.next_question - now)
                    continue
                if life.proven and life.questions >= DOUBT:
                    self._lives[key] = life = _PeerSession()
                    self._take_snapshot()
                life.questions += 1
                life.asked = now
                wait = min(wait, life.next_question - now)
                due.append(key)
        return due, wait

    def unread(self, node: str, epoch: int) -> bool:
        """A life has sent what we have no keys for: it is asked soon, and does not count before it answers. Whether it did."""
        with self._lock:
            life = self._lives.get((node, epoch))
            if life is None:
                return False
            counted, life.proven = life.proven, False
            life.questions = min(life.questions, 1)
            self._take_snapshot()
            return counted

    def to_tell(self, counter: int, now: float) -> list[tuple[str, int]]:
        """The lives that do not have our record of this counter, as far as we know, and were not sent it just now."""
        due = []
        with self._lock:
            for key, life in self._lives.items():
                if life.proven and life.told < counter and (life.sent[0] < counter or now - life.sent[1] >= REPEAT):
                    life.sent = (counter, now)
                    due.append(key)
        return due

    def told(self, node: str, epoch: int, counter: int) -> None:
        with self._lock:
            life = self._lives.get((node, epoch))
            if life is not None:
                life.told = max(life.told, counter)

    def receipts(self) -> list[tuple[str, int, int]]:
        """The lives that wait to hear which of their records we have, and its counter. Each is named once."""
        due = []
        with self._lock:
            for (node, epoch), life in self._lives.items():
                if life.receipt:
                    life.receipt = False
                    due.append((node, epoch, life.counter))
        return due

    def issue(self, node: str, epoch: int) -> tuple[int, bytes | None]:
        """The counter of a life's newest record, and the record."""
        with self._lock:
            life = self._lives.get((node, epoch))
            return (0, None) if life is None else (life.counter, life.record)

    def _take_snapshot(self) -> None:
        newest: dict[str, int] = {}
        for (node, epoch), life in self._lives.items():
            if life.proven and epoch > newest.get(node, -1):
                newest[node] = epoch
        self._newest = newest
        records = {node: self._lives[node, epoch].record for node, epoch in newest.items()}
        self._snapshot = MappingProxyType({node: record for node, record in records.items() if record is not None})
