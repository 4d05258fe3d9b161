"""A Pipe: one model's segments, those on this node and those of other nodes, and how to hand NetworkJobs on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from penstock.domain.messages import Control, Message
from penstock.domain.route import Hop
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.model.segment import Segment
from penstock.pipes.hidden import pack
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.path import Path


class MessageSender(Protocol):
    """How messages leave this node. It never waits."""

    def send(self, node: str, message: Message) -> None: ...


class View(Protocol):
    """What the network holds of a model at this moment, this node included. Two reads may differ: it changes on other threads."""

    def pipe(self) -> MetaPipe: ...

    def epochs(self) -> Mapping[str, int]:
        """The present life (epoch) of every node that is there."""

    def draining(self) -> frozenset[str]:
        """Nodes that announced to leave."""


class Pipe:
    """`segments` are the local ones. Without a network they are all that there is; with one, `view` tells of the others."""

    def __init__(
        self,
        model: str,
        num_layers: int,
        segments: Sequence[Segment],
        *,
        node: str = "local",
        shape: str = "",
        wire: MessageSender | None = None,
        view: View | None = None,
    ) -> None:
        self.model, self.num_layers, self.node, self.shape = model, num_layers, node, shape
        self.segments = sorted(segments, key=lambda segment: segment.layers)
        self._wire, self._view = wire, view

    @property
    def networked(self) -> bool:
        return self._view is not None

    def get_layer(self, layer: int) -> Segment | None:
        """The local segment that holds this layer."""
        return next((segment for segment in self.segments if segment.layers.start <= layer < segment.layers.end), None)

    def is_complete(self) -> bool:
        """Whether some path leads from the first layer to the last."""
        return self._local_hops() is not None if self._view is None else self._view.pipe().is_complete()

    def explain(self) -> str:
        """What an incomplete pipe lacks; empty when it is complete."""
        if self._view is not None:
            return self._view.pipe().explain()
        return "" if self.is_complete() else f"Layers of {self.model} are missing."

    def path(
        self, *, avoid: Collection[str] = (), round_trips: Mapping[str, float] | None = None, block_size: int | None = None
    ) -> Path | None:
        """The way through all layers that should take the least time now."""
        if self._view is None:
            hops = self._local_hops()
            return None if hops is None else Path(hops, 0.0, "All layers are on this node.", self._local_kv_blocks())
        return self._view.pipe().path(self.node, avoid=avoid, round_trips=round_trips or {}, block_size=block_size)

    def choices(self) -> frozenset[Hop]:
        """All that paths can be made of."""
        return (
            frozenset() if self._view is None else frozenset(Hop(meta.layers, meta.node) for meta in self._view.pipe().segments)
        )

    def epochs(self) -> Mapping[str, int]:
        return {} if self._view is None else self._view.epochs()

    def draining(self) -> frozenset[str]:
        return frozenset() if self._view is None else self._view.draining()

    def send_job(self, node: str, job: NetworkJob) -> None:
        """Hand a NetworkJob on to another node."""
        if job.hidden is not None:
            job.hidden = pack(job.hidden)
        self._send(node, job)

    def send_control(self, node: str, message: Control) -> None:
        self._send(node, message)

    @property
    def kv_blocks(self) -> int:
        """What a sequence can hold is what the smallest segment of its path can. While there is none, what is here counts."""
        path = self.path()
        return self._local_kv_blocks() if path is None else path.kv_blocks

    def _send(self, node: str, message: Message) -> None:
        assert self._wire is not None, "a pipe without a network has nobody to send to"
        self._wire.send(node, message)

    def _local_kv_blocks(self) -> int:
        return min((segment.kv_blocks for segment in self.segments), default=0)

    def _local_hops(self) -> tuple[Hop, ...] | None:
        hops: list[Hop] = []
        layer = 0
        while layer < self.num_layers:
            segment = self.get_layer(layer)
            if segment is None:
                return None
            hops.append(Hop(LayerRange(layer, segment.layers.end), self.node))
            layer = segment.layers.end
        return tuple(hops)
