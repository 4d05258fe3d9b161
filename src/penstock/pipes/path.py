"""Finds the cheapest path of a token through the layers, from the cost of segments and hops to an origin.

A path may enter and leave a segment in the middle, but passes each segment once, because a route has one KV log there. All layers
of a segment cost the same. So where two segments overlap, moving the layer at which a path changes between them makes it
steadily better or steadily worse, and only two layers need to be tried: the end of the one, and the start of the other.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from penstock.domain.meta_model import MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import LayerRange

DEFAULT_LAYER_S = 0.001  # of a layer, if nothing was measured
DEFAULT_ROUND_TRIP_S = 0.001  # to a node that was not pinged yet
MAX_LOAD = 0.9  # higher loads count as this: 1 / (1 - load) would dominate the choice
MAX_TRUSTED_S = 1e6  # larger values from peers are cut to this
FAILED_PENALTY_S = 60.0  # for a node that failed recently: worse than any detour, better than no path
FULL_PENALTY_S = 10.0  # for a node whose KV memory is all leased: it may free some, but asking takes time
_NS_PER_S = 1_000_000_000  # costs are whole nanoseconds: sums are exact, so equal paths compare as equal


class Path(NamedTuple):
    hops: tuple[Hop, ...]  # from layer 0 to the last
    seconds: float  # predicted for one token
    why: str  # it was chosen, as a sentence for people
    kv_blocks: int = 0  # of its smallest segment: the most that a sequence can hold


class Reach(NamedTuple):
    """A segment, and the part of its layers that may be used."""

    segment: MetaModel
    layers: LayerRange


def best_path(
    choices: Iterable[Sequence[Reach]],
    num_layers: int,
    origin: str,
    *,
    avoid: Collection[str],
    round_trips: Mapping[str, float],
) -> Path | None:
    """The path with the least predicted time from `origin` and back, within one of the choices."""
    choices = list(choices)
    prices = _Prices([reach.segment for reaches in choices for reach in reaches], origin, avoid, round_trips)
    found: list[_Trip] = []
    keeps_ends = False
    for reaches in choices:
        kept = _keep_ends(reaches, num_layers, origin)
        keeps_ends |= kept != list(reaches)
        found += prices.best_trips(kept, num_layers)
    if not found:
        return None
    best, *others = sorted(found)
    other = next((trip for trip in others if trip.hops != best.hops), None)  # a node may have the same layers twice
    return Path(best.hops, best.nanoseconds / _NS_PER_S, prices.reason(best, other, keeps_ends=keeps_ends))


def _keep_ends(reaches: Iterable[Reach], num_layers: int, origin: str) -> list[Reach]:
    """Let no other node run first or last layers that the origin holds itself, because text is easily recovered there. There is
    always a path left, since the origin can run them."""
    own = [reach.layers for reach in reaches if reach.segment.node == origin]
    first = max((layers.end for layers in own if layers.start == 0), default=0)
    last = min((layers.start for layers in own if layers.end == num_layers), default=num_layers)
    return [reach for reach in (narrowed(one, origin, first, last) for one in reaches) if reach.layers.size > 0]


def narrowed(reach: Reach, owner: str, first: int, last: int) -> Reach:
    """Cut off the layers before `first` and from `last` on, unless the segment is the owner's."""
    if reach.segment.node == owner:
        return reach
    return Reach(reach.segment, LayerRange(max(reach.layers.start, first), min(reach.layers.end, last)))


# ---- the search ----


class _Stop(NamedTuple):
    node: str
    layers: LayerRange
    full: bool  # its KV memory is leased


class _Range(NamedTuple):
    """A segment with its cost."""

    layers: LayerRange
    node: str
    rate: int  # nanoseconds for each layer
    toll: int  # penalty for entering, in nanoseconds
    foreign: bool
    full: bool


class _Trip(NamedTuple):
    """Part of a path. The smallest is chosen; ties in cost are broken in the order of the fields."""

    cost: int  # nanoseconds with penalties
    foreign: int  # layers on other nodes than the origin
    length: int
    stops: tuple[_Stop, ...]
    nanoseconds: int  # without penalties
    shut: tuple[_Range, ...] = ()  # ranges that it left in the middle, and cannot enter again

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(Hop(stop.layers, stop.node) for stop in self.stops)


class _Entry(NamedTuple):
    """A trip that has entered a range. Cost and foreign layers are counted as if it had been in the range since layer 0, so the
    order of several entries does not change on the way."""

    cost: int
    foreign: int
    length: int
    stops: tuple[_Stop, ...]
    at: int
    trip: _Trip

    def leave(self, found: _Range, here: int) -> _Trip:
        trip, size = self.trip, here - self.at
        return _Trip(
            trip.cost + found.rate * size,
            trip.foreign + found.foreign * size,
            trip.length + 1,
            (*trip.stops, _Stop(found.node, LayerRange(self.at, here), found.full)),
            trip.nanoseconds + found.rate * size,
            trip.shut if found.layers.end == here else (*trip.shut, found),
        )


_Standing = tuple[int, _Range, _Entry]  # cost so far, the range it is in, and how it entered


class _Prices:
    """The costs of segments and hops for an origin, and the search with them."""

    def __init__(
        self, segments: Sequence[MetaModel], origin: str, avoid: Collection[str], round_trips: Mapping[str, float]
    ) -> None:
        self._origin = origin
        self._avoid = avoid
        self._ways = {s.node: _nanoseconds(round_trips.get(s.node, DEFAULT_ROUND_TRIP_S) / 2) for s in segments} | {origin: 0}
        self._farthest = max(self._ways.values())
        measured = [segment for segment in segments if segment.seconds > 0]
        layers = sum(segment.layers.size for segment in measured)
        self._per_layer = sum(min(s.seconds, MAX_TRUSTED_S) for s in measured) / layers if layers else DEFAULT_LAYER_S

    def best_trips(self, reaches: Iterable[Reach], num_layers: int) -> list[_Trip]:
        """The best trip, and the second best if there is one. Goes from cut to cut, so that all trips to a layer are known before
        any leaves it.

        Of the trips into a range the best two are followed, and the best of those that left every range at its end: nothing is
        shut to that one, so it finds a path if there is any. To follow every combination of shut ranges would take too long, and
        find a better path in about one of a thousand small random networks.
        """
        starting: dict[int, list[_Range]] = defaultdict(list)
        for found in sorted(self._ranges(reaches)):
            starting[found.layers.start].append(found)
        inside: list[tuple[_Range, list[_Entry]]] = []
        for here in sorted({0, num_layers, *starting, *(found.layers.end for some in starting.values() for found in some)}):
            standing = [(entry.cost + found.rate * here, found, entry) for found, entries in inside for entry in entries]
            ended = [one for one in standing if one[1].layers.end == here]
            if here == num_layers:
                return sorted(self._home(entry.leave(found, here)) for _, found, entry in ended)[:2]
            inside = [(found, entries) for found, entries in inside if found.layers.end > here]
            if onward := self._leaving(ended, here):
                for found, entries in inside:
                    self._enter(found, here, onward, entries)
            if starting[here]:
                onward = self._leaving(standing, here) if here else [_Trip(0, 0, 0, (), 0)]
                for found in starting[here]:
                    inside.append((found, []))
                    self._enter(found, here, onward, inside[-1][1])
        return []

    def _leaving(self, standing: Collection[_Standing], here: int) -> list[_Trip]:
        """The trips worth following, the best first. A trip is dropped if two others would reach its node at less cost; one
        without shut ranges is only compared with its like."""
        free = [one for one in standing if one[1].layers.end == here and not one[2].trip.shut]
        others = [one for one in standing if one[1].layers.end > here or one[2].trip.shut]
        kept: list[tuple[int, int, str]] = []
        trips: list[_Trip] = []
        for some in (free, others):
            for cost, found, entry in sorted(some, key=itemgetter(0)):
                if len(kept) > 1 and cost > kept[1][0] + self._farthest:
                    break
                way, node = self._ways[found.node], found.node
                if not self._is_worse(cost, way, node, kept):
                    kept.append((cost, way, node))
                    trips.append(entry.leave(found, here))
        return sorted(trips)

    @staticmethod
    def _is_worse(cost: int, way: int, node: str, others: Iterable[tuple[int, int, str]]) -> bool:
        better = 0
        for its_cost, its_way, its_node in others:
            if its_cost + (0 if its_node == node else way if way > its_way else its_way) < cost:
                better += 1
                if better == 2:
                    return True
        return False

    def _enter(self, found: _Range, here: int, trips: Iterable[_Trip], entries: list[_Entry]) -> None:
        """Continue trips in a range, if they are among the best there."""
        way, start = self._ways[found.node], found.toll - found.rate * here
        for trip in trips:
            last = None
            if len(entries) > 1 and (trip.shut or not all(entry.trip.shut for entry in entries)):
                last = entries[1 if trip.shut else -1].cost
            if last is not None and not trip.shut and trip.cost + start > last:
                break  # the rest cost more
            node = trip.stops[-1].node if trip.stops else self._origin
            time = 0 if node == found.node else max(way, self._ways[node])
            cost = trip.cost + time + start
            if (last is not None and cost > last) or found in trip.shut:
                continue
            onto = trip._replace(cost=trip.cost + time + found.toll, nanoseconds=trip.nanoseconds + time)
            insort(entries, _Entry(cost, trip.foreign - found.foreign * here, trip.length, trip.stops, here, onto))
            free = next((entry for entry in entries if not entry.trip.shut), entries[0])
            entries[2:] = [free] if free not in entries[:2] else []

    def _home(self, trip: _Trip) -> _Trip:
        """Add the hop back to the origin."""
        time = self._ways[trip.stops[-1].node]
        return trip._replace(cost=trip.cost + time, nanoseconds=trip.nanoseconds + time)

    def _ranges(self, reaches: Iterable[Reach]) -> Iterable[_Range]:
        """One range for each hop: of a node's segments with the same layers, the cheapest."""
        best: dict[Hop, _Range] = {}
        for found in sorted((self._range(reach) for reach in reaches), key=lambda found: (found.toll, found.rate)):
            best.setdefault(Hop(found.layers, found.node), found)
        return best.values()

    def reason(self, taken: _Trip, other: _Trip | None, *, keeps_ends: bool) -> str:
        """Explain why `taken` was chosen over `other`, the second best."""
        troubles = self._troubles(taken)
        although = f", although {listed(troubles)}" if troubles else ""
        if other is None:
            kept = f" that keeps the first and the last layers that {self._origin} has there" if keeps_ends else ""
            return f"It is the only one{kept}{although}."
        detour = _arrows(other, self._origin)
        if other.cost - other.nanoseconds > taken.cost - taken.nanoseconds:
            worse = self._troubles(other)
            new = [trouble for trouble in worse if trouble not in troubles]
            return f"It was chosen over {detour} because {listed(new or worse)}{although}."
        if other.cost > taken.cost:
            return f"It is the fastest with {_format_time(taken)} per token; {detour} would take {_format_time(other)}{although}."
        if other.foreign > taken.foreign:
            merit = f"keeps more layers on {self._origin}"
        else:
            merit = "has fewer hops" if other.length > taken.length else "comes first by name"
        return f"It is as fast as {detour} and {merit}{although}."

    def _range(self, reach: Reach) -> _Range:
        segment = reach.segment
        foreign = segment.node != self._origin
        full = segment.kv_free < 1 and foreign
        toll = _nanoseconds(FAILED_PENALTY_S * (segment.node in self._avoid) + FULL_PENALTY_S * full)
        return _Range(reach.layers, segment.node, self._rate(segment), toll, foreign, full)

    def _rate(self, segment: MetaModel) -> int:
        """Nanoseconds of a token in each layer, beside the other work of the node."""
        per_layer = segment.seconds / segment.layers.size if segment.seconds > 0 else self._per_layer
        load = max(segment.load, 0.0) if segment.load < MAX_LOAD else MAX_LOAD
        return _nanoseconds(per_layer / (1 - load))

    def _troubles(self, trip: _Trip) -> list[str]:
        failed = [f"{stop.node} failed recently" for stop in trip.stops if stop.node in self._avoid]
        full = [f"{stop.node} has no free KV memory" for stop in trip.stops if stop.full]
        return list(dict.fromkeys([*failed, *full]))


def _nanoseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), MAX_TRUSTED_S) * _NS_PER_S)


def _format_time(trip: _Trip) -> str:
    return f"{trip.nanoseconds / 1e6:.1f} ms"


def _arrows(trip: _Trip, origin: str) -> str:
    stops = [f"{stop.node} {stop.layers}" for stop in trip.stops]
    return " → ".join(stops if trip.stops[-1].node == origin else [*stops, origin])


def listed(things: Iterable[object]) -> str:
    """Join things for people: `"a, b and c"`."""
    *most, last = map(str, things)
    return f"{', '.join(most)} and {last}" if most else last
