"""HopTimes: how long a token takes from one node to another, from what the nodes have measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.domain.meta_model import Link

DEFAULT_ROUND_TRIP_S = 0.001  # to a node that nobody has measured yet
MAX_TRUSTED_S = 1e6  # larger values from peers are cut to this
NS_PER_S = 1_000_000_000  # times are whole nanoseconds: sums are exact, so equal paths compare as equal


class LinkTimes(NamedTuple):
    """What nodes have measured, in nanoseconds."""

    trips: Mapping[str, Mapping[str, int]]  # one way; the same in both directions
    transfers: Mapping[str, Mapping[str, int]]  # of a token, by receiver and sender


class TimesInto:
    """The times to one node from all others, by the node where they come from.

    near: other nodes that are known to be nearer than `far`.
    far: all the rest are at least that far away.
    """

    __slots__ = ("_known", "_node", "_transfers", "_way", "_ways", "far", "near")

    def __init__(
        self, node: str, ways: Mapping[str, int], known: Mapping[str, int], transfers: Mapping[str, int], shortest: int
    ) -> None:
        self._node = node
        self._ways = ways
        self._way = ways[node]
        self._known = known
        self._transfers = transfers
        self.far = far = max(self._way, shortest)
        self.near = tuple(sender for sender, time in known.items() if time < far and sender != node)

    def __getitem__(self, sender: str) -> int:
        if sender == self._node:
            return 0
        time = self._known.get(sender)
        if time is None:
            time = max(self._way, self._ways[sender])
        return time + self._transfers.get(sender, 0)


class HopTimes:
    """Half a round trip, and the transfer of a token's hidden state if its speed is known, in nanoseconds.

    The round trip is the one that the two nodes have measured; if they disagree, the longer one, so that no node can make its
    link look shorter than the other end finds it. If neither has, it is the longer of those from the origin. Figures of peers
    are not trusted: what is not above 0 counts as unknown, and the rest is cut to MAX_TRUSTED_S.

    round_trips: seconds from the origin, by its own pings: they are newer than what records say.
    """

    def __init__(self, nodes: Iterable[str], origin: str, round_trips: Mapping[str, float], measured: LinkTimes) -> None:
        nodes = {*nodes, origin}
        self._origin = origin
        self._measured = measured
        pings = {node: nanoseconds(round_trips[node] / 2) for node in nodes & round_trips.keys()}
        self._from_origin = {**measured.trips.get(origin, {}), **pings}
        unknown = nanoseconds(DEFAULT_ROUND_TRIP_S / 2)
        self._ways = {node: self._from_origin.get(node, unknown) for node in nodes} | {origin: 0}
        self._shortest = min((way for node, way in self._ways.items() if node != origin), default=0)
        self._into: dict[str, TimesInto] = {}

    def into(self, node: str) -> TimesInto:
        found = self._into.get(node)
        if found is None:
            trips, transfers = self._measured.trips.get(node, {}), self._measured.transfers.get(node, {})
            known = self._from_origin if node == self._origin else {**trips, self._origin: self._ways[node]}
            found = self._into[node] = TimesInto(node, self._ways, known, transfers, self._shortest)
        return found


class MeasuredLinks(dict[str, tuple[Link, ...]]):
    """What nodes have measured, by the node that has; not changed once it is made. Many paths are found with the same."""

    def __init__(self, links: Mapping[str, Iterable[Link]] = {}) -> None:
        super().__init__({node: tuple(found) for node, found in links.items()})
        self._times: dict[int, LinkTimes] = {}

    def times(self, token_bytes: int) -> LinkTimes:
        """token_bytes: size of the hidden state of one token."""
        found = self._times.get(token_bytes)
        if found is None:
            found = self._times[token_bytes] = self._read(token_bytes)
        return found

    def _read(self, token_bytes: int) -> LinkTimes:
        trips: dict[str, dict[str, int]] = defaultdict(dict)
        transfers: dict[str, dict[str, int]] = defaultdict(dict)
        for node, found in self.items():
            for link in found:
                other = link.node
                if other == node:
                    continue
                if link.round_trip > 0:
                    time = max(nanoseconds(link.round_trip / 2), trips[node].get(other, 0))
                    trips[node][other] = trips[other][node] = time
                if link.bytes_per_second > 0:
                    transfers[node][other] = nanoseconds(token_bytes / link.bytes_per_second)
        return LinkTimes(trips, transfers)


def nanoseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), MAX_TRUSTED_S) * NS_PER_S)
