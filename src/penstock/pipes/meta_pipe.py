"""MetaPipe: the segments of one model over all nodes, the layers that are missing, and the best path."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from penstock.domain.meta_model import Link, MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import NOTHING_PRIVATE, LayerRange, PrivateLayers
from penstock.pipes.hop_times import MeasuredLinks
from penstock.pipes.path import Path, Reach, best_path, listed, narrowed

ROUNDED = ("fp8", "int4", "int8")  # precisions of weights that a node has rounded itself; all others are as published
PUBLISHED = "as published"
WeightsOf = Callable[[LayerRange], str]  # the expected hash of the weights of these layers; empty if unknown


class Difference(NamedTuple):
    """Segments of the same layers with different weights. `holders` has the nodes of each weight hash."""

    layers: LayerRange
    dtype: str
    holders: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        sides = " and those of ".join(listed(nodes) for nodes in self.holders)
        return f"The weights of layers {self.layers} ({self.dtype}) of {sides} differ."


@dataclass(frozen=True)
class MetaPipe:
    """One model over all nodes. With an `owner`, only its own segments count for its private layers.

    Immutable: what follows from its segments is computed once, and shared by all users.
    """

    model: str
    shape: str  # fingerprint of the architecture
    num_layers: int
    segments: tuple[MetaModel, ...]
    owner: str = ""
    private: PrivateLayers = NOTHING_PRIVATE
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)  # by the node that has measured them

    def sharing(self, block_size: int) -> MetaPipe:
        """Keep only segments with this block size: all segments of a path must share it."""
        return self._keeping([segment for segment in self.segments if segment.block_size == block_size])

    def without(self, node: str, *, private: PrivateLayers, weights: WeightsOf | None) -> MetaPipe:
        """Keep only segments that the text of `node` may pass: no private layers on other nodes, and no different weights."""
        kept = self if weights is None else self._keeping([s for s in self.segments if s.node == node or not differs(s, weights)])
        return kept if private == kept.private == NOTHING_PRIVATE else replace(kept, owner=node, private=private)

    def missing(self) -> list[LayerRange]:
        """Layers that no usable segment holds."""
        return _holes(self._usable, self.num_layers)

    def bridge(self) -> LayerRange | None:
        """The smallest range that would complete the pipe if a node held it. None if no layer is missing."""
        holes = self.missing()
        return LayerRange(holes[0].start, holes[-1].end) if holes else None

    def is_complete(self) -> bool:
        """Whether there is a path."""
        return self._is_complete

    def explain(self) -> str:
        """Why the pipe cannot run. Empty if it is complete."""
        if self.is_complete():
            return ""
        if missing := self.missing():
            return f"Layers {listed(map(str, missing))} of {self.model} are missing."
        if mixed := precisions_differ(self.segments):
            return f"No route has all layers of {self.model} in one precision. {mixed}"
        sizes = listed(f"{size} at {listed(self._nodes_with(size))}" for size, _ in groupby(self._alike, itemgetter(0)))
        return f"The segments of {self.model} cannot work together because their KV block sizes differ: {sizes}."

    def path(
        self,
        origin: str,
        *,
        avoid: Collection[str] = (),
        round_trips: Mapping[str, float] = {},
        token_bytes: int = 0,
        block_size: int | None = None,
        along: Sequence[Hop] = (),
    ) -> Path | None:
        """The fastest predicted path from `origin` and back.

        round_trips: seconds, measured from the origin.
        token_bytes: size of the hidden state of one token.
        along: the only hops to use, to find out how fast a known path is now.
        """
        path = best_path(
            [reaches for size, reaches in self._alike if block_size in (None, size)],
            self.num_layers,
            origin,
            avoid=avoid,
            round_trips=round_trips,
            links=self.links if isinstance(self.links, MeasuredLinks) else MeasuredLinks(self.links),
            token_bytes=token_bytes,
            along=along,
        )
        return None if path is None else path._replace(kv_blocks=self._kv_blocks(path))

    def holding(self, hop: Hop) -> MetaModel | None:
        """The segment that a hop of a path passes."""
        return next((segment for segment in self.segments if segment.node == hop.node and _within(hop.layers, segment)), None)

    def holders(self, layer: int) -> list[MetaModel]:
        """The usable segments with this layer."""
        return [reach.segment for reach in self._usable if reach.layers.start <= layer < reach.layers.end]

    @cached_property
    def choices(self) -> frozenset[Hop]:
        """All hops that paths can be made of."""
        return frozenset(Hop(segment.layers, segment.node) for segment in self.segments)

    @cached_property
    def _usable(self) -> list[Reach]:
        """The segments that a path may use. Nodes that are leaving and impossible layer ranges are left out."""
        first, last = self.private.first, self.num_layers - self.private.last
        fitting = (
            Reach(segment, segment.layers)
            for segment in self.segments
            if not segment.draining and 0 <= segment.layers.start < segment.layers.end <= self.num_layers
        )
        return [reach for reach in (narrowed(one, self.owner, first, last) for one in fitting) if reach.layers.size > 0]

    @cached_property
    def _alike(self) -> list[tuple[int, list[Reach]]]:
        """Usable segments that can work together, with their block size: a path has one, and never mixes weights that were
        rounded with others."""
        groups: dict[tuple[int, str], list[Reach]] = {}
        for reach in self._usable:
            groups.setdefault((reach.segment.block_size, rounding(reach.segment)), []).append(reach)
        return [(size, reaches) for (size, _), reaches in sorted(groups.items(), key=itemgetter(0))]

    @cached_property
    def _is_complete(self) -> bool:
        return any(not _holes(reaches, self.num_layers) for _, reaches in self._alike)

    def _keeping(self, segments: Sequence[MetaModel]) -> MetaPipe:
        return self if len(segments) == len(self.segments) else replace(self, segments=tuple(segments))

    def _kv_blocks(self, path: Path) -> int:
        return min(
            segment.kv_blocks
            for hop in path.hops
            for segment in self.segments
            if segment.node == hop.node and _within(hop.layers, segment)
        )

    def _nodes_with(self, block_size: int) -> list[str]:
        return sorted({reach.segment.node for reach in self._usable if reach.segment.block_size == block_size})


def _holes(reaches: Iterable[Reach], num_layers: int) -> list[LayerRange]:
    """The layers that none of these has."""
    holes: list[LayerRange] = []
    held = 0
    for layers in sorted({reach.layers for reach in reaches}):
        if layers.start > held:
            holes.append(LayerRange(held, layers.start))
        held = max(held, layers.end)
    return [*holes, LayerRange(held, num_layers)] if held < num_layers else holes


def _within(layers: LayerRange, segment: MetaModel) -> bool:
    return segment.layers.start <= layers.start and layers.end <= segment.layers.end


def rounding(segment: MetaModel) -> str:
    """What the weights of a segment were rounded to, or PUBLISHED: as their file has them, in whatever number format."""
    return segment.dtype if segment.dtype in ROUNDED else PUBLISHED


def precisions_differ(segments: Iterable[MetaModel]) -> str:
    """Say which nodes have rounded their weights, and to what, where not all have them in one precision. Empty if they have."""
    holders: dict[str, set[str]] = {}
    for segment in segments:
        holders.setdefault(rounding(segment), set()).add(segment.node)
    if len(holders) < 2:
        return ""
    sides = listed(f"{each} at {listed(sorted(nodes))}" for each, nodes in sorted(holders.items()))
    return f"Precisions differ: {sides}. A route takes one of them; set the same quant on all nodes to use all."


def differs(segment: MetaModel, weights: WeightsOf | None) -> bool:
    """Whether a segment's weights are known to be different from the expected ones."""
    expected = "" if weights is None or segment.layers.end > segment.num_layers else weights(segment.layers)
    return bool(expected) and segment.weight_hash != expected


def weights_differ(segments: Iterable[MetaModel]) -> list[Difference]:
    """Find segments of the same layers and dtype whose weights differ: one of them is wrong."""
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
