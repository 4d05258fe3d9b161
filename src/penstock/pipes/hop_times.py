"""HopTimes: how long a token takes from one node to another, from what the nodes have measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.domain.meta_model import Link

DEFAULT_ROUND_TRIP_S = 0.001  # to a node that nobody has measured yet
MAX_TRUSTED_S = 1e6  # larger values from peers are cut to this
NS_PER_S = 1_000_000_000  # times are whole nanoseconds: sums are exact, so equal paths compare as equal


class TimesInto(NamedTuple):
    """The times to one node from all others."""

    by_node: Mapping[str, int]  # where it comes from; 0 for the node itself
    nearest: int  # the shortest from another node


class HopTimes:
    """Half a round trip, and the transfer of a token's hidden state if its speed is known, in nanoseconds.

    The round trip is the one that the two nodes have measured; if they disagree, the longer one, so that no node can make its
    link look shorter than the other end finds it. If neither has, it is the longer of those from the origin. Figures of peers
    are not trusted: what is not above 0 counts as unknown, and the rest is cut to MAX_TRUSTED_S.

    round_trips: seconds from the origin, by its own pings: they are newer than what records say.
    links: by the node that has measured them.
    """

    def __init__(
        self,
        nodes: Iterable[str],
        origin: str,
        round_trips: Mapping[str, float],
        links: Mapping[str, Iterable[Link]],
        token_bytes: int,
    ) -> None:
        nodes = {*nodes, origin}
        self._trips: dict[str, dict[str, int]] = defaultdict(dict)  # one way; the same in both directions
        self._transfers: dict[str, dict[str, int]] = defaultdict(dict)  # by receiver and sender
        for node in nodes & links.keys():
            for link in links[node]:
                if link.node in nodes and link.node != node:
                    self._add(node, link, token_bytes)
        self._trips[origin].update({node: nanoseconds(round_trips[node] / 2) for node in nodes & round_trips.keys()})
        from_origin = self._trips[origin]
        self._ways = {node: from_origin.get(node, nanoseconds(DEFAULT_ROUND_TRIP_S / 2)) for node in nodes} | {origin: 0}
        for node in nodes:
            self._trips[node][origin] = self._ways[node]
        self._into: dict[str, TimesInto] = {}

    def into(self, node: str) -> TimesInto:
        found = self._into.get(node)
        if found is None:
            way = self._ways[node]
            times = {other: its_way if its_way > way else way for other, its_way in self._ways.items()} | self._trips[node]
            for sender, time in self._transfers[node].items():
                times[sender] += time
            nearest = min((time for other, time in times.items() if other != node), default=0)
            found = self._into[node] = TimesInto(times | {node: 0}, nearest)
        return found

    def _add(self, node: str, link: Link, token_bytes: int) -> None:
        if link.round_trip > 0:
            time = max(nanoseconds(link.round_trip / 2), self._trips[node].get(link.node, 0))
            self._trips[node][link.node] = self._trips[link.node][node] = time
        if link.bytes_per_second > 0:
            self._transfers[node][link.node] = nanoseconds(token_bytes / link.bytes_per_second)


def nanoseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), MAX_TRUSTED_S) * NS_PER_S)
