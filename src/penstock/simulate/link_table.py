"""LinkTable: the speed of the link between two nodes, how long it was busy, and whether it is cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from penstock.domain.meta_model import Link
from penstock.network.link_monitor import MAX_PUBLISHED
from penstock.simulate.scenario import LinkRow, LinkSpeed, Scenario

MIN_LATENCY_S = 20e-6
DEFAULT = LinkSpeed()

Pair = frozenset[str]


class LinkTable:
    def __init__(self, scenario: Scenario) -> None:
        self._sites = scenario.sites
        self._named: dict[Pair, LinkSpeed] = {}
        self._all = self._within = DEFAULT
        for row in scenario.links:
            if row.between is None and not row.within:
                self._all = row.speed
        self._within = next((row.speed for row in scenario.links if row.within), self._all)
        names_of = {**{machine.name: (machine.name,) for machine in scenario.machines}, **scenario.groups}
        for site in set(scenario.sites.values()):
            names_of.setdefault(site, tuple(name for name, its in scenario.sites.items() if its == site))
        for row in sorted(scenario.links, key=lambda row: _breadth(row, names_of), reverse=True):
            if row.between is not None:
                ones, others = (names_of[name] for name in row.between)
                self._named |= {frozenset((one, other)): row.speed for one in ones for other in others if one != other}
        self.cut: set[Pair] = set()
        self.busy: dict[tuple[str, str], float] = defaultdict(float)  # seconds of transfers, by sender and receiver
        self.bytes: Counter[tuple[str, str]] = Counter()
        self._free: dict[tuple[str, str], float] = {}  # when its queued transfers are done

    def speed(self, one: str, other: str) -> LinkSpeed:
        if self._named and (found := self._named.get(frozenset((one, other)))) is not None:
            return found
        site = self._sites.get(one)
        return self._within if site is not None and site == self._sites.get(other) else self._all

    def latency(self, speed: LinkSpeed) -> float:
        return max(MIN_LATENCY_S, speed.round_trip / 2)

    def transferred(self, sender: str, receiver: str, size: int, speed: LinkSpeed, now: float) -> float:
        """Queue a message of hidden states behind earlier ones, and return when it has left the sender."""
        way = sender, receiver
        seconds = size / speed.bytes_per_second
        self.busy[way] += seconds
        self.bytes[way] += size
        done = self._free[way] = max(now, self._free.get(way, 0.0)) + seconds
        return done

    def measured(self, node: str, others: Collection[str]) -> tuple[Link, ...]:
        """The links that a long-running node publishes: the nearest ones, as many as fit a record."""
        found = sorted((self.speed(node, other).round_trip, other) for other in others if other != node)[:MAX_PUBLISHED]
        return tuple(
            Link(other, max(trip, 2 * MIN_LATENCY_S), self.speed(node, other).bytes_per_second)
            for trip, other in sorted(found, key=lambda one: one[1])
        )


def _breadth(row: LinkRow, names_of: dict[str, tuple[str, ...]]) -> int:
    """Sort key: how many pairs a row names. Rows with fewer pairs take precedence."""
    return 0 if row.between is None else len(names_of[row.between[0]]) * len(names_of[row.between[1]])
