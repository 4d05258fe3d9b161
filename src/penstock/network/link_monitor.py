"""LinkMonitor: measures the round trip to every other node, and how quickly hidden states arrive from it."""

from __future__ import annotations

import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.domain.messages import Echo
from penstock.domain.meta_model import Link

ECHO_INTERVAL_S = 5.0  # between two echoes to a node; longer in a large network, since each tick sends only one
ECHO_TIMEOUT_S = 20.0  # for an answer, which may queue behind hidden states; then the next echo is sent
RECENT_ECHOES = 8  # the smallest of their round trips counts: busy machines only make them longer
MIN_ANSWER_INTERVAL_S = 0.1  # between two answers to one node
MIN_TRANSFER_BYTES = 1 << 18  # smaller ones spend most of their time on other things than the transfer
RECENT_TRANSFERS = 16
TRANSFER_HALF_LIFE_S = 60.0  # after which a transfer has half its weight
MAX_TRANSFER_AGE_S = 600.0
MAX_BYTES_PER_SECOND = 1e12  # larger figures are cut to this
MAX_PUBLISHED = 64  # links in a record
PUBLISH_INTERVAL_S = 5.0  # between two changes of the published links
MIN_CHANGE = 1.25  # factor by which a figure must change to be published again
MIN_ROUND_TRIP_CHANGE_S = 0.0005  # ... and at least by this much: on a LAN the noise is larger than a quarter


class _Transfer(NamedTuple):
    bytes_per_second: float
    at: float


@dataclass(slots=True)
class _Peer:
    echo_at: float  # when the next echo is due
    stamp: int | None = None  # of the pending echo
    sent_at: float = 0.0
    answered_at: float = float("-inf")  # when its last echo was answered
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_ECHOES))
    transfers: deque[_Transfer] = field(default_factory=lambda: deque(maxlen=RECENT_TRANSFERS))


class LinkMonitor:
    """Knows only the nodes of the last `set_peers`, so made-up names cost nothing, and a node can affect only its own link.
    Thread-safe.

    send: as `Wire.send`; must not block.
    """

    def __init__(self, send: Callable[[str, Echo], None], clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._published: tuple[Link, ...] = ()
        self._published_at = float("-inf")

    def set_peers(self, nodes: Iterable[str]) -> None:
        """Measure the links to these nodes, and forget all others. The first echoes are spread over an interval."""
        with self._lock:
            now = self._clock()
            self._peers = {
                node: self._peers.get(node) or _Peer(echo_at=now + random.random() * ECHO_INTERVAL_S) for node in nodes
            }

    def tick(self) -> None:
        """Send an echo to the node for which it is most overdue, if there is one. Call this about once a second: more echoes
        would keep an outbox busy for each of hundreds of nodes."""
        with self._lock:
            now = self._clock()
            due = [
                (peer.echo_at, node)
                for node, peer in self._peers.items()
                if peer.echo_at <= now and (peer.stamp is None or now - peer.sent_at >= ECHO_TIMEOUT_S)
            ]
            if not due:
                return
            _, node = min(due)
            peer = self._peers[node]
            stamp = secrets.randbits(60)  # so that no node can answer before the echo is sent
            peer.stamp, peer.sent_at, peer.echo_at = stamp, now, now + ECHO_INTERVAL_S
        self._send(node, Echo(stamp))

    def on_echo(self, sender: str, echo: Echo) -> None:
        """Answer an echo, or take the answer to one."""
        with self._lock:
            now, peer = self._clock(), self._peers.get(sender)
            if peer is None:
                return
            if echo.answer:
                if echo.stamp == peer.stamp:
                    peer.stamp = None
                    peer.round_trips.append(max(0.0, now - peer.sent_at))
                return
            if now - peer.answered_at < MIN_ANSWER_INTERVAL_S:
                return
            peer.answered_at = now
        self._send(sender, Echo(echo.stamp, answer=True))

    def observe_transfer(self, sender: str, size: int, seconds: float) -> None:
        """Note that hidden states of `size` bytes took this long to arrive. Small ones are ignored."""
        if size < MIN_TRANSFER_BYTES or not seconds > 0.0:
            return
        with self._lock:
            if peer := self._peers.get(sender):
                peer.transfers.append(_Transfer(min(size / seconds, MAX_BYTES_PER_SECOND), self._clock()))

    def links(self) -> tuple[Link, ...]:
        """Return what is known of each node, in the order of their names."""
        with self._lock:
            now = self._clock()
            found = (_link(node, peer, now) for node, peer in sorted(self._peers.items()))
            return tuple(link for link in found if link.round_trip or link.bytes_per_second)

    def published(self) -> tuple[Link, ...]:
        """Return the links for this node's record. They change rarely, and only if a figure has changed noticeably."""
        found = self.links()
        with self._lock:
            now = self._clock()
            if now - self._published_at < PUBLISH_INTERVAL_S:
                return self._published
            chosen = _most_useful(found, {link.node for link in self._published})
            if _differ(chosen, self._published):
                self._published, self._published_at = chosen, now
            return self._published


def _link(node: str, peer: _Peer, now: float) -> Link:
    return Link(node, _rounded(min(peer.round_trips, default=0.0)), _rounded(_typical_speed(peer.transfers, now)))


def _typical_speed(transfers: Iterable[_Transfer], now: float) -> float:
    """The median speed, weighted towards recent transfers."""
    weighed = sorted(
        (transfer.bytes_per_second, 0.5 ** ((now - transfer.at) / TRANSFER_HALF_LIFE_S))
        for transfer in transfers
        if now - transfer.at <= MAX_TRANSFER_AGE_S
    )
    left = sum(weight for _, weight in weighed) / 2
    for speed, weight in weighed:
        left -= weight
        if left <= 0:
            return speed
    return 0.0


def _rounded(figure: float) -> float:
    return float(f"{figure:.2g}")


def _most_useful(links: Iterable[Link], published: set[str]) -> tuple[Link, ...]:
    """Choose the links for a record: those in use, then the nearest; published ones get a bonus, to avoid flapping."""

    def rank(link: Link) -> tuple[bool, float, str]:
        return not link.bytes_per_second, link.round_trip / (MIN_CHANGE if link.node in published else 1.0), link.node

    return tuple(sorted(sorted(links, key=rank)[:MAX_PUBLISHED], key=lambda link: link.node))


def _differ(links: tuple[Link, ...], published: tuple[Link, ...]) -> bool:
    if [link.node for link in links] != [link.node for link in published]:
        return True
    return any(
        _changed(new.round_trip, old.round_trip, MIN_ROUND_TRIP_CHANGE_S) or _changed(new.bytes_per_second, old.bytes_per_second)
        for new, old in zip(links, published, strict=True)
    )


def _changed(new: float, old: float, noise: float = 0.0) -> bool:
    """Whether a figure became known or unknown, or changed by more than a quarter and more than the noise."""
    low, high = sorted((new, old))
    return high > MIN_CHANGE * low and (low == 0 or high - low >= noise)
