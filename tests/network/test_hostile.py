"""What outsiders, insiders and those who were let go can do in a closed network, with real sessions over TLS."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import Unreachable, Untrusted
from penstock.network import parts
from penstock.network.members import isolation
from penstock.network.members.peer_directory import PART, RECORD, PeerDirectory
from penstock.network.parts import PART_BYTES, Part
from penstock.network.stream import Stream
from penstock.network.trust import certificates, revocations
from penstock.network.trust.keyring import read_envelope
from penstock.network.zenoh.router import ZenohRouter
from penstock.network.zenoh.session import session_settings
from tests.network.certificates import Authority, Papers
from tests.network.nets import Participant, free_port, wait_for

CANARY = b"canary, which nobody else may read"


class World:
    """A closed network: members, and sessions without any manners."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, protocol: str = "tls") -> None:
        self.authority, self._stack = Authority(folder), stack
        self.contact = f"{protocol}/127.0.0.1:{free_port()}"
        self.papers: dict[str, Papers] = {}

    def join(self, name: str, papers: Papers | None = None, **settings: Any) -> Participant:
        self.papers[name] = papers = papers or self.authority.invite(name)
        where = {"connect": (self.contact,)} if len(self.papers) > 1 else {"listen": (self.contact,)}
        router = ZenohRouter(papers.config(**(where | settings)), name, time.time_ns())
        self._stack.callback(router.close)
        router.publish(CANARY + name.encode())
        return Participant(router)

    def session(self, papers: Papers) -> Session:
        return Session(self._stack, papers, self.contact)

    def revoke(self, at: str, *names: str) -> None:
        """As the authority's machine does it."""
        self.papers[at].revocations_file.write_bytes(self.authority.revoke(*names))


class Session:
    """A raw Zenoh session that hears what it can, and keeps all bytes of it."""

    def __init__(self, stack: contextlib.ExitStack, papers: Papers, contact: str) -> None:
        import zenoh

        config = papers.config(connect=(contact,), revocations_file=None)
        self.zenoh = zenoh.open(zenoh.Config.from_json5(json.dumps(session_settings(config))))
        stack.callback(self.zenoh.close)
        self.root = f"penstock/{papers.network}"
        self.letters: list[tuple[str, bytes, bytes]] = []
        self.questions: list[tuple[str, bytes]] = []
        self.lives: set[str] = set()
        self.answers: dict[str, bytes] = {}  # what it says when a life of this name is asked
        self.reply_as = ""  # which life it says that it is, when everybody is asked
        self.linked = 0  # how often it got a link
        self._declared = [
            self.zenoh.info.declare_link_events_listener(self._count_link, history=True),
            self.zenoh.declare_subscriber("**", self._keep_letter),
            self.zenoh.declare_subscriber(f"{self.root}/inbox/*/*/*", self._keep_letter),
            self.zenoh.liveliness().declare_subscriber("**", self._keep_life, history=True),
            self.zenoh.declare_queryable(f"{self.root}/meet/**", self._keep_question),
        ]

    def _keep_letter(self, sample: Any) -> None:
        attachment = sample.attachment.to_bytes() if sample.attachment is not None else b""
        self.letters.append((str(sample.key_expr), attachment, sample.payload.to_bytes()))

    def _keep_life(self, sample: Any) -> None:
        self.lives.add(str(sample.key_expr).removeprefix(f"{self.root}/alive/"))

    def _count_link(self, event: Any) -> None:
        from zenoh import SampleKind

        self.linked += event.kind == SampleKind.PUT

    def _keep_question(self, query: Any) -> None:
        key = str(query.key_expr)
        self.questions.append((key, query.payload.to_bytes() if query.payload is not None else b""))
        with query:
            answer = self.answers.get(key.split("/")[3])
            if answer is not None:
                query.reply(f"{self.root}/meet/{self.reply_as}/{key.split('/')[-1]}" if self.reply_as else key, answer)

    def declare(self, node: str, epoch: int) -> None:
        self._declared.append(self.zenoh.liveliness().declare_token(f"{self.root}/alive/{node}/{epoch}"))

    def put(self, destination: str, sender: str, body: bytes, envelope: bytes = b"", stream: str = "control") -> None:
        self.zenoh.put(f"{self.root}/inbox/{destination}/{stream}/{sender}", body, attachment=envelope)

    def ask(self, selector: str, question: bytes = b"") -> list[bytes]:
        from zenoh import QueryTarget

        replies = self.zenoh.get(f"{self.root}/{selector}", target=QueryTarget.ALL, payload=question, timeout=1.0)
        return [reply.ok.payload.to_bytes() for reply in replies if reply.ok is not None]

    def links(self) -> list[str]:
        return [str(link.auth_identifier) for link in self.zenoh.info.links()]

    def everything(self) -> list[bytes]:
        return [part for letter in self.letters for part in letter[1:]] + [question for _, question in self.questions]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(tmp_path, stack)


def exchange(one: Participant, other: Participant, data: bytes) -> None:
    """Both ways, also when the network has just been opened again."""
    for sender, receiver in ((one, other), (other, one)):

        def arrives(sender: Participant = sender, receiver: Participant = receiver) -> bool:
            with contextlib.suppress(Unreachable):
                sender.router.send(receiver.router.node_id, data)
            return (sender.router.node_id, data) in receiver.received

        wait_for(arrives, "the message")


def epoch_of(session: Session, node: str) -> int:
    wait_for(lambda: any(life.startswith(f"{node}/") for life in session.lives), "a sign of life")
    return next(int(life.partition("/")[2]) for life in session.lives if life.startswith(f"{node}/"))


# ---- outsiders ----


@pytest.mark.parametrize("protocol", ["tls", "quic"])
@pytest.mark.parametrize("kind", ["not signed by this network's authority", "expired", "revoked"])
def test_an_outsider_gets_nothing_and_is_not_seen(tmp_path: Path, protocol: str, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        world = World(tmp_path, stack, protocol)
        if kind == "not signed by this network's authority":
            papers = Authority(tmp_path, "stranger").invite("c", trusting=world.authority.file)
        else:
            papers = world.authority.invite("c", seconds=1 if kind == "expired" else 3600)
        if kind == "expired":
            ends = certificates.load_certificate(papers.certificate_file.read_bytes()).not_valid_after_utc.timestamp()
            wait_for(lambda: time.time() > ends, "the certificate to end")
        home = world.authority.invite("a")
        if kind == "revoked":
            home.revocations_file.write_bytes(world.authority.revoke("c"))
        a = world.join("a", home)
        outsider = world.session(papers)
        outsider.declare("c", 1)
        b = world.join("b")
        wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "the members")
        if kind == "revoked":
            wait_for(lambda: outsider.linked, "its certificate is still good for TLS, so that this shows something")
        exchange(a, b, CANARY)
        outsider.put("a", "b", b"I am b")
        assert outsider.ask("meet/**", b"") == []
        exchange(a, b, b"after it")
        assert outsider.lives <= {"c/1"}, "its own"
        assert [key for key, _, _ in outsider.letters if not key.endswith("inbox/a/control/b")] == []
        assert {body for _, _, body in outsider.letters} <= {b"I am b"}, "its own"
        assert {sender for sender, _ in a.received} == {"b"}
        assert (a.router.refused(), b.router.refused()) == ({}, {}), "nothing of it got through"


# ---- insiders ----


def test_an_insider_reads_nothing_of_what_others_say(world: World) -> None:
    a, b = world.join("a"), world.join("b")
    insider = world.session(world.authority.invite("c"))
    insider.declare("c", 1)
    wait_for(lambda: a.sees("a", "b") and len(insider.links()) >= 2, "everybody")
    for number in range(20):
        exchange(a, b, CANARY + b"%d" % number)
        a.router.publish(CANARY + b"%d" % number)
    wait_for(lambda: b.router.records()["a"] == CANARY + b"19", "the last record")
    wait_for(lambda: len(insider.letters) > 80, "what it hears")
    answers = insider.ask("meet/**") + insider.ask("**")
    for data in [*insider.everything(), *answers]:
        assert b"canary" not in data


def test_an_insider_cannot_speak_for_another(world: World) -> None:
    a, b = world.join("a"), world.join("b")
    papers = world.authority.invite("c")
    insider = world.session(papers)
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b") and len(insider.links()) >= 2, "everybody")
    epochs = {node: epoch_of(insider, node) for node in "ab"}
    keyring = papers.keyring(epochs["b"])  # so that its envelopes look like b's
    exchange(a, b, b"hello")
    wait_for(lambda: insider.letters, "something to repeat")
    question = msgspec.msgpack.encode([keyring.card(), b""])
    cards = {node: msgspec.msgpack.decode(insider.ask(f"meet/{node}/{epochs[node]}/c", question)[0])[0] for node in "ab"}
    keyring.meet(cards["a"])
    before, had = dict(a.router.records()), list(a.received)

    for key, envelope, body in list(insider.letters):  # all that it has heard, again, and on all streams
        destination, _, sender = key.split("/")[-3:]
        for stream in Stream:
            insider.put(destination, sender, body, envelope, stream.name.lower())
    for data in (b"", b"I am b", bytes(1 << 20)):
        for kind in (0, RECORD):
            insider.put("a", "b", data)
            insider.put("a", "b", *reversed(keyring.seal("a", epochs["a"], kind, data)))
    forged = keyring.seal("a", epochs["a"], RECORD, bytes(8) + b"I am b")
    insider.answers["b"] = msgspec.msgpack.encode([cards["b"], b"", *forged])
    insider.answers["ghost"] = msgspec.msgpack.encode([keyring.card(), b"", *forged])
    insider.declare("b", epochs["b"] + 10**9)  # a later life
    insider.declare("ghost", 7)
    stranger = certificates.create_authority(world.authority.network)
    lies = revocations.sign({1: "b"}, stranger).encode()
    insider.ask(f"meet/a/{epochs['a']}/c", msgspec.msgpack.encode([keyring.card(), lies]))
    insider.ask(f"meet/a/{epochs['a']}/c", b"nonsense")

    wait_for(lambda: a.router.refused().get("damaged_message", 0) >= 6, "all forged letters to be refused")
    wait_for(lambda: any("/ghost/" in key for key, _ in insider.questions), "the ghost to be asked")
    exchange(a, b, b"still there")
    assert dict(a.router.records()) == before
    assert set(a.received) - set(had) == {("b", b"still there")}
    assert a.received.count(("b", b"hello")) == had.count(("b", b"hello")), "nothing is heard twice"


def test_an_insider_that_shows_signs_of_a_node_does_not_keep_it_from_starting(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a = world.join("a", lease_ms=500)
    insider = world.session(world.authority.invite("c"))
    insider.declare("b", 7)
    wait_for(insider.links, "the insider")
    b = world.join("b", lease_ms=500)
    wait_for(lambda: a.sees("a", "b"), "the node")
    assert "does not answer; using it anyway" in caplog.text
    exchange(a, b, b"hello")


def test_an_insider_that_floods_a_node_costs_an_honest_pair_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins messages that never end, on all streams and as several starts of its node, and seals some of them wrongly."""
    monkeypatch.setattr(parts, "MAX_UNFINISHED_BYTES", 12 * PART_BYTES)
    a, b = world.join("a"), world.join("b")
    papers = world.authority.invite("c")
    insider = world.session(papers)
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b") and len(insider.links()) >= 2, "everybody")
    epoch = epoch_of(insider, "b")
    keyrings = [papers.keyring(number) for number in range(1, 5)]
    for keyring in keyrings:
        (answer,) = insider.ask(f"meet/b/{epoch}/c", msgspec.msgpack.encode([keyring.card(), b""]))
        keyring.meet(msgspec.msgpack.decode(answer)[0])
    done, sizes = threading.Event(), list[int]()

    def flood() -> None:
        number = 0
        while not done.is_set() or number < 60:
            number += 1
            keyring, stream = keyrings[number % 4], Stream(number % 3)
            for offset in range(0, 3 * PART_BYTES, PART_BYTES):
                part = Part(False, number, offset, 9 * PART_BYTES, memoryview(bytes(PART_BYTES))).pack()
                envelope, body = keyring.seal("b", epoch, PART, part, stream)
                insider.put("b", "c", body if number % 5 else body[::-1], envelope, stream.name.lower())
            sizes.append(b.router._messenger._assembler.size)  # type: ignore[attr-defined]

    flooding = threading.Thread(target=flood)
    flooding.start()
    sent = [b"%d " % number + bytes(4 * PART_BYTES) for number in range(20)]
    for message in sent:
        a.router.send("b", message)
    done.set()
    flooding.join()
    wait_for(lambda: len(b.received) == len(sent), "all messages")
    assert [data for sender, data in b.received if sender == "a"] == sent, "none is lost, and all are in order"
    assert max(sizes) <= 13 * PART_BYTES  # it makes room once it has taken a part
    wait_for(lambda: b.router.refused_from().get("c"), "wrong seals to be counted")  # type: ignore[attr-defined]
    assert b.router.refused_from().keys() == {"c"}  # type: ignore[attr-defined]


def test_letters_of_other_epochs_are_counted_and_hold_up_nobody(world: World) -> None:
    a, b = world.join("a"), world.join("b")
    papers = world.authority.invite("c")
    insider, keyring = world.session(papers), papers.keyring(1)
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b") and len(insider.links()) >= 2, "everybody")
    epoch = epoch_of(insider, "b")
    (answer,) = insider.ask(f"meet/b/{epoch}/c", msgspec.msgpack.encode([keyring.card(), b""]))
    keyring.meet(msgspec.msgpack.decode(answer)[0])
    sealed = keyring.seal("b", epoch, PART, b"for another start of b", Stream.DATA)
    envelope = read_envelope(sealed.envelope)
    strange = [envelope._replace(receiver=epoch + 1), envelope._replace(receiver=epoch - 1), envelope._replace(sender=2)]
    for number in range(99):
        insider.put("b", "c", sealed.body, strange[number % 3].pack(), "data")
    exchange(a, b, b"beside them")
    wait_for(lambda: b.router.refused_from() == {"c": 99}, "all of them to be counted")  # type: ignore[attr-defined]
    assert b.router.refused() == {Untrusted.code: 33}, "those for an earlier start of b are usual after a restart"
    assert a.router.refused() == {}
    assert {sender for sender, _ in b.received} == {"a"}


def strange_answer(papers: Papers) -> bytes:
    """The greeting of a member with a certificate of a version that there is not."""
    card = msgspec.msgpack.decode(papers.keyring(7).card())
    card[0] = card[0].replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07", 1)
    return msgspec.msgpack.encode([msgspec.msgpack.encode(card), b""])


def test_an_insider_whose_answers_nobody_can_read_does_not_keep_a_node_from_starting(world: World) -> None:
    a = world.join("a")
    papers = world.authority.invite("c")
    insider = world.session(papers)
    insider.answers["*"], insider.reply_as = strange_answer(papers), "c/7"
    wait_for(insider.links, "the insider")
    b = world.join("b")
    assert b.router.refused() == {"untrusted": 1}
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "the members")


def test_an_answer_that_nobody_thought_of_does_not_keep_a_node_from_starting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("nobody thought of this")

    a = world.join("a")
    with monkeypatch.context() as broken:
        broken.setattr(PeerDirectory, "accept_answer", fail)
        b = world.join("b")
    assert b.router.refused().get("malformed_message", 0) > 0
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "the members")


def test_what_cannot_be_handled_is_told_now_and_then(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = world.join("a")
    insider = world.session(world.authority.invite("c"))
    epoch, asked = epoch_of(insider, "a"), []

    def fail(question: bytes) -> bytes:
        asked.append(question)
        raise TypeError("nobody thought of this")

    monkeypatch.setattr(a.router, "on_question", fail)
    for _ in range(50):
        insider.ask(f"meet/a/{epoch}/c")
    wait_for(lambda: len(asked) == 50, "all questions")
    errors = [entry for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert [entry.exc_info is not None for entry in errors] == [True]


# ---- those who were let go ----


def test_a_node_that_is_revoked_is_out_and_the_others_go_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = world.join("a"), world.join("b"), world.join("c")
    spy = world.session(world.papers["c"])  # the same certificate, without our manners
    for member in (a, b, c):
        wait_for(lambda member=member: member.sees("a", "b", "c"), "everybody")
    world.revoke("a", "c")
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "it to be out")
    wait_for(lambda: world.papers["b"].revocations_file.exists(), "the list to reach those who did not make it")
    exchange(a, b, CANARY)
    with pytest.raises(Unreachable):
        a.router.send("c", b"hello")
    assert {body for _, body in c.received} == set()

    before = spy.linked
    wait_for(lambda: spy.linked > before, "a link, so that this shows something")
    spy.lives.clear()
    spy.letters.clear()
    exchange(a, b, CANARY + b" again")
    a.router.publish(CANARY)
    d = world.join("d")
    wait_for(lambda: a.sees("a", "b", "d") and d.sees("a", "b", "d"), "a new node")
    assert spy.ask("meet/**") == []
    assert (spy.lives, spy.letters) == (set(), [])


def test_a_node_that_is_revoked_has_no_link_that_lasts(world: World) -> None:
    a, b = world.join("a"), world.join("b")
    spy = world.session(world.authority.invite("c"))
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b") and len(spy.links()) >= 2, "everybody")
    names = set(revocations.read(world.authority.revoke("c"), world.authority.identity.certificate).common_names())
    world.revoke("a", "c")
    wait_for(world.papers["b"].revocations_file.exists, "the list")
    before = spy.linked
    wait_for(lambda: spy.linked >= before + 3, "it to come back, since its certificate is good for TLS")
    for member in (a, b):
        wait_for(lambda member=member: links_of(member), "the links between members")
        wait_for(lambda member=member: not names & links_of(member), "its link to be closed")
    wait_for(lambda: not spy.links(), "its own side to notice")
    exchange(a, b, b"hello")


def links_of(member: Participant) -> set[str]:
    """The certificates at the other ends of a member's links."""
    presence = member.router._presence  # type: ignore[attr-defined]
    return {str(link.auth_identifier) for link in presence.session.info.links()} if presence is not None else set()


def test_messages_and_records_around_a_revocation_arrive_or_are_told_to_be_lost(world: World) -> None:
    a, b = world.join("a"), world.join("b")
    world.authority.invite("c")
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "both")
    errors: list[Exception] = []
    done = threading.Event()

    def pour(sender: Participant, node: str) -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                sender.router.send(node, b"%d" % number)
                sender.router.publish(b"%d" % number)
            except Unreachable:
                time.sleep(0.001)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=pour, args=args) for args in ((a, "b"), (b, "a"))]
    for thread in threads:
        thread.start()
    world.revoke("a", "c")
    wait_for(world.papers["b"].revocations_file.exists, "the list")
    counts = len(a.received), len(b.received)
    wait_for(lambda: len(a.received) > counts[0] + 100 and len(b.received) > counts[1] + 100, "messages to flow again")
    done.set()
    for thread in threads:
        thread.join()
    assert errors == []
    for member in (a, b):
        numbers = [int(data) for _, data in member.received]
        assert numbers == sorted(set(numbers)), "in order, and none twice"
    for sender, receiver in ((a, b), (b, a)):
        name = sender.router.node_id
        wait_for(lambda s=sender, r=receiver, n=name: r.router.records().get(n) == s.router.records()[n], "the last record")


def test_a_node_that_learns_that_it_is_out_says_so_once_and_has_nobody(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a, b = world.join("a"), world.join("b")
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "both")
    world.papers["b"].revocations_file.write_bytes(world.authority.revoke("b"))
    wait_for(lambda: b.sees("b"), "it to have nobody")
    with pytest.raises(Unreachable):
        b.router.send("a", b"hello")
    wait_for(lambda: a.sees("a"), "its goodbye")
    b.router.close()
    again = world.join("b", world.papers["b"])  # it does not get in by starting again
    assert again.sees("b")
    out = [entry for entry in caplog.records if "penstock network invite b" in entry.getMessage()]
    assert [entry.levelno for entry in out] == [logging.ERROR] * 2, "once in each life"


def test_a_node_that_meets_nobody_any_more_is_told_what_that_may_mean(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = world.join("a"), world.join("b")
    wait_for(lambda: a.sees("a", "b") and b.sees("a", "b"), "both")
    monkeypatch.setattr(isolation, "WARN_AFTER_S", 0.1)
    world.revoke("a", "b")  # nobody tells b
    hint = "refuse this node's certificate"
    wait_for(lambda: hint in caplog.text, "the hint")
    assert (a.sees("a"), b.sees("b")) == (True, True)
    assert caplog.text.count(hint) == 1, "a knows why it is alone"


def test_a_node_that_was_let_go_can_be_invited_again(world: World) -> None:
    a, b = world.join("a"), world.join("b")
    wait_for(lambda: a.sees("a", "b"), "both")
    world.revoke("a", "b")
    wait_for(lambda: a.sees("a"), "it to be out")
    b.router.close()
    again = world.join("b", world.authority.invite("b"))
    wait_for(lambda: a.sees("a", "b") and again.sees("a", "b"), "it to be back")
    exchange(a, again, b"hello")


def test_those_who_met_through_a_node_that_has_gone_find_each_other_again(world: World) -> None:
    a = world.join("a")
    b, c = (world.join(name, listen=(f"tls/127.0.0.1:{free_port()}",)) for name in "bc")
    wait_for(lambda: b.sees("a", "b", "c") and c.sees("a", "b", "c"), "everybody")
    a.router.close()
    wait_for(lambda: b.sees("b", "c") and c.sees("b", "c"), "it to be gone")
    world.authority.invite("d")
    before = b.changes
    world.revoke("b", "d")
    wait_for(lambda: world.papers["c"].revocations_file.exists(), "the list to be with both")
    wait_for(lambda: b.changes > before and b.sees("b", "c") and c.sees("b", "c"), "both")
    exchange(b, c, b"hello")


def test_a_certificate_that_ends_takes_its_node_along(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a = world.join("a")
    b = world.join("b", world.authority.invite("b", seconds=6))
    wait_for(lambda: a.sees("a", "b"), "both")
    wait_for(lambda: a.sees("a"), "the certificate to end")
    wait_for(lambda: "certificate of this node has expired" in caplog.text, "its own complaint")
    with pytest.raises(Unreachable):
        a.router.send("b", b"hello")
    assert b.router.records().keys() <= {"a", "b"}


# ---- many ----


def test_nodes_that_start_at_once_and_change_their_records_all_agree_in_the_end(world: World) -> None:
    first = world.join("n0")
    members = {"n0": first}

    def start(name: str) -> None:
        members[name] = world.join(name)

    threads = [threading.Thread(target=start, args=(f"n{number}",)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for number in range(50):
        for name, member in list(members.items()):
            member.router.publish(f"{name}: {number}".encode())
    for thread in threads:
        thread.join()
    for name, member in members.items():
        member.router.publish(f"{name}: last".encode())
    expected = {name: f"{name}: last".encode() for name in members}
    assert len(expected) == 6
    for member in members.values():
        wait_for(lambda member=member: dict(member.router.records()) == expected, "all records")
