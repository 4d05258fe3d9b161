"""The Messenger: messages arrive whole and in order, no faster than they are taken, and streams do not wait for each other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from penstock.errors import Unreachable
from penstock.network.members.peer_directory import MESSAGE, PART, PARTS_RECEIPT, PeerDirectory
from penstock.network.members.roster import Issue, Roster
from penstock.network.messenger import RECEIPT_TIMEOUT_S, Messenger
from penstock.network.parts import PART_BYTES
from penstock.network.send_window import START_BYTES
from penstock.network.stream import Stream
from penstock.network.trust.keyring import OpenKeyring, Sealed, read_envelope

LARGE = 20 * PART_BYTES  # more than the first window


def wait_for(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


class Peer:
    """A node with a Messenger. What it puts is in `out`, until it is delivered."""

    def __init__(self, name: str, epoch: int = 1) -> None:
        self.name, self.epoch, self.now = name, epoch, 0.0
        self.roster = Roster()
        self.roster.appeared(name, epoch)
        self.roster.store_record(name, Issue(epoch, 1), b"", 0.0)
        self.keyring = OpenKeyring(name, epoch)
        self.directory = PeerDirectory(self.keyring, self.roster, None, on_change=lambda: None, on_revoked=lambda: None)
        self.messenger = Messenger(self.directory, self._put, self._take, clock=lambda: self.now)
        self.out: list[tuple[str, Stream, Sealed]] = []
        self.received: list[bytes] = []
        self.fails = False

    def _put(self, node: str, stream: Stream, sealed: Sealed, *, wait: bool) -> None:
        self.out.append((node, stream, sealed))

    def _take(self, sender: str, data: bytes) -> None:
        self.received.append(data)
        if self.fails:
            raise RuntimeError("a callback that fails")

    def meets(self, other: Peer) -> None:
        self.roster.appeared(other.name, other.epoch)
        self.directory.accept_answer(other.name, other.epoch, other.directory.answer(self.directory.question()))

    def deliver(self, other: Peer) -> None:
        """Hand all that was put to the other node."""
        while self.out:
            _, stream, sealed = self.out.pop(0)
            opened = other.directory.open(self.name, sealed, stream)
            assert opened is not None
            other.messenger.receive(self.name, *opened)

    def put_on(self, stream: Stream) -> int:
        return sum(found is stream for _, found, _ in list(self.out))

    def send(self, data: bytes, stream: Stream) -> Sending:
        return Sending(self, data, stream)


class Sending(threading.Thread):
    """A message on its way to b, which may have to wait."""

    def __init__(self, peer: Peer, data: bytes, stream: Stream) -> None:
        super().__init__(daemon=True)
        self._peer, self._data, self._stream = peer, data, stream
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._peer.messenger.send("b", self._data, self._stream)
        except Exception as error:
            self.error = error


def finish(a: Peer, b: Peer, *sendings: Sending) -> None:
    """Deliver both ways until all is sent."""

    def done() -> bool:
        a.deliver(b)
        b.deliver(a)
        return not any(sending.is_alive() for sending in sendings)

    wait_for(done)
    a.deliver(b)
    assert [sending.error for sending in sendings] == [None] * len(sendings)


@pytest.fixture
def pair() -> tuple[Peer, Peer]:
    a, b = Peer("a"), Peer("b")
    a.meets(b)
    b.meets(a)
    return a, b


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, LARGE])
def test_a_message_arrives_whole(pair: tuple[Peer, Peer], stream: Stream, size: int) -> None:
    a, b = pair
    data = os.urandom(size)
    finish(a, b, a.send(data, stream))
    assert b.received == [data]


@pytest.mark.parametrize("stream", [Stream.DATA, Stream.BULK])
def test_only_a_window_is_sent_before_a_receipt_comes(pair: tuple[Peer, Peer], stream: Stream) -> None:
    a, b = pair
    data = os.urandom(LARGE)
    sending = a.send(data, stream)
    wait_for(lambda: a.out)
    time.sleep(0.2)
    assert len(a.out) * PART_BYTES == START_BYTES // PART_BYTES * PART_BYTES
    finish(a, b, sending)
    assert b.received == [data]


def test_control_does_not_wait_for_data_that_waits(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    sending = a.send(bytes(LARGE), Stream.DATA)
    wait_for(lambda: a.out)
    for number in range(50):
        a.messenger.send("b", b"%d" % number, Stream.CONTROL)
    assert a.put_on(Stream.CONTROL) == 50
    assert sending.is_alive()
    finish(a, b, sending)


def test_bulk_waits_while_data_is_sent_and_then_continues(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    bulk = a.send(bytes(LARGE), Stream.BULK)
    wait_for(lambda: a.put_on(Stream.BULK))
    data = a.send(bytes([1]) * LARGE, Stream.DATA)
    wait_for(lambda: a.put_on(Stream.DATA))
    begun = a.put_on(Stream.BULK)
    wait_for(lambda: (a.deliver(b), b.deliver(a), not data.is_alive())[-1])
    assert bulk.is_alive()
    assert b.received == [bytes([1]) * LARGE]
    assert begun * PART_BYTES < LARGE / 2
    finish(a, b, bulk)
    assert len(b.received) == 2


def test_bulk_does_not_wait_for_data_to_another_node(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    c = Peer("c")
    a.meets(c)
    c.meets(a)
    data = a.send(bytes(LARGE), Stream.DATA)
    wait_for(lambda: a.put_on(Stream.DATA))
    a.messenger.send("c", bytes(10), Stream.BULK)
    assert a.out[-1][:2] == ("c", Stream.BULK)
    assert data.is_alive()
    a.out.pop()
    finish(a, b, data)


def test_senders_of_one_stream_do_not_mix_their_messages(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    messages = [bytes([number]) * (3 * PART_BYTES) for number in range(6)]
    finish(a, b, *(a.send(message, Stream.DATA) for message in messages))
    assert sorted(b.received) == messages


def test_a_message_without_a_part_is_dropped_and_the_next_arrives(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    a.messenger.send("b", bytes(2 * PART_BYTES), Stream.DATA)
    a.out.pop(0)
    finish(a, b, a.send(bytes([1]) * (2 * PART_BYTES), Stream.DATA))
    assert b.received == [bytes([1]) * (2 * PART_BYTES)]


def test_parts_whose_receipts_never_come_count_as_lost_after_a_while(pair: tuple[Peer, Peer]) -> None:
    a, _ = pair
    sending = a.send(bytes(4 * PART_BYTES), Stream.DATA)
    for _ in range(4):
        wait_for(lambda: a.out or not sending.is_alive())
        a.out.clear()
        a.now += RECEIPT_TIMEOUT_S + 1
    wait_for(lambda: not sending.is_alive())
    assert sending.error is None


@pytest.mark.parametrize("stream", [Stream.DATA, Stream.BULK])
@pytest.mark.parametrize("how", ["vanishes", "is forgotten", "restarts", "everything is forgotten", "this node leaves"])
def test_a_message_that_waits_for_a_node_that_goes_is_unreachable(pair: tuple[Peer, Peer], stream: Stream, how: str) -> None:
    a, _ = pair
    sending = a.send(bytes(LARGE), stream)
    wait_for(lambda: a.out)
    if how == "vanishes":
        a.roster.vanished("b", 1)
    elif how == "is forgotten":
        a.messenger.forget("b", 1)
    elif how == "restarts":
        a.meets(Peer("b", epoch=2))
    elif how == "everything is forgotten":
        a.messenger.forget_all()
    else:
        a.messenger.close()
    wait_for(lambda: not sending.is_alive())
    assert isinstance(sending.error, Unreachable)


def test_a_session_that_was_forgotten_starts_with_a_new_window(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    lost = a.send(bytes(LARGE), Stream.DATA)
    wait_for(lambda: a.out)
    a.messenger.forget("b", 7)
    assert lost.is_alive(), "that was another session"
    a.messenger.forget("b", 1)
    wait_for(lambda: not lost.is_alive())
    a.out.clear()
    finish(a, b, a.send(bytes(LARGE), Stream.DATA))
    assert b.received == [bytes(LARGE)]


def test_small_messages_need_no_parts_until_a_receipt_is_due(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    messages = [b"", b"hello", bytes(PART_BYTES)]
    for message in messages:
        a.messenger.send("b", message, Stream.DATA)
    assert [read_envelope(sealed.envelope).kind for _, _, sealed in a.out] == [MESSAGE, MESSAGE, PART]
    a.deliver(b)
    assert b.received == messages


def test_after_closing_nothing_is_sent(pair: tuple[Peer, Peer]) -> None:
    a, _ = pair
    a.messenger.close()
    for stream in Stream:
        with pytest.raises(Unreachable, match="b"):
            a.messenger.send("b", b"hello", stream)
    assert a.out == []


def test_a_callback_that_fails_leaves_no_receipt_owing(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    b.fails = True
    a.messenger.send("b", bytes(PART_BYTES), Stream.DATA)
    with pytest.raises(RuntimeError, match="a callback that fails"):
        a.deliver(b)
    assert [read_envelope(sealed.envelope).kind for _, _, sealed in b.out] == [PARTS_RECEIPT]


def test_what_cannot_be_read_is_refused_and_counted(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    bad = [
        (MESSAGE, bytes(PART_BYTES + 1)),
        (PART, b"short"),
        (PARTS_RECEIPT, b"short"),
        (PARTS_RECEIPT, bytes([Stream.CONTROL]) + bytes(12)),
        (PARTS_RECEIPT, b"\7" * 13),
    ]
    for kind, data in bad:
        opened = b.directory.open("a", a.keyring.seal("b", 1, kind, data, Stream.CONTROL))
        assert opened is not None
        b.messenger.receive("a", *opened)
    assert b.directory.refused == {"malformed_message": len(bad)}


def test_receipts_of_others_change_nothing(pair: tuple[Peer, Peer]) -> None:
    a, b = pair
    c = Peer("c")
    a.meets(c)
    c.meets(a)
    sending = a.send(bytes(LARGE), Stream.DATA)
    wait_for(lambda: a.out)
    receipt = bytes([Stream.DATA]) + (1 << 40).to_bytes(8, "big") + bytes(4)
    later_b = OpenKeyring("b", 2)
    later_b.meet(a.keyring.card())
    a.keyring.meet(later_b.card())
    for sender, keyring in (("c", c.keyring), ("b", later_b)):
        opened = a.directory.open(sender, keyring.seal("a", 1, PARTS_RECEIPT, receipt))
        assert opened is not None
        a.messenger.receive(sender, *opened)
    time.sleep(0.1)
    assert len(a.out) * PART_BYTES == START_BYTES // PART_BYTES * PART_BYTES
    finish(a, b, sending)


def test_many_messages_on_all_streams_at_once_all_arrive_in_order(pair: tuple[Peer, Peer]) -> None:
    a, b = pair

    def send_all(stream: Stream) -> None:
        for number in range(40):
            a.messenger.send("b", b"%d %d " % (stream, number) + bytes(number * 9000), stream)

    threads = [threading.Thread(target=send_all, args=(stream,), daemon=True) for stream in Stream]
    for thread in threads:
        thread.start()
    wait_for(lambda: (a.deliver(b), b.deliver(a), not any(thread.is_alive() for thread in threads))[-1])
    a.deliver(b)
    found = [tuple(map(int, data.split()[:2])) for data in b.received]
    for stream in Stream:
        assert [number for which, number in found if which == stream] == list(range(40))
    assert len(found) == 3 * 40
