"""A network of placers in simulated time: records that travel, loads that take their time, nodes that die and come back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random

from penstock.domain.topology import LayerRange
from penstock.placement.controller import Act, Claim, Drop, Load, PlacementController, Wait, Withdraw
from penstock.placement.plan import Member, lacking

Ranges = tuple[LayerRange, ...]


@dataclass(frozen=True)
class Machine:
    capacity: int  # layers that fit in all
    start: float = 0.0
    pinned: Ranges = ()
    max_pipes: int = 1
    listens: bool = True  # False: it publishes room, and never acts


@dataclass
class Node:
    placer: PlacementController
    held: Ranges
    view: dict[str, tuple[int, Member | None]] = field(default_factory=dict)  # the last record and its number; None: it is gone


@dataclass(frozen=True)
class Event:
    at: float
    node: str
    act: Act


class World:
    """`links` are pairs of nodes that do not reach each other before a time; `fails` says whether a load of a node fails."""

    def __init__(
        self,
        machines: Mapping[str, Machine],
        num_layers: int = 30,
        *,
        random: Random | None = None,
        delay: float = 0.0,
        load_time: tuple[float, float] = (1.0, 1.0),
        links: Mapping[frozenset[str], float] | None = None,
        fails: Callable[[str], bool] = lambda node: False,
        watch: Callable[[World, Event], None] = lambda world, event: None,
    ) -> None:
        self.machines, self.num_layers = dict(machines), num_layers
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self.log: list[Event] = []
        self._random, self._delay, self._load_time = random or Random(0), delay, load_time
        self._links, self._fails, self._watch = links or {}, fails, watch
        self._numbers, self._order = count(1), count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        for name, machine in machines.items():
            self.starts(name, machine.start)

    # ---- what happens to it ----

    def starts(self, name: str, at: float) -> None:
        self._at(at, lambda: self._start(name))

    def dies(self, name: str, at: float) -> None:
        self._at(at, lambda: self._die(name))

    def run(self, until: float) -> World:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._queue)
            happen()
        self.now = until
        return self

    # ---- what can be seen of it ----

    def members(self) -> list[Member]:
        """Of all nodes that live, as they are."""
        return [self._record(name) for name in self.nodes]

    def held(self) -> dict[str, str]:
        return {name: ",".join(map(str, sorted(node.held))) for name, node in sorted(self.nodes.items())}

    def is_complete(self) -> bool:
        return not lacking([Member(node=name, held=node.held) for name, node in self.nodes.items()], self.num_layers)

    def could_be_complete(self) -> bool:
        """By the room of those that live, apart from what is pinned: everything else can move."""
        machines = [self.machines[name] for name in self.nodes]
        pinned = {layer for machine in machines for layers in machine.pinned for layer in layers.layers()}
        room = sum(machine.capacity - size(machine.pinned) for machine in machines)
        return self.num_layers - len(pinned) <= room

    def acts(self, kind: type[Act], node: str | None = None) -> list[Event]:
        return [event for event in self.log if isinstance(event.act, kind) and node in (None, event.node)]

    # ---- how it works ----

    def _start(self, name: str) -> None:
        if name not in self.nodes:
            self.nodes[name] = Node(PlacementController(name, "m", self.num_layers), self.machines[name].pinned)
            self._publish(name)
            for other in self.nodes:
                if other != name:
                    self._tell(other, name)

    def _die(self, name: str) -> None:
        if self.nodes.pop(name, None):
            number = next(self._numbers)
            for other in self.nodes:
                self._deliver(name, None, number, other)

    def _record(self, name: str) -> Member:
        node, machine = self.nodes[name], self.machines[name]
        room = max(0, machine.capacity - size(node.held) - size(node.placer.claims))
        return Member(
            node=name,
            held=node.held,
            claims=node.placer.claims,
            pinned=machine.pinned,
            room=0 if node.placer.is_backing_off(self.now) else room,
            max_pipes=machine.max_pipes,
        )

    def _publish(self, name: str) -> None:
        for other in self.nodes if name in self.nodes else ():
            self._tell(name, other)

    def _tell(self, name: str, other: str) -> None:
        self._deliver(name, self._record(name), next(self._numbers), other)

    def _deliver(self, name: str, record: Member | None, number: int, other: str) -> None:
        """None: the node is gone. Records may overtake each other; an older one changes nothing then."""
        receiver = self.nodes[other]
        arrives = self.now
        if name != other:
            up = self._links.get(frozenset({name, other}), 0.0)
            arrives = max(self.now, up) + self._random.uniform(0, self._delay)

        def arrive() -> None:
            if number > receiver.view.get(name, (0, None))[0]:
                receiver.view[name] = (number, record)
                self._look(other, receiver)

        self._at(arrives, arrive)

    def _look(self, name: str, node: Node) -> None:
        if self.nodes.get(name) is not node or not self.machines[name].listens:
            return
        act = node.placer.next_act(self.now, [record for _, record in node.view.values() if record])
        if isinstance(act, Wait):
            assert act.until > self.now, "a wait that is over already"
            if act.until < inf:
                rooms_again = node.placer.is_backing_off(self.now)
                self._at(act.until, lambda: self._publish(name) if rooms_again else self._look(name, node))
            return
        event = Event(self.now, name, act)
        self.log.append(event)
        self._watch(self, event)
        match act:
            case Claim() | Withdraw():
                self._publish(name)
            case Load(layers):
                self._at(self.now + self._random.uniform(*self._load_time), lambda: self._end_load(name, node, layers))
            case Drop(layers):
                node.held = tuple(found for found in node.held if found not in layers)
                node.placer.dropped(layers)
                self._publish(name)

    def _end_load(self, name: str, node: Node, layers: Ranges) -> None:
        if self.nodes.get(name) is not node:
            return
        if self._fails(name):
            node.placer.failed(self.now, layers, "The disk is full.")
        else:
            node.held = (*node.held, *layers)
            node.placer.loaded(layers)
        self._publish(name)

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at, next(self._order), happen))


def size(ranges: Ranges) -> int:
    return sum(found.size for found in ranges)


def layers_of(ranges: Ranges) -> set[int]:
    return {layer for found in ranges for layer in found.layers()}
