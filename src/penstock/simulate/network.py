"""SimulatedNetwork: nodes, the links between them, and the clock that they share.

The clock advances only after everything due at one instant has been processed: a run depends on its seed alone, and a minute of
waiting costs nothing. Every message is encoded and decoded, and every node has its own view of which nodes are live.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from penstock.config.engine import EngineConfig
from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.job import Job
from penstock.domain.messages import Mark, Message
from penstock.domain.meta_model import Link, NodeRecord
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.engine.reception import KEEP_ALIVE_S
from penstock.engine.routing.host.stage import Stage
from penstock.engine.sequences.output_text import TextStreams
from penstock.engine.visit.job_context import Ends
from penstock.model.segment import Segment
from penstock.network.codec import decode_record, encode_record
from penstock.pipes.router_pipes import RouterPipes
from penstock.simulate.hollow import HollowEnds, HollowSegment, HollowText
from penstock.simulate.letter import Letter, encode_letter
from penstock.simulate.news import News
from penstock.simulate.node import MODEL, SHAPE, Machine, SimulatedNode

TICK_S = 0.01  # idle nodes wake at multiples of this, so that many wake at the same instant
MAX_SLEEP_S = 0.05
NEWS_S = 0.05  # maximum delay until a change has reached every node
NEWS_INTERVAL_S = 1.0  # between records of idle nodes
START_S = 1000.0  # initial clock value; 0 would look like a time that was never set

Lane = tuple[str, str, bool]  # sender, destination, and whether it is the stream of hidden states


class SimulatedNetwork(ABC):
    """Base class: subclasses decide what the nodes' layers, ends and links are.

    layers, width: of the model. hidden_format: the wire format of its hidden states.
    windows: for each group of layers, how many positions a token sees; None for all.
    """

    def __init__(
        self,
        machines: Iterable[Machine],
        *,
        layers: int,
        config: EngineConfig,
        width: int = 1,
        hidden_format: HiddenFormat = "float32",
        windows: Sequence[int | None] = (None,),
        seed: int = 0,
        lease: float = 10.0,
        recovery_timeout: float = 60.0,
    ) -> None:
        self.layers = layers
        self.config = config
        self.width = width
        self.hidden_format = hidden_format
        self.windows = windows
        self.lease = lease
        self.recovery_timeout = recovery_timeout
        self.dice = random.Random(seed)
        random.seed(seed)  # determines how long origins wait before a retry
        self.now = START_S
        self.nodes: dict[str, SimulatedNode] = {}
        self.all_starts: list[SimulatedNode] = []  # one entry per start; includes nodes that died
        self._order = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._due: dict[Lane, float] = {}  # when the last message arrives, by stream
        self._epochs = itertools.count(1)
        self._publishing = False
        self._renewed: set[str] = set()  # nodes that publish a new record
        self._records: dict[str, tuple[NodeRecord, NodeRecord]] = {}  # each node's latest, as sent and as decoded
        self._published: tuple[NodeRecord, ...] = ()
        self._pipes = RouterPipes(lambda: self._published)
        for machine in machines:
            self.start(machine)
        self._repeat_news()
        self.run(NEWS_S + TICK_S)

    def __getitem__(self, name: str) -> SimulatedNode:
        return self.nodes[name]

    def __iter__(self) -> Iterator[SimulatedNode]:
        return iter([node for node in self.nodes.values() if node.alive])

    # ---- what nodes are made of ----

    def segment(self, node: SimulatedNode, layers: LayerRange) -> Segment:
        return HollowSegment(layers, node.machine.blocks, node.compute_pass)

    def ends(self, node: SimulatedNode) -> Ends:
        return HollowEnds(self.width, self.hidden_format, node.compute_head)

    @property
    def text(self) -> TextStreams:
        return lambda skip_special: HollowText()

    def published_seconds(self, stage: Stage) -> float:
        """The pass time that a node publishes for a segment."""
        return float(f"{stage.mean_pass_seconds:.2g}")

    def idle_seconds(self, node: SimulatedNode) -> float:
        """How long an idle node sleeps."""
        timeout = node.engine.idle_timeout()
        return MAX_SLEEP_S if timeout is None else timeout

    def links_of(self, node: SimulatedNode) -> tuple[Link, ...]:
        """The links that a node has measured."""
        return ()

    @abstractmethod
    def arrivals(self, lane: Lane, message: Message, letter: Letter, now: float) -> Iterable[tuple[float, Letter]]:
        """When a message sent now arrives, and in what form; empty if it is lost."""

    # ---- what happens ----

    def start(self, machine: Machine) -> SimulatedNode:
        node = self.nodes[machine.name] = SimulatedNode(self, machine, next(self._epochs))
        self.all_starts.append(node)
        self.wake(node, self.now)
        if machine.ends:
            self._keep_alive(node)
        self.spread_news(node)
        return node

    def kill(self, name: str, *, noticed: float = 0.2) -> None:
        """Kill a node at once; the others learn of it `noticed` seconds later."""
        node = self.nodes[name]
        node.alive, node.gone_at = False, self.now
        self.at(self.now + noticed, self.spread_news)

    def drain(self, name: str) -> None:
        """Let a node announce that it will leave."""
        node = self.nodes[name]
        node.draining = node.engine.host.draining = True
        self.spread_news(node)

    def leave(self, name: str) -> None:
        """Let a node close all routes through it, and disappear."""
        node = self.nodes[name]
        node.engine.leave()
        self.kill(name, noticed=0.0)

    def submit(self, name: str, job: Job) -> None:
        node = self.nodes[name]
        node.engine.submit(job)
        self.wake(node, self.now)

    def cancel(self, name: str, job: Job) -> None:
        node = self.nodes[name]
        node.engine.cancel(job)
        self.wake(node, self.now)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._order), action))

    def spread_news(self, *renewed: SimulatedNode) -> None:
        """Send every node, after a random delay, the list of live nodes, with new records of these ones."""
        self._renewed.update(node.name for node in renewed)
        if not self._publishing:
            self._publishing = True
            self.at(self.now, self._publish)

    def _publish(self) -> None:
        self._publishing = False
        for node in self:
            if node.name in self._renewed:
                self._renew_record(node)
        self._renewed.clear()
        self._published = tuple(self._records[node.name][1] for node in self)
        news = News(next(self._order), self._published, self._pipes.find(MODEL, SHAPE, self.layers))
        for node in self:
            self.at(self.now + self.dice.uniform(0, NEWS_S), partial(self._deliver_news, node, news))

    def _renew_record(self, node: SimulatedNode) -> None:
        record = node.record()
        before = self._records.get(node.name)
        if before is not None and before[0] == record:
            return
        if before is not None and before[0].links == record.links:  # then they need not be decoded again
            read = replace(decode_record(encode_record(replace(record, links=()))), links=before[1].links)
        else:
            read = decode_record(encode_record(record))
        self._records[node.name] = record, read

    def _repeat_news(self) -> None:
        self.spread_news(*self)
        self.at(self.now + NEWS_INTERVAL_S, self._repeat_news)

    def _deliver_news(self, node: SimulatedNode, news: News) -> None:
        node.hear(news)
        self.wake(node, self.now)

    # ---- messages ----

    def post(self, sender: SimulatedNode, destination: str, message: Message) -> None:
        now = sender.clock()
        if destination not in sender.epochs:
            if isinstance(message, NetworkJob):
                sender.engine.on_unsent(destination, message)
                self.wake(sender, self.now)
            return
        # hidden states do not hold up other messages, nor the other way round
        lane = sender.name, destination, isinstance(message, (NetworkJob, Mark))
        for due, letter in self.arrivals(lane, message, encode_letter(message, now), now):
            self.at(due, partial(self.deliver, sender.name, destination, letter))

    def in_order(self, lane: Lane, due: float, late: float = 0.0) -> float:
        """Return when a message arrives: at `due`, but never before those sent earlier on the same lane."""
        last = self._due.get(lane, 0.0)
        due = self._due[lane] = (due if due > last else last) + late
        return due

    def deliver(self, sender: str, destination: str, letter: Letter) -> None:
        node = self.nodes.get(destination)
        if node is None or not node.alive:
            return
        if node.stopped:
            self.at(self.now + TICK_S, partial(self.deliver, sender, destination, letter))  # the frozen machine buffers it
            return
        node.receive(sender, letter)
        self.wake(node, self.now)

    # ---- time ----

    def wake(self, node: SimulatedNode, when: float) -> None:
        """Schedule a node to work then, unless it is scheduled earlier; if it is computing, once that is done."""
        if node.busy_until > when:
            when = min(node.busy_until, when + MAX_SLEEP_S)  # `busy_until` may be changed
        if when < node.wakes_at:
            node.wakes_at = when
            self.at(when, partial(self._work, node, when))

    def _work(self, node: SimulatedNode, when: float) -> None:
        if node.wakes_at != when or not self._is_running(node):
            return
        node.wakes_at = math.inf
        if node.busy_until <= self.now and not node.stopped:
            node.work()
        self.wake(node, self.now if node.busy_until > self.now else self._idle_until(node))

    def _idle_until(self, node: SimulatedNode) -> float:
        ticks = (self.now - START_S + self.idle_seconds(node)) / TICK_S
        return START_S + math.ceil(ticks - 1e-6) * TICK_S

    def _keep_alive(self, node: SimulatedNode) -> None:
        """Do what the keep-alive thread of an origin does."""
        if not self._is_running(node):
            return
        if not node.stopped:
            node.keep_alive()
            self.wake(node, self.now)
        self.at(self.now + KEEP_ALIVE_S, partial(self._keep_alive, node))

    def _is_running(self, node: SimulatedNode) -> bool:
        return node.alive and self.nodes.get(node.name) is node

    def step(self) -> None:
        """Advance to the next event, and process everything due at that instant."""
        later, pop = self._later, heapq.heappop
        if later[0][0] > self.now:
            self.now = later[0][0]
        now = self.now
        while later and later[0][0] <= now:
            pop(later)[2]()
        self.check()

    def check(self) -> None:  # noqa: B027 - most have nothing to check
        """Called after every instant."""

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._later[0][0] <= until:
            self.step()
        self.now = until
