"""RouteHealth: where the NetworkJobs of a route are, which of them are lost, and which node or leg of the route is dead.

Slow is not lost. A NetworkJob is lost when a node says that newer ones have arrived there and it has not, or
when a node holds it and has nothing to do; a leg is dead when its sender has handed something over and nothing arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.domain.messages import LegReport, Pong
from penstock.domain.route import Hop, legs_of
from penstock.engine.routing.host.heartbeat import MIN_SILENCE_S, is_hung

PING_INTERVAL_S = 0.5
MIN_UNANSWERED = 4  # Pings; if fewer were sent during a silence, this node was the one that stalled
SILENCE_FACTOR = 4.0  # of the slowest recent answer to a Ping, or of a transfer
SLOWEST_LINK = 125_000.0  # bytes per second; a leg of which nothing is known is not dead while this could explain it
STUCK_PASSES = 64  # of a node that holds a NetworkJob and has sent a newer one on: the two are at most a few passes apart
MAX_STAY_S = 600.0  # of a NetworkJob at one node or on the way to it, whatever is reported


class Station(NamedTuple):
    """Where a leg begins: at a node of the route, or at the origin after the last layer."""

    node: str
    layer: int


@dataclass(slots=True)
class Watched:
    """A NetworkJob in flight."""

    moved: float  # when it was sent, or seen at a further node
    size: int  # bytes of its hidden states
    seen_at: Station | None = None  # the node that holds it
    first_passes: int = 0  # of that node when it was first seen there
    passes: int = 0  # ... and when it was last seen
    idle: int = 0  # Pongs in a row in which that node had it and nothing to do


@dataclass(slots=True)
class WatchedLeg:
    """The newest report about a leg, and since when nothing has arrived on it although something should."""

    report: LegReport
    waiting_since: float | None = None
    pings: int = 0  # sent until then


@dataclass(slots=True)
class WatchedNode:
    last_pong: float  # when its last Pong came
    pings: int = 0  # sent until then
    age: float = 0.0  # of its compute thread's last sign of life
    expected: float = 0.0
    passes: int = 0
    slowest: float = 0.0  # of its recent answers, decaying
    stamp: int = 0  # of the last Ping that was answered


class Trouble(NamedTuple):
    reason: str
    nodes: Collection[str]  # to avoid


@dataclass(slots=True)
class RouteHealth:
    origin: str
    stations: Sequence[Station]  # in the order of the route; the last one is the way back, if that is over the network
    nodes: dict[str, WatchedNode]  # all but the origin
    legs: dict[Station, WatchedLeg]
    pings: int = 0  # rounds of Pings sent
    in_flight: dict[int, Watched] = field(default_factory=dict)
    progress: float = 0.0  # when something last arrived anywhere
    settled: int = -1  # nothing up to this number is in flight
    _newest: int = -1

    @classmethod
    def of(cls, hops: Sequence[Hop], origin: str, now: float) -> RouteHealth:
        legs = legs_of(hops, origin)
        stations = sorted((Station(node, leg.layers.start) for node, some in legs.items() for leg in some), key=_layer)
        if stations[-1].node != origin:
            stations.append(Station(origin, hops[-1].layers.end))
        return cls(
            origin,
            stations,
            {node: WatchedNode(now) for node in legs if node != origin},
            {station: WatchedLeg(LegReport(station.layer, -1, 0)) for station in stations},
            progress=now,
        )

    # ---- what happens ----

    def on_sent(self, number: int, size: int, now: float) -> None:
        self.in_flight[number] = Watched(now, size)
        self._newest = max(self._newest, number)

    def on_returned(self, number: int) -> None:
        """Forget a NetworkJob that has passed all legs. The wait for those still on their way starts anew."""
        for leg in self.legs.values():
            leg.waiting_since = None
        self.on_settled(number)

    def on_settled(self, number: int) -> None:
        """Forget a NetworkJob that has returned or was given up."""
        self.in_flight.pop(number, None)
        self.settled = min(self.in_flight, default=self._newest + 1) - 1

    def on_pong(self, sender: str, pong: Pong, at: float) -> float | None:
        """Take a report that came at this time. Returns how long the answer took, if it is the first to its Ping."""
        node = self.nodes.get(sender)
        took = None
        if node is not None:
            node.last_pong, node.pings = max(node.last_pong, at), self.pings
            if node.stamp < pong.stamp <= at * 1e9 + 1:  # an answer to a Ping that was sent, and the newest
                node.age, node.expected, node.passes, node.stamp = pong.age, pong.expected, pong.passes, pong.stamp
                took = max(0.0, at - pong.stamp / 1e9)
                node.slowest = max(took, 0.9 * node.slowest)
        for report in pong.legs:
            self.on_report(Station(sender, report.layer), report, at, idle=not pong.expected, passes=pong.passes)
        return took

    def on_report(self, station: Station, report: LegReport, at: float, *, idle: bool = False, passes: int = 0) -> None:
        leg = self.legs.get(station)
        if leg is None or report.newest < leg.report.newest or report.received < leg.report.received:
            return  # not on the route, or older than what is known
        if report.newest > self._newest:
            return  # nothing like that was sent
        if (report.newest, report.received) != (leg.report.newest, leg.report.received):
            leg.waiting_since, self.progress = None, at
        leg.report = report
        for number in report.here:
            job = self.in_flight.get(number)
            if job is None:
                continue
            if job.seen_at != station:
                job.seen_at, job.first_passes, job.passes, job.idle = station, passes, passes, 0
                job.moved = self.progress = at
            elif passes != job.passes:
                job.passes, job.idle, self.progress = passes, 0, at
            else:
                job.idle = job.idle + 1 if idle else 0

    # ---- what follows from it ----

    def lost(self, now: float) -> list[int]:
        """The NetworkJobs that will not return."""
        if not self.in_flight:
            return []
        missing = {number for leg in self.legs.values() for number in leg.report.missing}
        return [number for number, job in self.in_flight.items() if number in missing or self._is_stuck(number, job, now)]

    def suspects(self, number: int) -> Collection[str]:
        """The nodes at the ends of the leg on which a NetworkJob was lost, or the one that holds it."""
        job, before = self.in_flight.get(number), self.origin
        for station in self.stations:
            if number in self.legs[station].report.missing:
                return {before, station.node} - {self.origin}
            before = station.node
        return set() if job is None or job.seen_at is None else {job.seen_at.node} - {self.origin}

    def _is_stuck(self, number: int, job: Watched, now: float) -> bool:
        if now - job.moved > MAX_STAY_S:
            return True
        if job.seen_at is None or number not in self.legs[job.seen_at].report.here:
            return False
        node = self.nodes.get(job.seen_at.node)
        done = 0 if node is None else node.passes - job.first_passes
        return job.idle * PING_INTERVAL_S >= MIN_SILENCE_S or (done >= STUCK_PASSES and self._is_overtaken(number, job.seen_at))

    def _is_overtaken(self, number: int, station: Station) -> bool:
        """Whether the node that holds a NetworkJob has sent on a newer one of its leg. The number of passes does not
        show that: many may be those of other origins."""
        report = self.legs[station].report
        kept = sum(other > number for other in (*report.here, *report.missing))
        return report.newest - number > kept

    def trouble(self, now: float, bytes_per_second: Callable[[Station], float]) -> Trouble | None:
        """The node or the leg that is dead, if one is."""
        # nothing counts as silent before MIN_SILENCE_S, and this runs at every tick
        since = now - MIN_SILENCE_S
        silent = [name for name, node in self.nodes.items() if node.last_pong < since and self._is_silent(node, now)]
        if silent:
            return Trouble(f"node {' and '.join(silent)} does not answer", silent)
        hung = [name for name, node in self.nodes.items() if node.age > MIN_SILENCE_S and is_hung(node.age, node.expected)]
        if hung:
            return Trouble(f"node {' and '.join(hung)} answers but computes nothing", hung)
        before: Station | None = None
        for station in self.stations:
            if self._is_dead(before, station, now, bytes_per_second):
                return self._dead_leg(self.origin if before is None else before.node, station)
            before = station
        return None

    def _dead_leg(self, before: str, station: Station) -> Trouble:
        """Blame the end of a leg that has answered no Ping since the leg went dead, or both ends if both have answered."""
        ends = {before, station.node} - {self.origin}
        since = self.legs[station].waiting_since or 0.0
        silent = sorted(name for name in ends if self.nodes[name].last_pong < since)
        if silent:
            return Trouble(f"node {' and '.join(silent)} does not answer", silent)
        return Trouble(f"nothing arrives from node {before} at node {station.node}", ends)

    def _is_silent(self, node: WatchedNode, now: float) -> bool:
        timeout = max(MIN_SILENCE_S, SILENCE_FACTOR * node.slowest)
        return now - node.last_pong > timeout and self.pings - node.pings >= MIN_UNANSWERED

    def _is_dead(
        self, before: Station | None, station: Station, now: float, bytes_per_second: Callable[[Station], float]
    ) -> bool:
        """Whether NetworkJobs have left the station before this one, but nothing has arrived here for too long."""
        leg = self.legs[station]
        sizes = [self.in_flight[number].size for number in self._on_the_way(before, station)]
        if not sizes:
            leg.waiting_since = None
            return False
        if leg.waiting_since is None:
            leg.waiting_since, leg.pings = now, self.pings
        if now - leg.waiting_since <= MIN_SILENCE_S or self.pings - leg.pings < MIN_UNANSWERED:
            return False
        speed = bytes_per_second(station)
        return now - leg.waiting_since > (SILENCE_FACTOR * sum(sizes) / speed if speed else sum(sizes) / SLOWEST_LINK)

    def _on_the_way(self, before: Station | None, station: Station) -> Iterable[int]:
        """NetworkJobs that have left the station before, or the origin, and are not known to have arrived."""
        newest = self.legs[station].report.newest
        if before is None:
            return [number for number in self.in_flight if number > newest]
        left = self.legs[before].report
        if left.newest <= newest:
            return ()
        gone = {*left.here, *left.missing}
        return [number for number in self.in_flight if newest < number <= left.newest and number not in gone]


def _layer(station: Station) -> int:
    return station.layer
