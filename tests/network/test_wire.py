"""The Wire keeps order, never makes the sender wait, and tells what it could not deliver."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from penstock.domain.messages import AskWeights, Bounce, BounceReason, Message, Ping, WeightsPart
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob
from penstock.errors import MalformedMessage, Unreachable
from penstock.network import wire as wire_module
from penstock.network.codec import decode
from penstock.network.stream import Stream, stream_of
from penstock.network.wire import Traffic, Wire
from tests.network.messages import decode_job

ROUTE = RouteId("kitchen", 1, 1)


def ping(number: int) -> Ping:
    return Ping(ROUTE, number, 0)


def wait_until(true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class FakeRouter:
    """Nodes in `dead` cannot be reached; sending to those in `stuck`, or on a stream there, waits until it is let go."""

    node_id = "kitchen"
    seals = False

    def __init__(self) -> None:
        self.arrived: dict[str, list[Message]] = {}
        self.dead: set[str] = set()
        self.stuck: dict[str | tuple[str, Stream], threading.Event] = {}
        self.entered: list[str] = []
        self.broken = False

    def start(self, on_message: object, on_change: object) -> None: ...

    def publish(self, record: bytes) -> None: ...

    def records(self) -> Mapping[str, bytes]:
        return {}

    def send(self, node: str, data: bytes, stream: Stream = Stream.DATA) -> None:
        self.entered.append(node)
        if self.broken:
            raise RuntimeError("a defect")
        if node in self.dead:
            raise Unreachable(f"{node} is gone")
        for place in (node, (node, stream)):
            if place in self.stuck:
                self.stuck[place].wait()
        message = decode(data)
        assert stream is stream_of(message)
        self.arrived.setdefault(node, []).append(message)

    def close(self) -> None: ...


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    for event in router.stuck.values():
        event.set()


Lost = list[tuple[str, Message]]


@pytest.fixture
def lost() -> Lost:
    return []


@pytest.fixture
def wire(router: FakeRouter, lost: Lost) -> Iterator[Wire]:
    wire = Wire(router, on_lost=lambda node, message: lost.append((node, message)), capacity=8, capacity_bytes=10_000)
    yield wire
    for event in router.stuck.values():
        event.set()
    wire.close()


def outboxes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outbox to")]


def test_what_goes_to_one_node_arrives_in_order(wire: Wire, router: FakeRouter) -> None:
    sent: dict[str, list[Message]] = {"attic": [], "cellar": []}
    for number in range(400):
        for node, messages in sent.items():
            wait_until(lambda node=node: wire.waiting(node) < 8)
            messages.append(ping(number))
            wire.send(node, messages[-1])
    wait_until(lambda: router.arrived == sent)


def test_senders_on_several_threads_each_keep_their_order(router: FakeRouter) -> None:
    wire = Wire(router, capacity=10_000)

    def send(place: int) -> None:
        for number in range(200):
            wire.send("attic", Ping(RouteId("kitchen", 1, place), number, 0))

    threads = [threading.Thread(target=send, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wire.close(30)
    for place in range(4):
        stamps = [m.stamp for m in router.arrived["attic"] if isinstance(m, Ping) and m.route.number == place]
        assert stamps == list(range(200))


def test_a_stuck_node_delays_neither_the_sender_nor_other_nodes(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    router.stuck["attic"] = threading.Event()
    for number in range(5):
        wire.send("attic", ping(number))
        wire.send("cellar", ping(number))
    wait_until(lambda: len(router.arrived.get("cellar", [])) == 5)
    assert "attic" not in router.arrived
    assert wire.waiting("attic") == 5
    router.stuck["attic"].set()
    wait_until(lambda: router.arrived.get("attic") == [ping(number) for number in range(5)])
    wait_until(lambda: wire.waiting("attic") == 0)
    assert lost == []


def test_what_does_not_fit_is_told_and_counted(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    router.stuck["attic"] = threading.Event()
    wire.send("attic", ping(0))
    wait_until(lambda: router.entered)
    for number in range(1, 12):
        wire.send("attic", ping(number))
    assert lost == [("attic", ping(number)) for number in range(9, 12)]  # one is in the router's hands, 8 wait
    assert wire.traffic()["attic"].dropped == 3
    router.stuck["attic"].set()
    wait_until(lambda: wire.traffic()["attic"].sent == 9)
    assert router.arrived["attic"] == [ping(number) for number in range(9)]


def test_hidden_states_that_wait_are_bounded_in_bytes(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    router.stuck["attic"] = threading.Event()
    job = decode_job(1, 1024)  # 4096 bytes
    wire.send("attic", job)
    wait_until(lambda: router.entered)
    for _ in range(3):
        wire.send("attic", job)
    assert lost == [("attic", job)]
    small = replace(job, spans=[], hidden=None)
    wire.send("attic", small)  # this still fits
    router.stuck["attic"].set()
    wait_until(lambda: router.arrived.get("attic") == [job, job, job, small])
    wire.send("attic", job)
    wait_until(lambda: len(router.arrived["attic"]) == 5)


def test_one_message_larger_than_the_bound_still_goes(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    job = decode_job(8, 1024)
    wire.send("attic", job)
    wait_until(lambda: router.arrived.get("attic") == [job])
    assert lost == []


def test_what_is_for_a_dead_node_is_told_and_the_rest_goes_on(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    router.dead.add("attic")
    wire.send("attic", ping(0))
    wire.send("cellar", ping(1))
    wait_until(lambda: lost == [("attic", ping(0))])
    router.dead.clear()
    wire.send("attic", ping(2))
    wait_until(lambda: router.arrived == {"cellar": [ping(1)], "attic": [ping(2)]})
    wait_until(lambda: wire.traffic()["attic"].sent == 1)
    assert wire.traffic()["attic"].dropped == 1


def test_bytes_are_counted_per_node(wire: Wire, router: FakeRouter) -> None:
    from penstock.network.codec import encode

    wire.send("attic", ping(0))
    wire.send("attic", decode_job())
    size = len(encode(ping(0))) + len(encode(decode_job()))
    wait_until(lambda: wire.traffic().get("attic") == Traffic(sent=2, sent_bytes=size))


def test_a_message_that_cannot_be_encoded_is_told(router: FakeRouter, lost: Lost) -> None:
    def refuse(message: Message) -> bytes:
        raise MalformedMessage("too large")

    wire = Wire(router, encode=refuse, on_lost=lambda node, message: lost.append((node, message)))
    wire.send("attic", ping(0))
    wait_until(lambda: lost == [("attic", ping(0))])
    wire.close()


def test_a_defect_is_logged_and_ends_nothing(
    wire: Wire, router: FakeRouter, lost: Lost, caplog: pytest.LogCaptureFixture
) -> None:
    router.broken = True
    wire.send("attic", ping(0))
    wait_until(lambda: lost)
    assert "failed to send a message to attic" in caplog.text
    router.broken = False
    wire.send("attic", ping(1))
    wait_until(lambda: router.arrived.get("attic") == [ping(1)])


def test_a_callback_that_fails_ends_nothing(router: FakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    def fail(node: str, message: Message) -> None:
        raise RuntimeError("a defect")

    wire = Wire(router, on_lost=fail)
    router.dead.add("attic")
    wire.send("attic", ping(0))
    wait_until(lambda: "failed to handle the loss" in caplog.text)
    router.dead.clear()
    wire.send("attic", ping(1))
    wait_until(lambda: router.arrived.get("attic") == [ping(1)])
    wire.close()


def test_the_sender_may_send_again_when_it_is_told_of_a_loss(router: FakeRouter) -> None:
    router.dead.add("attic")
    wire = Wire(router, on_lost=lambda node, message: wire.send("cellar", message))
    wire.send("attic", ping(0))
    wait_until(lambda: router.arrived.get("cellar") == [ping(0)])
    wire.close()


# ---- streams ----


@pytest.mark.parametrize(
    "message, stream",
    [
        (ping(0), Stream.CONTROL),
        (Bounce(ROUTE, 0, BounceReason.FLOOD), Stream.CONTROL),
        (AskWeights(0, "m", "", "manifest", 0, 1), Stream.CONTROL),
        (decode_job(), Stream.DATA),
        (WeightsPart(0, 0, 1, data=b"x"), Stream.BULK),
    ],
)
def test_each_message_has_its_stream(message: Message, stream: Stream) -> None:
    assert stream_of(message) is stream


@pytest.mark.parametrize("stuck", [Stream.DATA, Stream.BULK])
def test_a_stuck_stream_holds_up_no_other_stream_to_the_same_node(
    wire: Wire, router: FakeRouter, lost: Lost, stuck: Stream
) -> None:
    router.stuck["attic", stuck] = threading.Event()
    by_stream = {Stream.CONTROL: ping(0), Stream.DATA: decode_job(1, 64), Stream.BULK: WeightsPart(0, 0, 1, data=b"x")}
    for _ in range(3):
        for message in by_stream.values():
            wire.send("attic", message)
    others = [stream for stream in Stream if stream is not stuck]
    wait_until(lambda: len(router.arrived.get("attic", [])) == 6)
    for stream in others:
        assert router.arrived["attic"].count(by_stream[stream]) == 3
    wait_until(lambda: wire.waiting("attic") == 3)
    router.stuck["attic", stuck].set()
    wait_until(lambda: wire.traffic()["attic"].sent == 9)
    assert wire.waiting("attic") == 0
    assert lost == []


def test_a_full_stream_takes_no_room_of_others(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    router.stuck["attic", Stream.DATA] = threading.Event()
    wire.send("attic", decode_job())
    wait_until(lambda: router.entered)
    for _ in range(9):
        wire.send("attic", replace(decode_job(), spans=[], hidden=None))
    assert len(lost) == 1
    for number in range(8):
        wire.send("attic", ping(number))
    wait_until(lambda: router.arrived.get("attic") == [ping(number) for number in range(8)])
    assert len(lost) == 1


def test_names_without_number_cost_a_bounded_number_of_threads(
    router: FakeRouter, lost: Lost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "MAX_OUTBOXES", 4)
    wire = Wire(router, on_lost=lambda node, message: lost.append((node, message)))
    for number in range(6):
        wire.send(f"node-{number}", ping(number))
    assert lost == [("node-4", ping(4)), ("node-5", ping(5))]
    wire.send("node-0", ping(7))
    wait_until(lambda: router.arrived.get("node-0") == [ping(0), ping(7)])
    wire.close()


# ---- ending ----


def test_an_outbox_that_nobody_uses_ends_and_comes_back(router: FakeRouter) -> None:
    wire = Wire(router, idle=0.01)
    for number in range(3):
        wire.send("idle-node", ping(number))
        wait_until(lambda: "outbox to idle-node (control)" not in outboxes())
    assert router.arrived["idle-node"] == [ping(number) for number in range(3)]
    assert wire.traffic()["idle-node"].sent == 3
    wire.close()


def test_outboxes_that_come_and_go_lose_nothing(router: FakeRouter) -> None:
    wire = Wire(router, idle=0.0005, capacity=10_000)
    for number in range(500):
        wire.send("attic", ping(number))
        time.sleep(0.0005 if number % 3 else 0.001)
    wire.close(30)
    assert router.arrived["attic"] == [ping(number) for number in range(500)]


def test_closing_sends_what_waits(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    for number in range(8):
        wire.send("attic", ping(number))
    wire.close(30)
    assert router.arrived["attic"] == [ping(number) for number in range(8)]
    assert lost == []
    wire.close()


def test_closing_does_not_wait_for_a_router_that_hangs(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    router.stuck["attic"] = threading.Event()
    for number in range(4):
        wire.send("attic", ping(number))
    wait_until(lambda: router.entered)
    wire.close(0.01)
    assert lost == [("attic", ping(number)) for number in range(1, 4)]


def test_after_closing_everything_is_lost(wire: Wire, router: FakeRouter, lost: Lost) -> None:
    wire.close()
    wire.send("attic", ping(0))
    assert lost == [("attic", ping(0))]
    assert router.arrived == {}


def test_a_network_job_is_encoded_later_and_whole(wire: Wire, router: FakeRouter) -> None:
    job = decode_job()
    wire.send("attic", job)
    wait_until(lambda: router.arrived.get("attic") == [job])
    assert isinstance(router.arrived["attic"][0], NetworkJob)
