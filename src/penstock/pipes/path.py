"""Finds the cheapest path of a token through the layers, from the cost of segments and hops to an origin.

A path may enter and leave a segment in the middle, but passes each segment once, because a route has one KV log there. All layers
of a segment cost the same. So where two segments overlap, moving the layer at which a path changes between them makes it
steadily better or steadily worse, and only two layers need to be tried: the end of the one, and the start of the other.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.domain.meta_model import MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import LayerRange
from penstock.pipes.hop_times import MAX_TRUSTED_S, NS_PER_S, HopTimes, MeasuredLinks, nanoseconds

DEFAULT_LAYER_S = 0.001  # of a layer, if nothing was measured
MAX_LOAD = 0.9  # higher loads count as this: 1 / (1 - load) would dominate the choice
FAILED_PENALTY_S = 60.0  # for a node that failed recently: worse than any detour, better than no path
FULL_PENALTY_S = 10.0  # for a node whose KV memory is all leased: it may free some, but asking takes time


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
    links: MeasuredLinks | None = None,
    token_bytes: int = 0,
    along: Sequence[Hop] = (),
) -> Path | None:
    """The path with the least predicted time from `origin` and back, within one of the choices.

    round_trips: as in HopTimes.
    token_bytes: size of the hidden state of one token.
    along: the only hops to use, to find out how fast a known path is now.
    """
    choices = list(choices)
    segments = [reach.segment for reaches in choices for reach in reaches]
    measured = (MeasuredLinks() if links is None else links).times(token_bytes)
    hop_times = HopTimes((segment.node for segment in segments), origin, round_trips, measured)
    prices = _Prices(segments, origin, avoid, hop_times)
    found: list[_Trip] = []
    keeps_ends = False
    for reaches in choices:
        kept = _keep_ends(reaches, num_layers, origin)
        keeps_ends |= kept != list(reaches)
        found += prices.best_trips(_cut_to(along, kept) if along else kept, num_layers)
    if not found:
        return None
    best, *others = sorted(found)
    other = next((trip for trip in others if trip.hops != best.hops), None)  # a node may have the same layers twice
    return Path(best.hops, best.nanoseconds / NS_PER_S, prices.reason(best, other, keeps_ends=keeps_ends))


def _keep_ends(reaches: Iterable[Reach], num_layers: int, origin: str) -> list[Reach]:
    """Let no other node run first or last layers that the origin holds itself, because text is easily recovered there. There is
    always a path left, since the origin can run them."""
    own = [reach.layers for reach in reaches if reach.segment.node == origin]
    first = max((layers.end for layers in own if layers.start == 0), default=0)
    last = min((layers.start for layers in own if layers.end == num_layers), default=num_layers)
    return [reach for reach in (narrowed(one, origin, first, last) for one in reaches) if reach.layers.size > 0]


def _cut_to(hops: Iterable[Hop], reaches: Collection[Reach]) -> list[Reach]:
    return [
        Reach(reach.segment, hop.layers)
        for hop in hops
        for reach in reaches
        if reach.segment.node == hop.node and reach.layers.start <= hop.layers.start and hop.layers.end <= reach.layers.end
    ]


def narrowed(reach: Reach, owner: str, first: int, last: int) -> Reach:
    """Cut off the layers before `first` and from `last` on, unless the segment is the owner's."""
    if reach.segment.node == owner or (first <= reach.layers.start and reach.layers.end <= last):
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
    time: int  # of the hop
    trip: _Trip

    def leave(self, found: _Range, here: int) -> _Trip:
        trip, time = self.trip, self.time + found.rate * (here - self.at)
        return _Trip(
            trip.cost + found.toll + time,
            trip.foreign + found.foreign * (here - self.at),
            trip.length + 1,
            (*trip.stops, _Stop(found.node, LayerRange(self.at, here), found.full)),
            trip.nanoseconds + time,
            trip.shut if found.layers.end == here else (*trip.shut, found),
        )


_Inside = tuple[_Range, list[_Entry]]  # a range, and the best trips that are in it


class _Departures:
    """Trips that may go on from a layer, the best first.

    at: by their last node. The best two are enough: all have the same hops before them.
    by_way: ... with that node, by its way from the origin. Where a link was not measured, a hop takes the same from all of them.
    """

    def __init__(self, trips: Iterable[_Trip], origin: str, ways: Mapping[str, int]) -> None:
        self.at: dict[str, list[_Trip]] = defaultdict(list)
        self.by_way: dict[int, list[tuple[str, _Trip]]] = defaultdict(list)
        for trip in sorted(trips):
            node = trip.stops[-1].node if trip.stops else origin
            if len(self.at[node]) < 2:
                self.at[node].append(trip)
                self.by_way[ways[node]].append((node, trip))


class _Prices:
    """The costs of segments and hops for an origin, and the search with them."""

    def __init__(self, segments: Sequence[MetaModel], origin: str, avoid: Collection[str], hop_times: HopTimes) -> None:
        self._origin = origin
        self._avoid = avoid
        self._hop_times = hop_times
        measured = [segment for segment in segments if segment.seconds > 0]
        layers = sum(segment.layers.size for segment in measured)
        self._per_layer = sum(min(s.seconds, MAX_TRUSTED_S) for s in measured) / layers if layers else DEFAULT_LAYER_S

    def best_trips(self, reaches: Iterable[Reach], num_layers: int) -> list[_Trip]:
        """The best trip, and the second best if there is one. Goes from cut to cut, so that all trips to a layer are known before
        any leaves it.

        Of the trips into a range the best two are followed, and the best of those that left every range at its end: nothing is
        shut to that one, so it finds a path if there is any. Following every combination of shut ranges would take too long, and
        would find a better path in about one of a thousand small random networks. Nor does it try paths that stop at a node
        for a single layer only to avoid a slow link, if the ranges allow more: in random networks of three sites one of forty
        paths could be faster that way, by 2 % at most.
        """
        starting: dict[int, list[_Range]] = defaultdict(list)
        for found in sorted(self._ranges(reaches)):
            starting[found.layers.start].append(found)
        inside: list[_Inside] = []
        for here in sorted({0, num_layers, *starting, *(found.layers.end for some in starting.values() for found in some)}):
            ended = [one for one in inside if one[0].layers.end == here]
            if here == num_layers:
                return sorted(map(self._home, _left(ended, here)))[:2]
            onward = _left(inside if starting[here] else [], here) if here else [_Trip(0, 0, 0, (), 0)]
            inside = [one for one in inside if one[0].layers.end > here]
            if ended and inside:
                departures = self._departures(_left(ended, here))
                for found, entries in inside:
                    self._enter(found, here, departures, entries)
            if starting[here]:
                departures = self._departures(onward)
                for found in starting[here]:
                    inside.append((found, []))
                    self._enter(found, here, departures, inside[-1][1])
        return []

    def _departures(self, trips: Collection[_Trip]) -> list[_Departures]:
        """Those to which nothing is shut, and those with shut ranges."""
        parts = [trip for trip in trips if not trip.shut], [trip for trip in trips if trip.shut]
        return [_Departures(part, self._origin, self._hop_times.ways) for part in parts]

    def _enter(self, found: _Range, here: int, departures: Iterable[_Departures], entries: list[_Entry]) -> None:
        """Continue trips in a range, if they are among the best there."""
        times = self._hop_times.into(found.node)
        start = found.toll - found.rate * here
        for shut, leaving in enumerate(departures):
            for trip in leaving.at.get(found.node, ()):
                _add(entries, trip, 0, found, here)
            limit = _limit(entries, shut=bool(shut))
            for node in leaving.at.keys() & times.measured:
                if node == found.node:
                    continue
                for trip in leaving.at[node]:
                    if limit is None or trip.cost + times[node] + start <= limit.cost:
                        _add(entries, trip, times[node], found, here)
                        limit = _limit(entries, shut=bool(shut))
            for way, trips in leaving.by_way.items():
                time = times.unmeasured(way)
                entered = 0
                for node, trip in trips:
                    if entered == 2 or (limit is not None and trip.cost + time + start > limit.cost):
                        break  # the rest is worse
                    if node == found.node or node in times.measured or found in trip.shut:
                        continue
                    _add(entries, trip, time, found, here)
                    limit = _limit(entries, shut=bool(shut))
                    entered += 1

    def _home(self, trip: _Trip) -> _Trip:
        """Add the hop back to the origin."""
        time = self._hop_times.into(self._origin)[trip.stops[-1].node]
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
        toll = nanoseconds(FAILED_PENALTY_S * (segment.node in self._avoid) + FULL_PENALTY_S * full)
        return _Range(reach.layers, segment.node, self._rate(segment), toll, foreign, full)

    def _rate(self, segment: MetaModel) -> int:
        """Nanoseconds of a token in each layer, beside the other work of the node."""
        per_layer = segment.seconds / segment.layers.size if segment.seconds > 0 else self._per_layer
        load = max(segment.load, 0.0) if segment.load < MAX_LOAD else MAX_LOAD
        return nanoseconds(per_layer / (1 - load))

    def _troubles(self, trip: _Trip) -> list[str]:
        failed = [f"{stop.node} failed recently" for stop in trip.stops if stop.node in self._avoid]
        full = [f"all KV memory of {stop.node} is leased" for stop in trip.stops if stop.full]
        return list(dict.fromkeys([*failed, *full]))


def _left(inside: Iterable[_Inside], here: int) -> list[_Trip]:
    """The trips, as they are when they leave their ranges here."""
    return [entry.leave(found, here) for found, entries in inside for entry in entries]


def _limit(entries: Sequence[_Entry], *, shut: bool) -> _Entry | None:
    """The entry that another one must be better than to be followed, if there is one; `shut`: whether ranges are shut to it."""
    if len(entries) < 2:
        return None
    if shut:
        return entries[1]
    return None if all(entry.trip.shut for entry in entries) else entries[-1]


def _add(entries: list[_Entry], trip: _Trip, time: int, found: _Range, here: int) -> None:
    """Keep the best two entries, and the best of those to which nothing is shut."""
    if found in trip.shut:
        return
    cost = trip.cost + time + found.toll - found.rate * here
    insort(entries, _Entry(cost, trip.foreign - found.foreign * here, trip.length, trip.stops, here, time, trip))
    free = next((place for place, entry in enumerate(entries) if not entry.trip.shut), 0)
    entries[2:] = entries[free : free + 1] if free >= 2 else []


def _format_time(trip: _Trip) -> str:
    return f"{trip.nanoseconds / 1e6:.1f} ms"


def _arrows(trip: _Trip, origin: str) -> str:
    stops = [f"{stop.node} {stop.layers}" for stop in trip.stops]
    return " → ".join(stops if trip.stops[-1].node == origin else [*stops, origin])


def listed(things: Iterable[object]) -> str:
    """Join things for people: `"a, b and c"`."""
    *most, last = map(str, things)
    return f"{', '.join(most)} and {last}" if most else last
