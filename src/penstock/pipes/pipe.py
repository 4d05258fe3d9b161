"""Pipe: the segments of one model, on this node and on others, and the way to send messages to those."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.domain.hidden_format import HiddenFormat, row_bytes
from penstock.domain.messages import Control, Mark, Message
from penstock.domain.meta_model import Link
from penstock.domain.route import Hop
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.model.segment import Segment
from penstock.pipes.hidden_codec import pack
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.path import Path
from penstock.pipes.pipe_ids import pipe_of


class MessageSender(Protocol):
    """Sends messages to other nodes without blocking."""

    def send(self, node: str, message: Message) -> None: ...


class View(Protocol):
    """The present state of a model in the network, this node included. It changes on other threads, so two reads may differ."""

    def pipe(self) -> MetaPipe: ...

    def epochs(self) -> Mapping[str, int]:
        """The epoch of every live node."""

    def draining(self) -> frozenset[str]:
        """Nodes that announced that they will leave."""


class VirtualSegment(NamedTuple):
    """A segment on another node: where it is, without its weights."""

    node: str
    layers: LayerRange
    pipe: str  # the id of its pipe
    process: str


class Pipe:
    """`segments` are the local ones. In a network, `view` has those of all nodes. `width` is that of a hidden state.

    hidden_format: the format in which hidden states of this node's jobs travel, on all routes.
    kv_windows: of the groups that the model's layers are in (WindowGroups). They follow from the shape, so that all nodes agree.
    context: how many tokens a text can have, which follows from the shape, too; None for any number.
    """

    def __init__(
        self,
        model: str,
        num_layers: int,
        segments: Sequence[Segment],
        *,
        node: str = "local",
        shape: str = "",
        width: int = 0,
        hidden_format: HiddenFormat = "float32",
        kv_windows: Sequence[int | None] = (None,),
        context: int | None = None,
        wire: MessageSender | None = None,
        view: View | None = None,
    ) -> None:
        self.model = model
        self.num_layers = num_layers
        self.node = node
        self.shape = shape
        self.kv_windows = tuple(kv_windows)
        self.context = context
        self.hidden_format = hidden_format
        self.token_bytes = row_bytes(hidden_format, width)
        self.segments = sorted(segments, key=lambda segment: segment.layers)
        self._wire = wire
        self._view = view

    @property
    def networked(self) -> bool:
        return self._view is not None

    def get_layer(self, layer: int) -> Segment | VirtualSegment | None:
        """The segment that holds this layer: a local one, else the one on the best path, else any. None if no node has it."""
        if local := self._local(layer):
            return local
        if self._view is None:
            return None
        pipe, path = self._view.pipe(), self.path()
        hops = () if path is None else path.hops
        on_path = [pipe.holding(hop) for hop in hops if hop.layers.start <= layer < hop.layers.end]
        found = next(iter([*filter(None, on_path), *pipe.holders(layer)]), None)
        return None if found is None else VirtualSegment(found.node, found.layers, pipe_of(found), found.process)

    def pipe_ids(self, hops: Iterable[Hop]) -> tuple[str, ...]:
        """The ids of the pipes that a path passes, in order; none without a network."""
        found = () if self._view is None else map(self._view.pipe().holding, hops)
        return tuple(dict.fromkeys(pipe_of(segment) for segment in found if segment is not None))

    def is_complete(self) -> bool:
        """Whether some path leads from the first layer to the last."""
        return self._local_hops() is not None if self._view is None else self._view.pipe().is_complete()

    def explain(self) -> str:
        """Why the pipe cannot run. Empty if it is complete."""
        if self._view is not None:
            return self._view.pipe().explain()
        return "" if self.is_complete() else f"Layers of {self.model} are missing."

    def path(
        self,
        *,
        avoid: Collection[str] = (),
        round_trips: Mapping[str, float] | None = None,
        block_size: int | None = None,
        along: Sequence[Hop] = (),
    ) -> Path | None:
        """The path through all layers with the least predicted time; `along`: as in `MetaPipe.path`."""
        if self._view is None:
            hops = self._local_hops()
            return None if hops is None else Path(hops, 0.0, "All layers are on this node.", self._local_kv_blocks())
        return self._view.pipe().path(
            self.node,
            avoid=avoid,
            round_trips=round_trips or {},
            token_bytes=self.token_bytes,
            block_size=block_size,
            along=along,
        )

    def choices(self) -> frozenset[Hop]:
        """All hops that paths can be made of."""
        return frozenset() if self._view is None else self._view.pipe().choices

    def links(self) -> Mapping[str, tuple[Link, ...]]:
        """What nodes have measured between them, by the node that has."""
        return {} if self._view is None else self._view.pipe().links

    def epochs(self) -> Mapping[str, int]:
        return {} if self._view is None else self._view.epochs()

    def draining(self) -> frozenset[str]:
        return frozenset() if self._view is None else self._view.draining()

    def send_job(self, node: str, job: NetworkJob) -> None:
        """Send a NetworkJob to another node."""
        if job.hidden is not None:
            job.hidden = pack(job.hidden, job.format or self.hidden_format)
        self._send(node, job)

    def send_control(self, node: str, message: Control) -> None:
        self._send(node, message)

    def send_mark(self, node: str, mark: Mark) -> None:
        """Send a Mark after the NetworkJobs that were sent before it."""
        self._send(node, mark)

    @property
    def kv_blocks(self) -> int:
        """Blocks of the smallest segment on the path: the most that a sequence can hold. Without a path, of the local ones."""
        path = self.path()
        return self._local_kv_blocks() if path is None else path.kv_blocks

    def _send(self, node: str, message: Message) -> None:
        assert self._wire is not None, "a pipe without a network cannot send"
        self._wire.send(node, message)

    def _local(self, layer: int) -> Segment | None:
        return next((segment for segment in self.segments if segment.layers.start <= layer < segment.layers.end), None)

    def _local_kv_blocks(self) -> int:
        return min((segment.kv_blocks for segment in self.segments), default=0)

    def _local_hops(self) -> tuple[Hop, ...] | None:
        hops: list[Hop] = []
        layer = 0
        while layer < self.num_layers:
            segment = self._local(layer)
            if segment is None:
                return None
            hops.append(Hop(LayerRange(layer, segment.layers.end), self.node))
            layer = segment.layers.end
        return tuple(hops)
