"""Getting to know each other: whatever is lost, repeated, changed or late, everybody has everybody's newest record in the end."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import BadMessage, ConfigError, DamagedMessage, PenstockError, Untrusted
from penstock.network.members import peer_directory
from penstock.network.members.blocklist import Blocklist
from penstock.network.members.peer_directory import (
    BURST_S,
    COUNTER,
    MAX_RECORD_BYTES,
    MAX_RECORDS_PER_S,
    PART,
    RECORD,
    RECORD_PART,
    PeerDirectory,
)
from penstock.network.members.roster import MAX_RETRY_S, RESEND_INTERVAL_S, Issue, Roster
from penstock.network.parts import PART_BYTES, Part
from penstock.network.stream import Stream
from penstock.network.trust.keyring import Keyring, OpenKeyring, Sealed, read_envelope
from tests.network.certificates import Authority, Papers

NAMES = "abcd"


class Node:
    """One life of a node, with what it wants to send."""

    def __init__(self, keyring: Keyring, clock: Callable[[], float] = lambda: 0.0, blocklist: Blocklist | None = None) -> None:
        self.keyring, self.name, self.epoch, self.counter = keyring, keyring.node, keyring.epoch, 0
        self.roster = Roster()
        self.roster.appeared(self.name, self.epoch)
        self.revocations = self.changes = 0
        self.before: dict[str, tuple[int, ...]] = {}  # what it knew
        self.known = PeerDirectory(
            keyring, self.roster, blocklist, on_change=self._changed, on_revoked=self._revoked, clock=clock
        )
        self.publish()

    def _changed(self) -> None:
        self.changes += 1

    def _revoked(self) -> None:
        self.revocations += 1

    @property
    def record(self) -> bytes:
        return f"{self.name} {self.epoch} {self.counter}".encode()

    def publish(self) -> None:
        self.counter += 1
        self.roster.store_record(self.name, Issue(self.epoch, self.counter), self.record, float("inf"))

    def sees(self, *others: Node) -> None:
        for other in others:
            self.roster.appeared(other.name, other.epoch)

    def asks(self, other: Node) -> None:
        self.known.accept_answer(other.name, other.epoch, other.known.answer(self.known.question()))


@dataclass
class Packet:
    to: Node
    sender: Node
    kind: str  # question, answer, letter
    data: bytes
    envelope: bytes = b""


@functools.cache
def papers() -> dict[str, Papers]:
    authority = Authority(Path(tempfile.mkdtemp()))
    return {name: authority.invite(name) for name in NAMES}


class Meetings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}
        self.packets: list[Packet] = []
        self.closed, self.now, self.epoch = False, 100.0, 0

    @initialize(closed=st.booleans(), count=st.integers(2, len(NAMES)), met=st.booleans())
    def start(self, closed: bool, count: int, met: bool) -> None:
        self.closed = closed
        for name in NAMES[:count]:
            self.begin(name)
        for node in self.nodes.values() if met else ():
            for other in self.nodes.values():
                node.sees(other)
                node.asks(other)

    def begin(self, name: str) -> None:
        self.epoch += 1
        keyring = papers()[name].keyring(self.epoch) if self.closed else OpenKeyring(name, self.epoch)
        self.nodes[name] = Node(keyring, lambda: self.now)

    def node(self, number: int) -> Node:
        return self.nodes[NAMES[number % len(self.nodes)]]

    @rule(one=st.integers(0, 3))
    def publishes(self, one: int) -> None:
        self.node(one).publish()

    @rule(one=st.integers(0, 3), other=st.integers(0, 3))
    def sees(self, one: int, other: int) -> None:
        self.node(one).sees(self.node(other))

    @rule(one=st.integers(0, 3), other=st.integers(0, 3))
    def loses_sight(self, one: int, other: int) -> None:
        if self.node(one) is not self.node(other):
            self.node(one).roster.vanished(self.node(other).name, self.node(other).epoch)

    @rule(one=st.integers(0, 3))
    def restarts(self, one: int) -> None:
        old = self.node(one)
        self.begin(old.name)
        for node in self.nodes.values():
            node.roster.vanished(old.name, old.epoch)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(one=st.integers(0, 3))
    def acts(self, one: int) -> None:
        node = self.node(one)
        by_life = {(other.name, other.epoch): other for other in self.nodes.values()}
        for life in node.roster.questions_due(self.now)[0]:
            if life in by_life:
                self.packets.append(Packet(by_life[life], node, "question", node.known.question()))
        for name, sealed in node.known.outgoing():
            self.packets.append(Packet(self.nodes[name], node, "letter", sealed.body, sealed.envelope))

    @precondition(lambda self: self.packets)
    @rule(which=st.integers(0), repeated=st.booleans())
    def delivers(self, which: int, repeated: bool) -> None:
        at = which % len(self.packets)
        self.deliver(self.packets[at] if repeated else self.packets.pop(at))

    @precondition(lambda self: self.packets)
    @rule(which=st.integers(0))
    def is_lost(self, which: int) -> None:
        self.packets.pop(which % len(self.packets))

    @precondition(lambda self: self.packets and self.closed)
    @rule(which=st.integers(0), place=st.integers(0), change=st.integers(1, 255))
    def is_changed(self, which: int, place: int, change: int) -> None:
        packet = self.packets[which % len(self.packets)]
        changed = bytearray(packet.data)
        changed[place % len(changed)] ^= change
        self.deliver(Packet(packet.to, packet.sender, packet.kind, bytes(changed), packet.envelope))

    def deliver(self, packet: Packet) -> None:
        to = packet.to
        if to is not self.nodes[to.name]:
            return  # it is over
        try:
            if packet.kind == "question":
                answer = to.known.answer(packet.data)
                self.packets.append(Packet(packet.sender, to, "answer", answer))
            elif packet.kind == "answer":
                to.known.accept_answer(packet.sender.name, packet.sender.epoch, packet.data)
            else:
                assert to.known.open(packet.sender.name, Sealed(packet.envelope, packet.data)) is None
        except PenstockError as error:
            to.known.refuse(error)

    @invariant()
    def nobody_believes_what_was_not_said(self) -> None:
        for node in self.nodes.values():
            for name, record in node.roster.records().items():
                said_by, epoch, counter = record.decode().split()
                assert said_by == name
                assert int(epoch) <= self.nodes[name].epoch
                if int(epoch) == self.nodes[name].epoch:
                    assert int(counter) <= self.nodes[name].counter

    @invariant()
    def an_older_record_never_replaces_a_newer_one(self) -> None:
        for node in self.nodes.values():
            known = {name: tuple(map(int, record.split()[1:])) for name, record in node.roster.records().items()}
            assert all(known[name] >= before for name, before in node.before.items() if name in known)
            node.before = known

    def teardown(self) -> None:
        nodes = list(self.nodes.values())
        for node in nodes:
            node.sees(*nodes)
        for _ in range(3):  # from now on nothing is lost
            self.now += MAX_RETRY_S
            self.all_act_and_deliver()
        self.all_agree()
        for node in nodes:
            node.publish()
        for number in range(len(nodes)):
            self.acts(number)
        self.packets.clear()  # but this
        self.now += 2 * RESEND_INTERVAL_S
        self.all_act_and_deliver()
        self.all_agree()

    def all_act_and_deliver(self) -> None:
        for number in range(len(self.nodes)):
            self.acts(number)
        while self.packets:
            self.deliver(self.packets.pop(0))

    def all_agree(self) -> None:
        for node in self.nodes.values():
            assert node.roster.records() == {other.name: other.record for other in self.nodes.values()}


TestMeetings = Meetings.TestCase
TestMeetings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- one at a time ----


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def member(authority: Authority, name: str, epoch: int = 1) -> Node:
    papers = authority.invite(name)
    keyring = papers.keyring(epoch)
    return Node(keyring, blocklist=Blocklist(papers.revocations_file, keyring.authority))


def test_after_one_question_both_can_write_and_the_asker_has_the_record(authority: Authority) -> None:
    a, b = member(authority, "a"), member(authority, "b")
    a.sees(b)
    a.asks(b)
    assert a.roster.records()["b"] == b.record
    opened = b.known.open("a", a.known.seal("b", 1, PART, b"hello", Stream.DATA), Stream.DATA)
    assert opened is not None
    assert opened[1] == b"hello"


def test_a_message_that_arrives_on_the_wrong_stream_is_refused(authority: Authority) -> None:
    a, b = member(authority, "a"), member(authority, "b")
    a.sees(b)
    a.asks(b)
    sealed = a.known.seal("b", 1, PART, b"hello", Stream.DATA)
    for wrong in (Stream.CONTROL, Stream.BULK):
        with pytest.raises(BadMessage, match="wrong stream"):
            b.known.open("a", sealed, wrong)
    assert b.known.open("a", sealed, Stream.DATA) is not None


class SharedCounts(Counter[str]):
    """Lets two threads read a count before either writes, unless they take turns."""

    both = threading.Barrier(2)

    def __getitem__(self, key: str) -> int:
        found = super().__getitem__(key)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(0.2)
        return found


def test_what_two_threads_refuse_is_all_counted(authority: Authority) -> None:
    a = member(authority, "a")
    a.known.refused = SharedCounts()
    threads = [threading.Thread(target=a.known.refuse, args=(Untrusted("no"),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert a.known.refused == {"untrusted": 2}


def test_a_record_is_sent_again_until_there_is_a_receipt(authority: Authority) -> None:
    now = [0.0]
    a, b = (Node(authority.invite(name).keyring(1), lambda: now[0]) for name in "ab")
    a.sees(b)
    b.sees(a)
    a.asks(b)
    b.asks(a)
    ((to, lost),) = [letter for letter in a.known.outgoing() if len(letter[1].body) > 3 * COUNTER.size]
    assert a.known.outgoing() == [], "not at once"
    now[0] += 2
    ((to, sealed),) = a.known.outgoing()
    assert to == "b"
    assert lost != sealed
    b.known.open("a", sealed)
    receipts = b.known.outgoing()
    for _, receipt in receipts:
        a.known.open("b", receipt)
    now[0] += 2
    assert [to for to, _ in a.known.outgoing()] == ["b"], "a receipt for b's record, that came with the receipt"
    now[0] += 2
    assert a.known.outgoing() == []


def test_a_large_record_travels_in_parts_and_not_with_the_answer(authority: Authority) -> None:
    now = [0.0]
    a, b = (Node(authority.invite(name).keyring(1), lambda: now[0]) for name in "ab")
    a.sees(b)
    b.sees(a)
    large = os.urandom(2 * PART_BYTES + 500)
    a.roster.store_record("a", Issue(1, 7), large, math.inf)
    answer = a.known.answer(b.known.question())
    assert len(answer) < PART_BYTES
    b.known.accept_answer("a", 1, answer)
    assert b.roster.is_live("a")
    assert "a" not in b.roster.records()
    a.asks(b)
    parts = [sealed for _, sealed in a.known.outgoing() if len(sealed.body) > 100]
    assert [read_envelope(sealed.envelope).stream for sealed in parts] == [Stream.BULK] * 3
    assert max(len(sealed.body) for sealed in parts) < PART_BYTES + 100
    for sealed in parts:
        assert b.known.open("a", sealed, Stream.BULK) is None
    assert b.roster.records()["a"] == large
    now[0] += 2
    assert a.known.outgoing() == [], "such a record may take longer"
    now[0] += 10
    assert len(a.known.outgoing()) == 3, "as long as there is no receipt"


def test_a_large_record_that_is_too_large_is_refused_with_its_first_part(authority: Authority) -> None:
    a, b = member(authority, "a"), member(authority, "b")
    a.sees(b)
    a.asks(b)
    b.keyring.meet(a.keyring.card())
    part = Part(False, 1, 0, COUNTER.size + MAX_RECORD_BYTES + 1, memoryview(bytes(PART_BYTES))).pack()
    with pytest.raises(BadMessage, match="record of 'b'"):
        a.known.open("b", b.keyring.seal("a", 1, RECORD_PART, part, Stream.BULK), Stream.BULK)


def test_records_without_end_are_dropped_and_the_newest_one_comes_again(authority: Authority) -> None:
    now = [0.0]
    a, b = (Node(authority.invite(name).keyring(1), lambda: now[0]) for name in "ab")
    a.sees(b)
    b.sees(a)
    a.asks(b)
    b.asks(a)
    changes = b.changes
    for _ in range(200):
        a.publish()
        for _, sealed in a.known.outgoing():
            b.known.open("a", sealed)
    assert b.changes - changes == MAX_RECORDS_PER_S * BURST_S
    assert b.roster.records()["a"] != a.record
    now[0] += 2
    for _, sealed in a.known.outgoing():
        b.known.open("a", sealed)
    assert b.roster.records()["a"] == a.record


def test_a_replayed_answer_proves_nothing(authority: Authority) -> None:
    a, b, again = member(authority, "a"), member(authority, "b"), member(authority, "a", 2)
    a.sees(b)
    answer = b.known.answer(a.known.question())
    a.known.accept_answer("b", 1, answer)
    a.roster.vanished("b", 1)
    a.sees(b)
    for asker in (a, again):
        with pytest.raises(BadMessage):
            asker.known.accept_answer("b", 1, answer)
    assert not a.roster.is_live("b")


def test_a_node_cannot_answer_for_another(authority: Authority) -> None:
    a, b, c = member(authority, "a"), member(authority, "b"), member(authority, "c")
    a.sees(b, c)
    with pytest.raises(Untrusted, match="'c' answered a question to 'b'"):
        a.known.accept_answer("b", 1, c.known.answer(a.known.question()))
    greeting = msgspec.msgpack.decode(c.known.answer(a.known.question()))
    greeting[0] = b.keyring.card()  # which everybody can have
    with pytest.raises(BadMessage, match="not sealed by it"):
        a.known.accept_answer("b", 1, msgspec.msgpack.encode(greeting))
    assert not a.roster.is_live("b")


@pytest.mark.parametrize("data", [b"", b"short", bytes(COUNTER.size + MAX_RECORD_BYTES + 1)], ids=len)
def test_a_record_of_an_impossible_size_is_refused(authority: Authority, data: bytes) -> None:
    a, b = member(authority, "a"), member(authority, "b")
    a.sees(b)
    a.asks(b)
    b.keyring.meet(a.keyring.card())
    with pytest.raises(BadMessage, match="record of 'b'"):
        a.known.open("b", b.keyring.seal("a", 1, RECORD, data))
    assert a.roster.records()["b"] == b.record


def test_what_cannot_be_opened_is_counted_by_the_sender_that_it_names(authority: Authority) -> None:
    a, b, c = member(authority, "a"), member(authority, "b"), member(authority, "c")
    a.sees(b, c)
    a.asks(b)
    for node in (b, c):
        node.keyring.meet(a.keyring.card())
    again = member(authority, "a", 2)
    b.keyring.meet(again.keyring.card())
    assert a.known.open("b", b.keyring.seal("a", 2, PART, b"for a later start")) is None
    forged = c.keyring.seal("a", 1, PART, b"not from b")
    for sender in ("b", "b", "nobody", "(others)"):
        with pytest.raises((BadMessage, Untrusted)) as caught:
            a.known.open(sender, forged)
        a.known.refuse(caught.value, sender)
    assert a.known.refused_from == {"b": 3, "(others)": 2}, "names that were never met are not counted one by one"


def test_many_senders_fill_no_memory_with_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_directory, "MAX_COUNTED_SENDERS", 3)
    keyring = OpenKeyring("a", 1)
    known = PeerDirectory(keyring, Roster(), None, on_change=lambda: None, on_revoked=lambda: None)
    for number in range(10):
        keyring.meet(OpenKeyring(f"n{number}", 1).card())
        known.refuse(Untrusted("no"), f"n{number}")
    known.refuse(Untrusted("no"), "n1")
    assert known.refused_from == {"n0": 1, "n1": 2, "n2": 1, "(others)": 7}


def test_a_flood_of_one_kind_hides_no_other_from_the_log(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    a = member(authority, "a")
    for _ in range(100):
        a.known.refuse(DamagedMessage("Sealed by another."), "b")
    a.known.refuse(Untrusted("A card cannot be read."))
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert [line.rpartition(": ")[2] for line in warnings] == ["Sealed by another.", "A card cannot be read."]


def test_what_is_refused_is_counted_and_the_log_is_not_flooded(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    a = member(authority, "a")
    for _ in range(1000):
        a.known.refuse(Untrusted("A card cannot be read."))
    assert a.known.refused == {"untrusted": 1000}
    assert caplog.text.count("refused") == 1


# ---- revocations ----


def test_a_list_spreads_with_greetings_and_letters_and_is_kept(authority: Authority) -> None:
    a, b, c, d = (member(authority, name) for name in "abcd")
    for node in (a, b, c):
        node.sees(a, b, c, d)
        node.asks(d)
    b.asks(c)
    assert "d" in b.roster.records()
    newest = authority.revoke("d")
    (authority.folder / "a.revoked").write_bytes(newest)
    a.known.refresh()
    a.asks(b)  # takes it along
    c.known.open("b", dict(b.known.revocation_notices())["c"])
    for node in (a, b, c):
        assert not node.roster.is_live("d")
        assert node.revocations == 1
        kept = authority.folder / f"{node.name}.revoked"
        assert kept.read_bytes() == newest
    assert (authority.folder / "b.revoked").stat().st_mode & 0o777 == 0o600
    with pytest.raises(Untrusted, match="revoked"):
        d.asks(b)


def test_a_file_that_could_not_be_read_is_told_once_and_read_when_it_can_be(
    authority: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = member(authority, "a")
    authority.invite("b")
    (authority.folder / "a.revoked").write_bytes(authority.revoke("b"))

    def too_many_files(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", too_many_files)
        for _ in range(3):
            a.known.refresh()
    assert caplog.text.count("Too many open files") == 1
    assert a.revocations == 0
    a.known.refresh()
    assert a.revocations == 1


def test_a_damaged_list_on_disk_is_told_at_the_start_and_ignored_later(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    a = member(authority, "a")
    file = authority.folder / "a.revoked"
    file.write_bytes(b"damaged")
    for _ in range(3):
        a.known.refresh()
    assert caplog.text.count("cannot be used") == 1
    assert a.revocations == 0
    with pytest.raises(ConfigError, match=r"a\.revoked cannot be used.*Remove the file"):
        Blocklist(file, a.keyring.authority)  # type: ignore[attr-defined]
