"""The Roster: which nodes are live, in which epoch, and the newest record of each. Events may arrive in any order."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

MAX_SESSIONS = 4096  # a hostile member can announce any number of sessions that never answer
MIN_RETRY_S = 0.05  # until a session that has not answered is asked again; doubles each time
MAX_RETRY_S = 30.0
RESEND_INTERVAL_S = 1.0  # until a record without a receipt is sent again
IDLE_BEFORE_CHECK_S = 10.0  # a session that is silent for longer is checked
CHECK_INTERVAL_S = 5.0  # between checks
MAX_UNANSWERED = 4  # unanswered questions until a session no longer counts: a busy process can hang for half a minute


class Issue(NamedTuple):
    """Orders the records of a node: a later epoch, or a later record of the same epoch, is greater."""

    epoch: int
    counter: int


@dataclass(slots=True)
class _PeerSession:
    """One epoch of a node: the time from a start of its process to its end."""

    proven: bool = False  # it has sent something that only this session could seal
    active_at: float = 0.0  # when it last sent something
    asked_at: float = -math.inf
    unanswered: int = 0  # questions since it last sent something
    counter: int = 0  # of its newest record; 0 while it has none
    record: bytes | None = None
    receipt_due: bool = False  # it waits for our receipt for that record
    acknowledged: int = 0  # the counter of our newest record that it has
    sent: tuple[int, float] = (0, -math.inf)  # the counter of our record that was sent to it last, and when

    @property
    def next_question(self) -> float:
        if self.proven:
            return max(self.active_at + IDLE_BEFORE_CHECK_S, self.asked_at + CHECK_INTERVAL_S)
        return self.asked_at + min(MIN_RETRY_S * 2.0 ** min(self.unanswered, 10), MAX_RETRY_S)


class Roster:
    """The sessions that were announced, and whether they count.

    An announcement is only a reason to ask; its end is the end of that session. A session counts once it has proved itself, which
    no other node can do for it: made-up announcements hide nothing. A node that crashed and came back may be announced twice for
    a while; its larger epoch counts.

    Records of sessions that were not announced are dropped, so the record of a new session must be asked for. Since another node
    may keep up the announcement of one that has died, silent sessions are asked again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, int], _PeerSession] = {}  # by node and epoch
        self._newest: Mapping[str, int] = {}  # node -> the epoch that counts
        self._snapshot: Mapping[str, bytes] = MappingProxyType({})

    def records(self) -> Mapping[str, bytes]:
        return self._snapshot

    def nodes(self) -> Collection[str]:
        """All live nodes, with or without a record."""
        return self._newest.keys()

    def is_live(self, node: str) -> bool:
        return node in self._newest

    def current_epoch(self, node: str) -> int | None:
        """The epoch of the session that counts."""
        return self._newest.get(node)

    # ---- events ----

    def appeared(self, node: str, epoch: int) -> None:
        with self._lock:
            if (node, epoch) in self._sessions:
                return
            if len(self._sessions) >= MAX_SESSIONS:
                unproven = next((key for key, session in self._sessions.items() if not session.proven), None)
                if unproven is None:
                    return
                del self._sessions[unproven]
            self._sessions[node, epoch] = _PeerSession()

    def vanished(self, node: str, epoch: int) -> None:
        with self._lock:
            if self._sessions.pop((node, epoch), None) is not None:
                self._take_snapshot()

    def store_record(self, node: str, issue: Issue, record: bytes | None, now: float = 0.0) -> bool:
        """Store the record of a session that has proved itself (None while its counter is 0). True if that is news."""
        with self._lock:
            session = self._sessions.get((node, issue.epoch))
            if session is None:
                return False
            news = not session.proven
            session.proven = True
            session.active_at = now
            session.unanswered = 0
            session.receipt_due = True
            if issue.counter > session.counter:
                session.counter = issue.counter
                session.record = record
                news = True
            if news:
                self._take_snapshot()
            return news

    def mark_active(self, node: str, epoch: int, now: float) -> None:
        """Note that a known session has sent something."""
        session = self._sessions.get((node, epoch))
        if session is not None:
            session.active_at = now
            session.unanswered = 0

    def keep_only(self, node: str, epoch: int) -> None:
        with self._lock:
            self._sessions = {key: session for key, session in self._sessions.items() if key == (node, epoch)}
            self._take_snapshot()

    def clear(self) -> None:
        with self._lock:
            self._sessions.clear()
            self._take_snapshot()

    # ---- what is due ----

    def questions_due(self, now: float) -> tuple[list[tuple[str, int]], float]:
        """Return the sessions to ask now, and the seconds until the next is due.

        A session that left too many questions unanswered does not count until it answers.
        """
        due, wait = [], math.inf
        with self._lock:
            for key, session in self._sessions.items():
                if now < session.next_question:
                    wait = min(wait, session.next_question - now)
                    continue
                if session.proven and session.unanswered >= MAX_UNANSWERED:
                    self._sessions[key] = session = _PeerSession()
                    self._take_snapshot()
                session.unanswered += 1
                session.asked_at = now
                wait = min(wait, session.next_question - now)
                due.append(key)
        return due, wait

    def mark_unproven(self, node: str, epoch: int) -> bool:
        """Question a session again soon, because it sent something we have no keys for. True if it counted until now."""
        with self._lock:
            session = self._sessions.get((node, epoch))
            if session is None:
                return False
            counted = session.proven
            session.proven = False
            session.unanswered = min(session.unanswered, 1)
            self._take_snapshot()
            return counted

    def records_due(self, counter: int, now: float, transfer: float = 0.0) -> list[tuple[str, int]]:
        """Return the sessions to send our record with this counter to: no receipt came, and it was not sent recently.

        transfer: seconds that it may be in transit.
        """
        due = []
        with self._lock:
            for key, session in self._sessions.items():
                sent_counter, sent_at = session.sent
                resend = sent_counter < counter or now - sent_at >= RESEND_INTERVAL_S + transfer
                if session.proven and session.acknowledged < counter and resend:
                    session.sent = (counter, now)
                    due.append(key)
        return due

    def acknowledge(self, node: str, epoch: int, counter: int) -> None:
        """Note a receipt: that session has our record with this counter."""
        with self._lock:
            session = self._sessions.get((node, epoch))
            if session is not None:
                session.acknowledged = max(session.acknowledged, counter)

    def receipts_due(self) -> list[tuple[str, int, int]]:
        """Return the sessions that wait for a receipt, with the counter of the record that we have. Each is returned once."""
        due = []
        with self._lock:
            for (node, epoch), session in self._sessions.items():
                if session.receipt_due:
                    session.receipt_due = False
                    due.append((node, epoch, session.counter))
        return due

    def newest_record(self, node: str, epoch: int) -> tuple[int, bytes | None]:
        """Return the counter of a session's newest record, and the record."""
        with self._lock:
            session = self._sessions.get((node, epoch))
            return (0, None) if session is None else (session.counter, session.record)

    def _take_snapshot(self) -> None:
        newest: dict[str, int] = {}
        for (node, epoch), session in self._sessions.items():
            if session.proven and epoch > newest.get(node, -1):
                newest[node] = epoch
        self._newest = newest
        records = {node: self._sessions[node, epoch].record for node, epoch in newest.items()}
        self._snapshot = MappingProxyType({node: record for node, record in records.items() if record is not None})
