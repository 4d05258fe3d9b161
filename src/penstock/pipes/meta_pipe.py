"""The logical pipe of one model over all nodes: which layers are there, and which path one token had best take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from penstock.domain.meta_model import MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import LayerRange, PrivateLayers

WeightsOf = Callable[[LayerRange], str]  # the hash that the weights of these layers should have; empty where that is not known

PER_LAYER = 0.001  # seconds that a layer is expected to take where nothing at all was measured
ROUND_TRIP = 0.001  # seconds, to a node that was not asked yet
MOST_LOAD = 0.9  # above it the share says little, and a division by almost nothing would rule the choice
LONGEST = 1e6  # seconds; what a peer says beyond is not believed
FAILED = 60.0  # seconds that are added for a node that failed lately: worse than any detour, better than no answer
AWAY = 1000.0  # for the first or the last layers elsewhere, where the origin has them too: text is easily read off those
FULL = 10.0  # for a node whose KV memory is leased: it may give some back, and asking costs time
_SECOND = 1_000_000_000  # costs are whole nanoseconds: sums are exact, so equal paths compare as equal


class Path(NamedTuple):
    hops: tuple[Hop, ...]  # from layer 0 to the last
    seconds: float  # predicted for one token
    why: str  # it was taken, in a sentence for people


class Break(NamedTuple):
    """Every layer is held, and still no path leads through, since a segment is entered at its start only."""

    reached: int  # as far as a path from layer 0 comes: no segment starts here
    inside: tuple[LayerRange, ...]  # the ranges that hold this layer but start before it
    bridge: LayerRange  # the smallest range that would join the others to a path


class Difference(NamedTuple):
    """Segments that should be the same and are not: `holders` has the nodes of each weight hash."""

    layers: LayerRange
    dtype: str
    holders: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        sides = " and those of ".join(_listed(nodes) for nodes in self.holders)
        return f"The weights of layers {self.layers} ({self.dtype}) of {sides} are not the same."


@dataclass(frozen=True, slots=True)
class MetaPipe:
    model: str
    shape: str  # fingerprint of the architecture
    num_layers: int
    segments: tuple[MetaModel, ...]

    def sharing(self, block_size: int) -> MetaPipe:
        """The part of it that can be on one path with segments of this block size."""
        kept = tuple(segment for segment in self.segments if segment.block_size == block_size)
        return MetaPipe(self.model, self.shape, self.num_layers, kept)

    def without(self, node: str, *, private: PrivateLayers, weights: WeightsOf | None) -> MetaPipe:
        """The part of it that the text of `node` may pass: no other has its private layers, or weights that are not the same."""
        first, last = private.first, self.num_layers - private.last
        kept = tuple(
            segment
            for segment in self.segments
            if segment.node == node
            or (segment.layers.start >= first and segment.layers.end <= last and not differs(segment, weights))
        )
        return MetaPipe(self.model, self.shape, self.num_layers, kept)

    def missing(self) -> list[LayerRange]:
        """Layers that no usable segment holds."""
        holes: list[LayerRange] = []
        held = 0
        for segment in sorted(self._usable(), key=lambda segment: segment.layers):
            if segment.layers.start > held:
                holes.append(LayerRange(held, segment.layers.start))
            held = max(held, segment.layers.end)
        return [*holes, LayerRange(held, self.num_layers)] if held < self.num_layers else holes

    def broken_at(self) -> Break | None:
        """Where the ranges do not meet although they hold every layer; None when they do meet, or when layers are missing."""
        bridge = self.bridge()
        if bridge is None or self.missing():
            return None
        reached = max(self._reached())
        inside = {segment.layers for segment in self._usable() if segment.layers.start < reached < segment.layers.end}
        return Break(reached, tuple(sorted(inside)), bridge)

    def bridge(self) -> LayerRange | None:
        """The smallest range that would complete the pipe if somebody held it; None when the ranges make a path."""
        starts, ends = self._reached(), self._leading_home()
        if self.num_layers in starts:
            return None
        return min(
            (LayerRange(start, end) for start in starts for end in ends if start < end), key=lambda found: (found.size, found)
        )

    def is_complete(self) -> bool:
        """Whether there is a path."""
        return any(self.num_layers in self.sharing(size)._reached() for size in self._block_sizes())

    def explain(self) -> str:
        """What keeps the pipe from running; nothing when it is complete."""
        if self.is_complete():
            return ""
        if missing := self.missing():
            return f"Layers {_listed(map(str, missing))} of {self.model} are missing."
        if broken := self.broken_at():
            return (
                f"All layers of {self.model} are held, but the ranges do not meet: nobody starts at layer {broken.reached}, "
                f"which is inside {_listed(map(str, broken.inside))}. Layers {broken.bridge} would join them."
            )
        sizes = _listed(f"{size} at {_listed(self._nodes_with(size))}" for size in self._block_sizes())
        return f"The segments of {self.model} cannot work together, since their KV blocks differ in size: {sizes}."

    def path(
        self,
        origin: str,
        *,
        avoid: Collection[str] = (),
        round_trips: Mapping[str, float] = {},
        block_size: int | None = None,
    ) -> Path | None:
        """The path of least predicted time from `origin` and home again. `round_trips` are those from the origin, in seconds."""
        sizes = self._block_sizes() if block_size is None else [block_size]
        prices = _Prices(self._usable(), self.num_layers, origin, avoid, round_trips)
        found = sorted(trip for size in sizes for trip in self.sharing(size)._best_trips(prices))
        if not found:
            return None
        best = found[0]
        other = next((trip for trip in found if trip.hops != best.hops), None)  # a node may have the same layers twice
        return Path(best.hops, best.nanoseconds / _SECOND, prices.reason(best, other))

    def _best_trips(self, prices: _Prices) -> list[_Trip]:
        """The best trip, and the next best if there is one. Segments lead to higher layers only, so in the order of their
        starts each place is known before something leaves it."""
        standing: dict[int, dict[str, list[_Trip]]] = {0: {prices.origin: [_NOWHERE]}}  # by layer and node: the two best
        for segment in sorted(self._distinct(prices), key=lambda segment: segment.layers):
            start, end = segment.layers
            leaving = [trip for trips in standing.get(start, {}).values() for trip in trips]
            if leaving:
                nearest = nsmallest(2, leaving, key=lambda trip: prices.to(segment.node, trip))
                here = standing.setdefault(end, {})
                arriving = [prices.extend(trip, segment) for trip in nearest]
                here[segment.node] = sorted([*here.get(segment.node, []), *arriving])[:2]
        arrived = standing.get(self.num_layers, {}).values()
        return sorted(prices.to(prices.origin, trip) for trips in arrived for trip in trips)[:2]

    def _distinct(self, prices: _Prices) -> Iterable[MetaModel]:
        """Of a node's segments with the same layers the best one: a hop does not tell them apart."""
        best: dict[Hop, MetaModel] = {}
        for segment in sorted(self._usable(), key=lambda segment: (prices.is_full(segment), prices.segment(segment))):
            best.setdefault(Hop(segment.layers, segment.node), segment)
        return best.values()

    def _usable(self) -> list[MetaModel]:
        """What is leaving counts no more, and what cannot be part of this model never did."""
        return [
            segment
            for segment in self.segments
            if not segment.draining and 0 <= segment.layers.start < segment.layers.end <= self.num_layers
        ]

    def _block_sizes(self) -> list[int]:
        return sorted({segment.block_size for segment in self._usable()})

    def _nodes_with(self, block_size: int) -> list[str]:
        return sorted({segment.node for segment in self._usable() if segment.block_size == block_size})

    def _reached(self) -> set[int]:
        """Layers before which something can stand that came from layer 0."""
        reached = {0}
        for start, end in sorted(segment.layers for segment in self._usable()):
            if start in reached:
                reached.add(end)
        return reached

    def _leading_home(self) -> set[int]:
        """Layers from which something comes to the end."""
        leading = {self.num_layers}
        for start, end in sorted((segment.layers for segment in self._usable()), reverse=True):
            if end in leading:
                leading.add(start)
        return leading


def differs(segment: MetaModel, weights: WeightsOf | None) -> bool:
    """Whether its weights are known not to be those that they should be."""
    expected = "" if weights is None or segment.layers.end > segment.num_layers else weights(segment.layers)
    return bool(expected) and segment.weight_hash != expected


def weights_differ(segments: Iterable[MetaModel]) -> list[Difference]:
    """Segments of the same layers and number format whose weights are not the same: one of them is not what it says."""
    holders: dict[tuple[LayerRange, str], dict[str, set[str]]] = {}
    for segment in segments:
        if segment.weight_hash:
            hashes = holders.setdefault((segment.layers, segment.dtype), {})
            hashes.setdefault(segment.weight_hash, set()).add(segment.node)
    return [
        Difference(layers, dtype, tuple(sorted(tuple(sorted(nodes)) for nodes in hashes.values())))
        for (layers, dtype), hashes in sorted(holders.items())
        if len(hashes) > 1
    ]


# ---- what a path costs ----


class _Stop(NamedTuple):
    node: str
    layers: LayerRange
    full: bool  # its KV memory is leased


class _Trip(NamedTuple):
    """Part of a path; the smaller one is taken. Beside the cost, ties are broken in the order of the fields."""

    cost: int  # nanoseconds, with what is added for trouble
    foreign: int  # layers that are not the origin's own
    length: int
    stops: tuple[_Stop, ...]
    nanoseconds: int  # without

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(Hop(stop.layers, stop.node) for stop in self.stops)


_NOWHERE = _Trip(0, 0, 0, (), 0)


class _Prices:
    """What segments and hops cost an origin, and how it says so."""

    def __init__(
        self,
        segments: Sequence[MetaModel],
        num_layers: int,
        origin: str,
        avoid: Collection[str],
        round_trips: Mapping[str, float],
    ) -> None:
        self._num_layers = num_layers
        self.origin, self._avoid, self._round_trips = origin, avoid, round_trips
        self._own = {end for segment in segments if segment.node == origin for end in segment.layers}  # where its ranges end
        self._ways = {origin: 0}
        measured = [segment for segment in segments if segment.seconds > 0]
        layers = sum(segment.layers.size for segment in measured)
        self._per_layer = sum(min(s.seconds, LONGEST) for s in measured) / layers if layers else PER_LAYER

    def segment(self, segment: MetaModel) -> int:
        """Nanoseconds that a token takes in it, beside the other work of its node."""
        seconds = segment.seconds if segment.seconds > 0 else self._per_layer * segment.layers.size
        load = max(segment.load, 0.0) if segment.load < MOST_LOAD else MOST_LOAD
        return _nanoseconds(seconds / (1 - load))

    def is_full(self, segment: MetaModel) -> bool:
        return segment.kv_free < 1 and segment.node != self.origin

    def to(self, node: str, trip: _Trip) -> _Trip:
        """The trip with the hop to this node."""
        time = self._hop(trip.stops[-1].node if trip.stops else self.origin, node)
        return trip._replace(cost=trip.cost + time, nanoseconds=trip.nanoseconds + time) if time else trip

    def extend(self, trip: _Trip, segment: MetaModel) -> _Trip:
        trip, time = self.to(segment.node, trip), self.segment(segment)
        stop = _Stop(segment.node, segment.layers, self.is_full(segment))
        return _Trip(
            trip.cost + time + self._penalty(stop),
            trip.foreign + (segment.layers.size if segment.node != self.origin else 0),
            trip.length + 1,
            (*trip.stops, stop),
            trip.nanoseconds + time,
        )

    def reason(self, taken: _Trip, other: _Trip | None) -> str:
        """Why `taken`, when `other` is the next best."""
        troubles = self._troubles(taken)
        although = f", although {_listed(troubles)}" if troubles else ""
        if other is None:
            return f"It is the only one{although}."
        detour = _arrows(other, self.origin)
        if other.cost - other.nanoseconds > taken.cost - taken.nanoseconds:
            worse = self._troubles(other)
            new = [trouble for trouble in worse if trouble not in troubles]
            return f"It is taken rather than {detour}, because {_listed(new or worse)}{although}."
        if other.cost > taken.cost:
            return f"It is the quickest with {_told_time(taken)} per token; {detour} would take {_told_time(other)}{although}."
        if other.foreign > taken.foreign:
            merit = f"keeps more layers on {self.origin}"
        else:
            merit = "has fewer hops" if other.length > taken.length else "comes first by name"
        return f"It is as quick as {detour}, and {merit}{although}."

    def _hop(self, here: str, there: str) -> int:
        """Half a round trip. Between two others the longer of both is taken: how far they are apart, only they know."""
        if here == there:
            return 0
        return max(self._way(here), self._way(there))

    def _way(self, node: str) -> int:
        """From the origin."""
        if node not in self._ways:
            self._ways[node] = _nanoseconds(self._round_trips.get(node, ROUND_TRIP) / 2)
        return self._ways[node]

    def _penalty(self, stop: _Stop) -> int:
        return _nanoseconds(FAILED * (stop.node in self._avoid) + FULL * stop.full + AWAY * self._is_away(stop))

    def _is_away(self, stop: _Stop) -> bool:
        outer = {0, self._num_layers} & {*stop.layers} & self._own
        return stop.node != self.origin and bool(outer)

    def _troubles(self, trip: _Trip) -> list[str]:
        failed = [f"{stop.node} failed lately" for stop in trip.stops if stop.node in self._avoid]
        full = [f"{stop.node} has no free KV memory" for stop in trip.stops if stop.full]
        away = [f"{stop.node} is not to have the layers at the ends" for stop in trip.stops if self._is_away(stop)]
        return list(dict.fromkeys([*away, *failed, *full]))


def _nanoseconds(seconds: float) -> int:
    return round(min(max(seconds, 0.0), LONGEST) * _SECOND)


def _told_time(trip: _Trip) -> str:
    return f"{trip.nanoseconds / 1e6:.1f} ms"


def _arrows(trip: _Trip, origin: str) -> str:
    stops = [f"{stop.node} {stop.layers}" for stop in trip.stops]
    return " → ".join(stops if trip.stops[-1].node == origin else [*stops, origin])


def _listed(names: Iterable[str]) -> str:
    """`"a, b and c"`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
