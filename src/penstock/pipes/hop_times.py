"""HopTimes: how long a token takes from one node to another, from what the nodes have measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from penstock.domain.meta_model import Link

DEFAULT_ROUND_TRIP_S = 0.001  # to a node that nobody has measured yet
MAX_TRUSTED_S = 1e6  # larger values from peers are cut to this
NS_PER_S = 1_000_000_000  # times are whole nanoseconds: sums are exact, so equal paths compare as equal


class LinkTimes(NamedTuple):
    """What nodes have measured, in nanoseconds."""

    trips: Mapping[str, Mapping[str, int]]  # one way; the same in both directions
    transfers: Mapping[str, Mapping[str, int]]  # of a token, by receiver and sender


class HopTimesTo:
    """The times to one node from all others, by sender.

    measured: the nodes from which something is known. From all others it depends on how far they are from the origin.
    """

    __slots__ = ("_node", "_origin_delay", "_origin_delays", "_transfers", "_trips", "measured")

    def __init__(self, node: str, ways: Mapping[str, int], trips: Mapping[str, int], transfers: Mapping[str, int]) -> None:
        self._node = node
        self._origin_delays = ways
        self._origin_delay = ways[node]
        self._trips = trips
        self._transfers = transfers
        self.measured = trips.keys() if transfers.keys() <= trips.keys() else trips.keys() | transfers.keys()

    def __getitem__(self, sender: str) -> int:
        if sender == self._node:
            return 0
        time = self._trips.get(sender)
        if time is None:
            time = self.unmeasured(self._origin_delays[sender])
        return time + self._transfers.get(sender, 0)

    def unmeasured(self, way: int) -> int:
        """The time from a node of which only the way from the origin is known."""
        return max(self._origin_delay, way)


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
        self.ways = {node: self._from_origin.get(node, unknown) for node in nodes} | {origin: 0}  # from the origin
        self._into: dict[str, HopTimesTo] = {}

    def into(self, node: str) -> HopTimesTo:
        found = self._into.get(node)
        if found is None:
            trips, transfers = self._measured.trips.get(node, {}), self._measured.transfers.get(node, {})
            known = self._from_origin if node == self._origin else {**trips, self._origin: self.ways[node]}
            found = self._into[node] = HopTimesTo(node, self.ways, known, transfers)
        return found


class MeasuredLinks(dict[str, tuple[Link, ...]]):
    """What nodes have measured, by the node that measured it. Immutable, since many searches for paths share it.

    before: an earlier one. What has not changed since is reused.
    """

    def __init__(self, links: Mapping[str, Iterable[Link]] = {}, before: MeasuredLinks | None = None) -> None:
        super().__init__({node: tuple(found) for node, found in links.items()})
        self._own: dict[str, dict[str, int]] = {}  # one way, by the node that measured it
        self._trips: dict[str, dict[str, int]] = {}  # ... and as both ends agree
        self._transfers: dict[int, dict[str, dict[str, int]]] = {}  # by size of a token
        if before is not None:
            self._own = dict(before._own)
            self._trips = dict(before._trips)
            self._transfers = {size: dict(found) for size, found in before._transfers.items()}
        known: Mapping[str, tuple[Link, ...]] = {} if before is None else before
        changed = [node for node in {**known, **self} if known.get(node) != self.get(node)]
        self._agree_on_trips(changed)
        for size, transfers in self._transfers.items():
            transfers.update({node: self._read_transfers(node, size) for node in changed})

    def times(self, token_bytes: int) -> LinkTimes:
        """token_bytes: size of the hidden state of one token."""
        transfers = self._transfers.get(token_bytes)
        if transfers is None:
            transfers = self._transfers[token_bytes] = {node: self._read_transfers(node, token_bytes) for node in self}
        return LinkTimes(self._trips, transfers)

    def _agree_on_trips(self, changed: Collection[str]) -> None:
        """Read the trips of these nodes, and take the longer where both ends have measured one."""
        before = {node: self._own.get(node, {}) for node in changed}
        self._own.update({node: self._read_trips(node) for node in changed})
        pairs = [(node, other) for node in changed for other in before[node].keys() | self._own[node].keys()]
        for node in {end for pair in pairs for end in pair}:
            self._trips[node] = dict(self._trips.get(node, {}))  # others have the one from before
        for node, other in pairs:
            times = [own[end] for end, own in ((other, self._own[node]), (node, self._own.get(other, {}))) if end in own]
            for one, end in ((node, other), (other, node)):
                if times:
                    self._trips[one][end] = max(times)
                else:
                    self._trips[one].pop(end, None)

    def _read_trips(self, node: str) -> dict[str, int]:
        trips: dict[str, int] = {}
        for link in self.get(node, ()):
            if link.node != node and link.round_trip > 0:
                trips[link.node] = max(nanoseconds(link.round_trip / 2), trips.get(link.node, 0))
        return trips

    def _read_transfers(self, node: str, token_bytes: int) -> dict[str, int]:
        return {
            link.node: nanoseconds(token_bytes / link.bytes_per_second)
            for link in self.get(node, ())
            if link.node != node and link.bytes_per_second > 0
        }


def nanoseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), MAX_TRUSTED_S) * NS_PER_S)
