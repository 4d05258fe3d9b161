"""The bad network of the tests is as bad as it is told to be, and no worse."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import Unreachable
from penstock.network.stream import Stream
from tests.network.faults import FaultyRouter


class Recorder:
    node_id = "kitchen"

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.raw: list[bytes] = []
        self.streams: list[Stream] = []
        self.dead = self.closed = False

    def start(self, on_message: object, on_change: object) -> None: ...

    def publish(self, record: bytes) -> None: ...

    def records(self) -> dict[str, bytes]:
        return {"kitchen": b"record"}

    def send(self, node: str, data: bytes, stream: Stream = Stream.DATA) -> None:
        if self.dead:
            raise Unreachable(node)
        self.streams.append(stream)
        self.raw.append(data)
        self.arrived.append(int.from_bytes(data[:4], "big"))

    def close(self) -> None:
        self.closed = True


COUNT = 400
Sent = tuple[Recorder, FaultyRouter]


@pytest.fixture
def sent_through() -> Iterator[Callable[..., Sent]]:
    """Send many messages, and wait until all have arrived that will."""
    made: list[FaultyRouter] = []

    def send(seed: int = 1, **faults: Any) -> Sent:
        inner = Recorder()
        faulty = FaultyRouter(inner, seed, **faults, hold=(0.0001, 0.005))
        made.append(faulty)
        for number in range(COUNT):
            faulty.send("attic", number.to_bytes(4, "big"))
        deadline = time.monotonic() + 30
        while len(inner.arrived) < faulty.counts["sent"]:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return inner, faulty

    yield send
    for faulty in made:
        faulty.close()


def test_without_faults_everything_arrives_in_order(sent_through: Callable[..., Sent]) -> None:
    inner, faulty = sent_through()
    assert inner.arrived == list(range(COUNT))
    assert faulty.counts == {"sent": COUNT}
    assert (faulty.node_id, faulty.records()) == ("kitchen", {"kitchen": b"record"})


def test_drops_and_duplicates_are_as_many_as_counted(sent_through: Callable[..., Sent]) -> None:
    inner, faulty = sent_through(drop=0.2, duplicate=0.2)
    assert 0 < faulty.counts["dropped"] < COUNT / 2
    assert 0 < faulty.counts["duplicated"] < COUNT / 2
    assert len(inner.arrived) == COUNT - faulty.counts["dropped"] + faulty.counts["duplicated"]
    assert inner.arrived == sorted(inner.arrived)


def test_delays_keep_the_order_and_reordering_does_not(sent_through: Callable[..., Sent]) -> None:
    delayed, faulty = sent_through(delay=0.1)
    assert faulty.counts["delayed"] > 0
    assert delayed.arrived == list(range(COUNT))
    swapped, faulty = sent_through(reorder=0.1)
    assert faulty.counts["reordered"] > 0
    assert swapped.arrived != list(range(COUNT))
    assert sorted(swapped.arrived) == list(range(COUNT))


def test_corruption_changes_every_message_that_it_hits(sent_through: Callable[..., Sent]) -> None:
    inner, faulty = sent_through(corrupt=0.3)
    changed = [raw != number.to_bytes(4, "big") for number, raw in enumerate(inner.raw)]
    assert sum(changed) == faulty.counts["corrupted"] > 0
    assert all(len(raw) == 4 for raw in inner.raw)


def test_a_message_stays_on_its_stream(sent_through: Callable[..., Sent]) -> None:
    inner, faulty = sent_through(delay=1.0)
    faulty.send("attic", b"\0\0\0\7", Stream.CONTROL)
    deadline = time.monotonic() + 30
    while len(inner.arrived) < COUNT + 1:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert inner.streams == [Stream.DATA] * COUNT + [Stream.CONTROL]


def test_a_seed_repeats_itself(sent_through: Callable[..., Sent]) -> None:
    faults = {"drop": 0.2, "duplicate": 0.2, "corrupt": 0.2}
    first, again, other = (sent_through(seed, **faults)[0].raw for seed in (1, 1, 2))
    assert first == again != other


def test_a_healed_network_harms_nothing(sent_through: Callable[..., Sent]) -> None:
    inner, faulty = sent_through(drop=1.0)
    assert inner.arrived == []
    faulty.heal()
    faulty.send("attic", b"\0\0\0\7")
    assert inner.arrived == [7]


def test_a_dead_node_is_raised_where_nothing_delays_it(sent_through: Callable[..., Sent]) -> None:
    inner, faulty = sent_through()
    inner.dead = True
    with pytest.raises(Unreachable):
        faulty.send("attic", b"\0\0\0\7")
    faulty.delay = 1.0
    faulty.send("attic", b"\0\0\0\7")
    deadline = time.monotonic() + 30
    while not faulty.counts["unreachable"]:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    faulty.close()
    assert inner.closed
