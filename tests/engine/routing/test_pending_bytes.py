"""Hidden states that wait for the compute thread: their bytes are counted while they are in memory, whatever becomes of them."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import CloseRoute, OpenRoute, Ping
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob, PackedHidden, Span
from penstock.domain.topology import LayerRange
from penstock.engine.engine import Engine
from penstock.engine.reception import HEADER_FACTOR, SPAN_BYTES
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.origin.origin import Origin
from penstock.pipes.pipe import Pipe
from penstock.simulate.node import MODEL, SHAPE, Machine
from tests.clock import Clock
from tests.engine import layouts
from tests.engine.fakes import FakeSegment
from tests.engine.world import Faults, World
from tests.examples import examples

LAYERS = LayerRange(0, 2)
LIMIT = 1000  # bytes


class Payload(bytearray):
    """The bytes of hidden states, which can be watched: a tensor made of them keeps them alive."""


class Silent:
    """A wire that carries nothing, and a network that does not change."""

    def send(self, node: str, message: Any) -> None:
        pass

    def epochs(self) -> dict[str, int]:
        return {"s": 1, "x": 1, "y": 1}

    def draining(self) -> frozenset[str]:
        return frozenset()


class Host:
    """A node that only has layers, turned by hand, and the hidden states that it was sent and still has."""

    def __init__(self, blocks: int = 400) -> None:
        self.clock = Clock()
        self.segment = FakeSegment(0, 2, blocks, 4)
        wire: Any = Silent()
        pipe = Pipe(MODEL, 2, [self.segment], node="s", shape=SHAPE, wire=wire, view=wire)
        self.engine = Engine(EngineConfig(block_size=4, chunk=8), pipe, routing=RoutingConfig(epoch=1), clock=self.clock)
        self._sent: list[weakref.ref[Payload]] = []

    def open(self, origin: str, number: int = 0, lease: float = 10.0) -> RouteId:
        route = RouteId(origin, 1, number)
        legs = (Leg(LAYERS, origin, origin),)
        request = OpenRoute(route, MODEL, SHAPE, legs=legs, width=1, block_size=4, blocks=40, lease=lease, prefix_cache=True)
        self.engine.deliver(origin, request)
        return route

    def send(self, route: RouteId, number: int, tokens: int, *, seq_id: int | None = None, **more: Any) -> None:
        payload = Payload(4 * tokens)
        self._sent.append(weakref.ref(payload))
        span = Span(number if seq_id is None else seq_id, 0, 0, 0, 0, tokens, 1)
        facts = {"step": ComputeStep.LAYER, "hidden": PackedHidden("float32", tokens, 1, payload)} | more
        self.engine.deliver(route.origin, NetworkJob(route, number, [span], **facts))

    @property
    def in_memory(self) -> int:
        return sum(len(payload) for ref in self._sent if (payload := ref()) is not None)

    @property
    def counted(self) -> int:
        return self.engine._inbox.pending_bytes

    def take(self) -> None:
        """Take all messages, and look for more, as the compute thread does before it waits."""
        self.engine.take_commands(wait=False)
        self.engine.take_commands(wait=False)

    def work(self) -> None:
        """Work until there is nothing to do but to wait."""
        for _ in range(1000):
            self.engine.take_commands(wait=False)
            if not self.engine.turn():
                break
        self.take()


numbers, sizes, origins = st.integers(0, 70), st.integers(1, 40), st.sampled_from("xy")
actions = st.one_of(
    st.tuples(st.just("send"), origins, numbers, sizes),
    st.tuples(st.just("send"), origins, numbers, sizes),
    st.tuples(st.just("twice"), origins, numbers, sizes),
    st.tuples(st.just("returned"), origins, numbers, sizes),  # to a node that has no head
    st.tuples(st.just("wrong layer"), origins, numbers, sizes),
    st.tuples(st.just("unknown route"), origins, numbers, sizes),
    st.tuples(st.just("open"), origins, st.integers(0, 2)),
    st.tuples(st.just("close"), origins),
    st.tuples(st.just("fail"), st.integers(1, 5)),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.05, 20.0])),  # until those held back go on; until the leases end
    st.tuples(st.just("turn")),
)


class Play:
    def __init__(self) -> None:
        self.host = Host()
        self.routes = {origin: self.host.open(origin) for origin in "xy"}
        self.failures = 0
        process = self.host.segment.process

        def process_or_fail(*args: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("out of memory")
            return process(*args)

        self.host.segment.process = process_or_fail  # type: ignore[method-assign]

    def act(self, what: str, *args: Any) -> None:
        host, engine = self.host, self.host.engine
        match what, args:
            case "send", (origin, number, tokens):
                host.send(self.routes[origin], number, tokens)
            case "twice", (origin, number, tokens):
                host.send(self.routes[origin], number, tokens)
                host.send(self.routes[origin], number, tokens)
            case "returned", (origin, number, tokens):
                host.send(self.routes[origin], number, tokens, step=ComputeStep.HEAD)
            case "wrong layer", (origin, number, tokens):
                host.send(self.routes[origin], number, tokens, current_layer=1)
            case "unknown route", (origin, number, tokens):
                host.send(RouteId(origin, 7, 7), number, tokens)
            case "open", (origin, number):
                self.routes[origin] = host.open(origin, number)
            case "close", (origin,):
                engine.deliver(origin, CloseRoute(self.routes[origin]))
            case "fail", (times,):
                self.failures = times
            case "wait", (seconds,):
                host.clock.now += seconds
            case "turn", ():
                engine.take_commands(wait=False)
                engine.turn()


@examples(few=60, many=500, script=st.lists(actions, max_size=60))
def test_what_is_counted_is_what_is_in_memory_and_nothing_is_left_in_the_end(script: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.inbox.MAX_PENDING_BYTES", LIMIT)
        play = Play()
        host = play.host
        for action in script:
            play.act(*action)
            assert host.in_memory <= LIMIT
            host.take()
            assert host.counted == host.in_memory
        host.clock.now += 0.1
        host.work()
        assert (host.counted, host.in_memory) == (0, 0)
        assert len(host.engine._processor.visits) == 0


def test_a_pass_frees_what_it_took_for_others() -> None:
    host = Host()
    route = host.open("x")
    host.engine.take_commands(wait=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.inbox.MAX_PENDING_BYTES", LIMIT)
        for number in range(100):
            host.send(route, number, 20)
            host.work()
    assert host.engine.stats.refused == {}


def test_a_sender_that_floods_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.inbox.MAX_PENDING_BYTES", LIMIT)
    host = Host()
    flooder, honest = host.open("x"), host.open("y")
    for number in range(100):
        host.send(flooder, number, 10)
        host.send(flooder, 100 + number, 10, notices=[])
        host.engine.take_commands(wait=False)
    flooded = host.engine.stats.refused["backlog"]
    assert host.counted == host.in_memory <= LIMIT * 3 // 4
    for number in range(3):
        host.send(honest, number, 10)
    assert host.engine.stats.refused["backlog"] == flooded, "all of the honest one's are taken"
    host.take()
    assert host.counted == host.in_memory <= LIMIT


def test_control_messages_and_headers_count_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.inbox.MAX_PENDING_BYTES", 100_000)
    host = Host()
    route = host.open("x")
    host.take()
    for number in range(1000):
        host.engine.deliver("x", Ping(route, number, 1, -1), 60)
    assert host.engine.stats.refused["backlog"] == 1000 - 75_000 // (60 * HEADER_FACTOR)
    host.take()
    assert host.counted == 0
    job = NetworkJob(route, 5, [Span(seq, 0, 0, 0, 0, 1, 0) for seq in range(10)], step=ComputeStep.LAYER)
    host.engine.deliver("x", job, 1000)
    host.take()
    assert host.counted == 1000 * HEADER_FACTOR + 10 * SPAN_BYTES, "held back for an earlier one"
    host.clock.now += 1.0
    host.work()
    assert host.counted == 0


def test_a_message_that_raises_is_not_counted_any_more() -> None:
    host = Host()

    def broken(*args: Any) -> None:
        raise RuntimeError("a bug")

    host.engine._handle = broken  # type: ignore[method-assign]
    host.send(RouteId("x", 1, 0), 0, 20)
    with pytest.raises(RuntimeError, match="a bug"):
        host.engine.take_commands(wait=False)
    assert (host.counted, host.in_memory) == (0, 0)


def test_many_threads_deliver_at_once_and_nothing_is_left_in_the_end() -> None:
    """On the real thread, with time that stands still: those held back for earlier ones stay until their route is closed."""
    host = Host()
    routes = [host.open(origin) for origin in "xy"]
    host.engine.start()

    def deliver(route: RouteId, first: int) -> None:
        for number in range(first, 200, 4):
            host.send(route, number, 10)

    threads = [threading.Thread(target=deliver, args=(route, first)) for route in routes for first in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for route in routes:
        host.engine.deliver(route.origin, CloseRoute(route))
    for _ in range(1500):
        if not host.engine.host.routes and not host.counted:
            break
        time.sleep(0.02)
    host.engine.stop()
    assert (host.counted, host.in_memory) == (0, 0)


@examples(
    few=6,
    many=30,
    network=layouts.networks(most_nodes=3, most_layers=4),
    config=layouts.configs,
    faults=layouts.faults,
    prompts=st.lists(st.tuples(layouts.prompts, st.floats(0, 0.3)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_no_node_of_a_bad_network_counts_anything_when_all_is_quiet(
    network: tuple[int, list[Machine]],
    config: EngineConfig,
    faults: Faults,
    prompts: list[tuple[list[int], float]],
    seed: int,
) -> None:
    layers, places = network
    places = [replace(place, blocks=60) for place in places]
    world = World(*places, layers=layers, config=config, faults=faults, seed=seed, recovery_timeout=300.0)
    world.open_routes("a")
    for prompt, later in prompts:
        world.ask("a", prompt)
        world.run(later)
    world.finish(600.0)
    world.run(1.0)
    assert [node.engine._inbox.pending_bytes for node in world] == [0] * len(list(world))
    assert any(isinstance(node.engine.origin, Origin) for node in world)
