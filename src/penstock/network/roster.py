"""The Roster: who is live, in which life, and the newest record of each; folded from what the network tells, in any order."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Issue(NamedTuple):
    """Places a record in time: a later life of its node, or a later record of the same life, is greater."""

    epoch: int
    counter: int


class Roster:
    """A node that crashed and came back may be seen twice for a while: its life with the larger epoch counts.

    Records of lives that are not live are not kept. Whoever hears of a new life must ask for its record.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: dict[str, set[int]] = {}  # node -> epochs
        self._records: dict[tuple[str, int], tuple[int, bytes]] = {}  # (node, epoch) -> (counter, record)
        self._snapshot: Mapping[str, bytes] = MappingProxyType({})

    def records(self) -> Mapping[str, bytes]:
        return self._snapshot

    def is_live(self, node: str) -> bool:
        return node in self._lives

    def appeared(self, node: str, epoch: int) -> None:
        with self._lock:
            self._lives.setdefault(node, set()).add(epoch)
            self._take_snapshot()

    def vanished(self, node: str, epoch: int) -> None:
        with self._lock:
            self._records.pop((node, epoch), None)
            epochs = self._lives.get(node, set())
            epochs.discard(epoch)
            if not epochs:
                self._lives.pop(node, None)
            self._take_snapshot()

    def heard(self, node: str, issue: Issue, record: bytes) -> bool:
        """Whether the record is news."""
        with self._lock:
            if issue.epoch not in self._lives.get(node, ()):
                return False
            known = self._records.get((node, issue.epoch))
            if known is not None and known[0] >= issue.counter:
                return False
            self._records[node, issue.epoch] = (issue.counter, record)
            self._take_snapshot()
            return True

    def clear(self) -> None:
        with self._lock:
            self._lives.clear()
            self._records.clear()
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        newest = {node: self._records.get((node, max(epochs))) for node, epochs in self._lives.items()}
        self._snapshot = MappingProxyType({node: known[1] for node, known in newest.items() if known is not None})
