"""A simulated node: an engine over fake layers that is turned by hand, with its own clock and its own idea of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.messages import Message
from penstock.domain.meta_model import MetaModel, NodeRecord
from penstock.domain.topology import NOTHING_PRIVATE, LayerRange, PrivateLayers
from penstock.engine.engine import Engine
from penstock.engine.job_receiver import JobReceiver
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.heartbeat import Heartbeat
from penstock.engine.routing.origin import Origin
from penstock.model.batch import BatchPiece
from penstock.network.codec import PROTOCOL, decode
from penstock.pipes.meta_pipe import MetaPipe
from penstock.pipes.pipe import Pipe
from penstock.pipes.router_pipes import RouterPipes
from tests.engine.fakes import FAR, FakeEnds, FakeSegment, FakeStream

if TYPE_CHECKING:
    from tests.engine.world import World

MODEL, SHAPE = "fake", "s1"


class FakeLayers(FakeSegment):
    """Every layer has a KV of its own, so that what comes out does not depend on how the layers are cut."""

    def __init__(
        self, start: int, end: int, blocks: int, block_size: int, spend: Callable[[int], None], window: int = FAR
    ) -> None:
        super().__init__(start, end, blocks, block_size)
        self._each = [FakeSegment(layer, layer + 1, blocks, block_size, window) for layer in range(start, end)]
        self._spend = spend

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        self._spend(hidden.shape[0])
        if self.break_next is not None:
            error, self.break_next = self.break_next, None
            raise error
        for layer in self._each:
            if layers is None or layers.start <= layer.layers.start < layers.end:
                hidden = layer.process(hidden, pieces)
        return hidden


@dataclass(frozen=True)
class Place:
    """A node before it starts: `ranges` are the layers that it holds, `ends` whether it takes jobs; a pass takes `seconds`, and
    `per_token` more for each token in it. `private` are the layers that no other computes for its jobs."""

    name: str
    ranges: tuple[tuple[int, int], ...] = ()
    ends: bool = False
    blocks: int = 24
    seconds: float = 0.0
    per_token: float = 0.0
    config: EngineConfig | None = None
    private: PrivateLayers = NOTHING_PRIVATE


class Node:
    """A running node. It is the wire and the view of its own pipe."""

    def __init__(self, world: World, place: Place, epoch: int) -> None:
        self.world, self.place, self.name, self.epoch = world, place, place.name, epoch
        self.alive = True
        self.draining = False
        self.stopped = False  # all its threads, as by SIGSTOP
        self.local = world.now  # until when it computes
        self._elsewhere = False
        self.records: tuple[NodeRecord, ...] = ()
        self._issue = -1
        self._pipe: MetaPipe | None = None
        config = place.config or world.config
        window = world.window
        segments = [FakeLayers(a, b, place.blocks, config.block_size, self._spend, window or FAR) for a, b in place.ranges]
        view = _View(self)
        pipe = Pipe(MODEL, world.layers, segments, node=self.name, shape=SHAPE, kv_window=window, wire=self, view=view)
        ends, text = (FakeEnds(), lambda skip_special: FakeStream()) if place.ends else (None, None)
        self.engine = Engine(
            config,
            pipe,
            ends,
            text,
            routing=RoutingConfig(epoch=epoch, lease=world.lease, recovery_timeout=world.recovery_timeout),
            clock=self.clock,
        )
        beat = _PassingTime(self)
        self.engine.heartbeat = self.engine.host._heartbeat = self.engine._context.heartbeat = beat
        self.engine._reception._heartbeat = beat
        self.receiver = JobReceiver(decode, {MODEL: self.engine}, self.send, clock=self.clock)

    def clock(self) -> float:
        """The compute thread is as far as its present pass; the others are where the world is."""
        return self.world.now if self._elsewhere else max(self.world.now, self.local)

    @contextmanager
    def other_thread(self) -> Iterator[None]:
        """What is done here is done by the threads of the network, also while the node computes."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def receive(self, sender: str, data: bytes) -> None:
        with self.other_thread():
            self.receiver.on_message(sender, data)

    def keep_alive(self) -> None:
        with self.other_thread():
            self.engine.keep_alive()

    def send(self, node: str, message: Message) -> None:
        self.world.post(self, node, message)

    @property
    def origin(self) -> Origin:
        assert isinstance(self.engine.origin, Origin)
        return self.engine.origin

    @property
    def meta_pipe(self) -> MetaPipe:
        if self._pipe is None:
            found = RouterPipes(lambda: self.records).find(MODEL, SHAPE, self.world.layers)
            self._pipe = found.without(self.name, private=self.place.private, weights=None)
        return self._pipe

    def hear(self, issue: int, records: tuple[NodeRecord, ...]) -> None:
        if issue < self._issue:
            return  # newer ones were quicker
        self._issue, self.records, self._pipe = issue, records, None
        self.engine.on_network_change()

    def work(self) -> None:
        for _ in range(20_000):
            self.engine.take_commands(wait=False)
            if not self.engine.turn() or self.local > self.world.now:
                return
        raise AssertionError(f"node {self.name} never comes to rest")

    def record(self) -> NodeRecord:
        engine = self.engine
        segments = tuple(
            MetaModel(
                node=self.name,
                process=f"{self.epoch}.{start}",
                model=MODEL,
                pipe=f"{MODEL}/{SHAPE}",
                shape=SHAPE,
                num_layers=self.world.layers,
                layers=stage.segment.layers,
                weight_hash=stage.segment.weight_hash,
                dtype="float32",
                device="cpu",
                kv_blocks=stage.segment.kv_blocks,
                kv_free=stage.unleased,
                block_size=engine.config.block_size,
                seconds=0.001,
            )
            for start, stage in engine.stages.items()
        )
        return NodeRecord(
            node=self.name,
            epoch=self.epoch,
            version="0",
            protocol=PROTOCOL,
            pid=1,
            draining=self.draining,
            serves=(MODEL,) if self.place.ends else (),
            segments=segments,
        )

    def _spend(self, tokens: int) -> None:
        place = self.place
        if place.seconds or place.per_token:
            self.local = self.clock() + place.seconds + place.per_token * tokens


class _PassingTime(Heartbeat):
    """A pass is computed at its beginning, and takes until `local`: in between, its beginning was the last sign of life."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.clock)
        self._node = node
        self._began = 0.0

    @property
    def age(self) -> float:
        return super().age if self._node.local <= self._node.world.now else self._node.world.now - self._began

    @contextmanager
    def in_pass(self, expected: float) -> Iterator[None]:
        self._began = self._clock()
        with super().in_pass(expected):
            yield
        self.expected = expected if self._node.local > self._node.world.now else 0.0


class _View:
    def __init__(self, node: Node) -> None:
        self._node = node

    def pipe(self) -> MetaPipe:
        return self._node.meta_pipe

    def epochs(self) -> Mapping[str, int]:
        return {record.node: record.epoch for record in self._node.records}

    def draining(self) -> frozenset[str]:
        return frozenset(record.node for record in self._node.records if record.draining)
