"""MetaPipe: the segments of one model over all nodes, the layers that are missing, and the best path."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.domain.meta_model import Link, MetaModel
from penstock.domain.route import Hop
from penstock.domain.topology import NOTHING_PRIVATE, LayerRange, PrivateLayers
from penstock.pipes.hop_times import MeasuredLinks
from penstock.pipes.path import Path, Reach, best_path, listed, narrowed

ROUNDED = ("int4", "int8")  # precisions of weights that a node has rounded itself; all others are as published
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


@dataclass(frozen=True, slots=True)
class MetaPipe:
    """One model over all nodes. With an `owner`, only its own segments count for its private layers."""

    model: str
    shape: str  # fingerprint of the architecture
    num_layers: int
    segments: tuple[MetaModel, ...]
    owner: str = ""
    private: PrivateLayers = NOTHING_PRIVATE
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)  # by the node that has measured them

    def sharing(self, block_size: int) -> MetaPipe:
        """Keep only segments with this block size: all segments of a path must share it."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.block_size == block_size))

    def without(self, node: str, *, private: PrivateLayers, weights: WeightsOf | None) -> MetaPipe:
        """Keep only what the text of `node` may pass: no other node runs its private layers, or has different weights."""
        kept = tuple(segment for segment in self.segments if segment.node == node or not differs(segment, weights))
        return replace(self, segments=kept, owner=node, private=private)

    def missing(self) -> list[LayerRange]:
        """Layers that no usable segment holds."""
        holes: list[LayerRange] = []
        held = 0
        for layers in sorted(reach.layers for reach in self._usable()):
            if layers.start > held:
                holes.append(LayerRange(held, layers.start))
            held = max(held, layers.end)
        return [*holes, LayerRange(held, self.num_layers)] if held < self.num_layers else holes

    def bridge(self) -> LayerRange | None:
        """The smallest range that would complete the pipe if a node held it. None if no layer is missing."""
        holes = self.missing()
        return LayerRange(holes[0].start, holes[-1].end) if holes else None

    def is_complete(self) -> bool:
        """Whether there is a path."""
        return any(not alike.missing() for size in self._block_sizes() for alike in self.sharing(size)._by_rounding())

    def explain(self) -> str:
        """Why the pipe cannot run. Empty if it is complete."""
        if self.is_complete():
            return ""
        if missing := self.missing():
            return f"Layers {listed(map(str, missing))} of {self.model} are missing."
        if mixed := precisions_differ(self.segments):
            return f"No route has all layers of {self.model} in one precision. {mixed}"
        sizes = listed(f"{size} at {listed(self._nodes_with(size))}" for size in self._block_sizes())
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
        along: the only hops to use, to learn what a path would take now.
        """
        sizes = self._block_sizes() if block_size is None else [block_size]
        choices = [alike._usable() for size in sizes for alike in self.sharing(size)._by_rounding()]
        path = best_path(
            choices,
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
        return [reach.segment for reach in self._usable() if reach.layers.start <= layer < reach.layers.end]

    def _usable(self) -> list[Reach]:
        """The segments that a path may use. Nodes that are leaving and impossible layer ranges are left out."""
        first, last = self.private.first, self.num_layers - self.private.last
        fitting = (
            Reach(segment, segment.layers)
            for segment in self.segments
            if not segment.draining and 0 <= segment.layers.start < segment.layers.end <= self.num_layers
        )
        return [reach for reach in (narrowed(one, self.owner, first, last) for one in fitting) if reach.layers.size > 0]

    def _kv_blocks(self, path: Path) -> int:
        return min(
            segment.kv_blocks
            for hop in path.hops
            for segment in self.segments
            if segment.node == hop.node and _within(hop.layers, segment)
        )

    def _by_rounding(self) -> list[MetaPipe]:
        """The pipe with segments of one precision each: a path never mixes weights that were rounded with others."""
        found = sorted({rounding(segment) for segment in self.segments})
        return [replace(self, segments=tuple(one for one in self.segments if rounding(one) == each)) for each in found]

    def _block_sizes(self) -> list[int]:
        return sorted({reach.segment.block_size for reach in self._usable()})

    def _nodes_with(self, block_size: int) -> list[str]:
        return sorted({reach.segment.node for reach in self._usable() if reach.segment.block_size == block_size})


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
