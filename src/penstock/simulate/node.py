"""A simulated node: an engine stepped by the simulation, with its own clock and its own view of the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from penstock.config.engine import EngineConfig
from penstock.domain.messages import Message
from penstock.domain.meta_model import MetaModel, NodeRecord
from penstock.domain.topology import NOTHING_PRIVATE, LayerRange, PrivateLayers
from penstock.engine.engine import Engine
from penstock.engine.job_receiver import JobReceiver
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.host.heartbeat import Heartbeat
from penstock.engine.routing.host.stage import Stage
from penstock.engine.routing.origin.origin import Origin
from penstock.network.codec import PROTOCOL
from penstock.pipes.meta_pipe import MetaPipe
from penstock.simulate.hollow import HollowPipe
from penstock.simulate.letter import Letter, decode_letter
from penstock.simulate.news import News

if TYPE_CHECKING:
    from penstock.simulate.network import SimulatedNetwork

MODEL, SHAPE = "simulated", "s1"
MAX_TURNS = 20_000  # at one instant


@dataclass(frozen=True)
class Machine:
    """A node before it starts.

    ranges: the layers that it holds.
    ends: whether it takes jobs.
    blocks: KV blocks of each segment.
    seconds, per_token: fixed cost of a pass, whatever its layers, and cost per token.
    layer_seconds, layer_per_token: the same, for each layer of the pass.
    head_seconds, head_per_row: fixed cost of embedding and head in a step, and cost per sampled token.
    private: the layers that no other node computes for its jobs.
    """

    name: str
    ranges: tuple[tuple[int, int], ...] = ()
    ends: bool = False
    blocks: int = 24
    seconds: float = 0.0
    per_token: float = 0.0
    layer_seconds: float = 0.0
    layer_per_token: float = 0.0
    head_seconds: float = 0.0
    head_per_row: float = 0.0
    config: EngineConfig | None = None
    private: PrivateLayers = NOTHING_PRIVATE

    def pass_seconds(self, tokens: int, layers: int) -> float:
        return self.seconds + self.per_token * tokens + layers * (self.layer_seconds + self.layer_per_token * tokens)


class SimulatedNode:
    """A running node. Serves as its own pipe's wire and network view."""

    def __init__(self, network: SimulatedNetwork, machine: Machine, epoch: int) -> None:
        self.network = network
        self.machine = machine
        self.name = machine.name
        self.epoch = epoch
        self.alive = True
        self.started_at = network.now
        self.gone_at: float | None = None
        self.draining = False
        self.stopped = False  # all its threads, as by SIGSTOP
        self.busy_until = network.now
        self.busy = 0.0  # seconds of compute
        self.wakes_at = float("inf")
        self._on_network_thread = False
        self._news = News(-1, (), MetaPipe(MODEL, SHAPE, network.layers, ()))
        self._pipe: MetaPipe | None = None
        self._reported = (network.now, 0.0)
        self.engine = self._make_engine()
        self.receiver = JobReceiver(decode_letter, {MODEL: self.engine}, self.send, clock=self.clock)

    def _make_engine(self) -> Engine:
        network, machine = self.network, self.machine
        config = machine.config or network.config
        segments = [network.segment(self, LayerRange(*layers)) for layers in machine.ranges]
        pipe = HollowPipe(
            MODEL,
            network.layers,
            segments,
            node=self.name,
            shape=SHAPE,
            width=network.width,
            hidden_format=network.hidden_format,
            kv_windows=network.windows,
            wire=self,
            view=_OwnView(self),
        )
        return Engine(
            config,
            pipe,
            network.ends(self) if machine.ends else None,
            network.text if machine.ends else None,
            routing=RoutingConfig(
                width=network.width, epoch=self.epoch, lease=network.lease, recovery_timeout=network.recovery_timeout
            ),
            clock=self.clock,
            heartbeat=_PassingTime(self),
        )

    def clock(self) -> float:
        """The time as this node sees it: the compute thread is ahead until its pass ends; other threads see network time."""
        now = self.network.now
        return now if self._on_network_thread or self.busy_until < now else self.busy_until

    # called on network threads, also while the node computes

    def receive(self, sender: str, letter: Letter) -> None:
        self._on_network_thread = True
        self.receiver.on_message(sender, letter)
        self._on_network_thread = False

    def keep_alive(self) -> None:
        self._on_network_thread = True
        self.engine.keep_alive()
        self._on_network_thread = False

    # called on the compute thread

    def send(self, node: str, message: Message) -> None:
        self.network.post(self, node, message)

    @property
    def origin(self) -> Origin:
        assert isinstance(self.engine.origin, Origin)
        return self.engine.origin

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        return self._news.records

    @property
    def epochs(self) -> Mapping[str, int]:
        return self._news.epochs

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that announced that they will leave."""
        return self._news.draining

    @property
    def meta_pipe(self) -> MetaPipe:
        if self._pipe is None:
            self._pipe = self._news.pipe.without(self.name, private=self.machine.private, weights=None)
        return self._pipe

    def hear(self, news: News) -> None:
        if news.issue < self._news.issue:
            return  # newer news has overtaken it
        self._news, self._pipe = news, None
        self.engine.on_network_change()

    def work(self) -> None:
        """Do all that can be done now."""
        engine = self.engine
        for _ in range(MAX_TURNS):
            engine.take_commands(wait=False)
            if not engine.turn() or self.busy_until > self.network.now or engine.resting:
                return
        raise AssertionError(f"node {self.name} never comes to rest")

    def compute_pass(self, tokens: int, layers: int) -> None:
        """Spend the time of a pass."""
        self._spend(self.machine.pass_seconds(tokens, layers))

    def compute_head(self, rows: int) -> None:
        """Spend the time of embedding and head."""
        self._spend(self.machine.head_seconds + self.machine.head_per_row * rows)

    def _spend(self, seconds: float) -> None:
        if seconds:
            self.busy_until = self.clock() + seconds
            self.busy += seconds

    def record(self) -> NodeRecord:
        load = self._load()
        return NodeRecord(
            node=self.name,
            epoch=self.epoch,
            version="0",
            protocol=PROTOCOL,
            pid=1,
            draining=self.draining,
            serves=(MODEL,) if self.machine.ends else (),
            segments=tuple(self._segment(start, stage, load) for start, stage in self.engine.stages.items()),
            links=self.network.links_of(self),
        )

    def _segment(self, start: int, stage: Stage, load: float) -> MetaModel:
        return MetaModel(
            node=self.name,
            process=f"{self.epoch}.{start}",
            model=MODEL,
            pipe=f"{MODEL}/{SHAPE}",
            shape=SHAPE,
            num_layers=self.network.layers,
            layers=stage.segment.layers,
            weight_hash=stage.segment.weight_hash,
            dtype="float32",
            device="cpu",
            kv_blocks=stage.segment.kv_blocks,
            kv_free=stage.unleased,
            block_size=self.engine.config.block_size,
            seconds=self.network.published_seconds(stage),
            load=load,
        )

    def _load(self) -> float:
        """The share of time spent computing since the last record, to a tenth."""
        then, before = self._reported
        now = self.network.now
        self._reported = now, self.busy
        return round(min(1.0, (self.busy - before) / (now - then)), 1) if now > then else 0.0


class _PassingTime(Heartbeat):
    """The heartbeat of a simulated pass: computed at once, it lasts until `busy_until`, and its age counts from its start."""

    def __init__(self, node: SimulatedNode) -> None:
        super().__init__(node.clock)
        self._node = node
        self._began = 0.0
        self._announced = 0.0

    @property
    def age(self) -> float:
        now = self._node.network.now
        return super().age if self._node.busy_until <= now else now - self._began

    def in_pass(self, expected: float) -> Self:
        self._began = self._clock()
        self._announced = expected
        return super().in_pass(expected)

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if self._node.busy_until > self._node.network.now:
            self.expected = self._announced


class _OwnView:
    def __init__(self, node: SimulatedNode) -> None:
        self._node = node

    def pipe(self) -> MetaPipe:
        return self._node.meta_pipe

    def epochs(self) -> Mapping[str, int]:
        return self._node.epochs

    def draining(self) -> frozenset[str]:
        return self._node.leaving
