"""The Keyring: whom it believes, and that what is sealed for one life is read by that life alone, once."""

from __future__ import annotations

import contextlib
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import BadMessage, ConfigError, Unreachable, Untrusted
from penstock.network.stream import Stream
from penstock.network.trust import keyring as keyring_module
from penstock.network.trust import revocations
from penstock.network.trust.keyring import (
    MAX_EPOCHS_PER_NODE,
    REPLAY_WINDOW,
    Keyring,
    KnownPeer,
    OpenKeyring,
    ReplayWindow,
    Sealed,
    read_envelope,
)
from tests.network.certificates import Authority, Papers, mutated


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def papers(authority: Authority) -> dict[str, Papers]:
    return {node: authority.invite(node) for node in ("a", "b", "c")}


def met(*keyrings: Keyring) -> None:
    for one in keyrings:
        for other in keyrings:
            one.meet(other.card())


# ---- letters ----


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "open"])
@pytest.mark.parametrize("data", [b"", b"hello", bytes(1 << 20)], ids=len)
def test_what_is_sealed_for_a_life_is_read_by_it(papers: dict[str, Papers], closed: bool, data: bytes) -> None:
    a, b = (papers["a"].keyring(1), papers["b"].keyring(2)) if closed else (OpenKeyring("a", 1), OpenKeyring("b", 2))
    met(a, b)
    assert b.open("a", a.seal("b", 2, 0, data)) == data
    assert a.open("b", b.seal("a", 1, 0, data)) == data
    assert a.open("a", a.seal("a", 1, 0, data)) == data, "a node writes to itself"


def test_nobody_else_can_read_it(papers: dict[str, Papers]) -> None:
    a, b, c, later_b = papers["a"].keyring(1), papers["b"].keyring(2), papers["c"].keyring(3), papers["b"].keyring(4)
    met(a, b, c, later_b)
    sealed = a.seal("b", 2, 0, b"a secret that stays one")
    assert b"secret" not in sealed.body
    for other in (c, later_b, a):
        with pytest.raises(BadMessage):
            other.open("a", sealed)


def test_nobody_can_write_in_anothers_name(papers: dict[str, Papers]) -> None:
    a, b, c = papers["a"].keyring(1), papers["b"].keyring(1), papers["c"].keyring(1)
    met(a, b, c)
    for forged in (c.seal("a", 1, 0, b"I am b"), a.seal("b", 1, 0, b"I am b"), Sealed(c.seal("a", 1, 0, b"")[0], b"I am b")):
        with pytest.raises(BadMessage):
            a.open("b", forged)


def test_a_letter_is_read_once(papers: dict[str, Papers]) -> None:
    a, b = papers["a"].keyring(1), papers["b"].keyring(1)
    met(a, b)
    first, second = (a.seal("b", 1, 0, data) for data in (b"first", b"second"))
    assert b.open("a", second) == b"second"
    assert b.open("a", first) == b"first", "one that was overtaken is no repetition"
    for again in (first, second):
        with pytest.raises(BadMessage, match="received twice"):
            b.open("a", again)


@given(st.lists(st.integers(0, 3 * REPLAY_WINDOW), max_size=60))
def test_a_number_is_never_taken_twice_and_a_late_one_within_the_window_is(numbers: list[int]) -> None:
    window = ReplayWindow()
    taken: set[int] = set()
    for number in numbers:
        new = window.is_new(number)
        assert not (new and number in taken)
        assert new or number in taken or number <= max(taken) - REPLAY_WINDOW
        if new:
            taken.add(number)


@given(data=st.data())
def test_any_change_of_a_letter_is_refused(papers: dict[str, Papers], data: st.DataObject) -> None:
    a, b = papers["a"].keyring(1), papers["b"].keyring(1)
    met(a, b)
    sealed = a.seal("b", 1, 0, b"hello")
    whole = bytearray(sealed.envelope + sealed.body)
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for envelope, body in ((whole[: len(sealed.envelope)], whole[len(sealed.envelope) :]), (whole[:cut], whole[cut:])):
        with pytest.raises(BadMessage):
            b.open("a", Sealed(bytes(envelope), bytes(body)))


streams = st.sampled_from(list(Stream))


@settings(max_examples=60)
@given(data=st.data(), sent=st.lists(streams, min_size=1, max_size=80), closed=st.booleans())
def test_messages_that_overtake_each_other_within_the_window_are_each_accepted_once(
    papers: dict[str, Papers], data: st.DataObject, sent: list[Stream], closed: bool
) -> None:
    a, b = (papers["a"].keyring(1), papers["b"].keyring(2)) if closed else (OpenKeyring("a", 1), OpenKeyring("b", 2))
    met(a, b)
    sealed = [a.seal("b", 2, 0, b"%d" % number, stream) for number, stream in enumerate(sent)]
    order = data.draw(st.permutations(range(len(sealed))))
    accepted: set[int] = set()
    for number in order:
        assert b.open("a", sealed[number]) == b"%d" % number
        accepted.add(number)
        again = data.draw(st.sampled_from(sorted(accepted)))
        with pytest.raises(BadMessage, match="received twice"):
            b.open("a", sealed[again])


@settings(max_examples=30)
@given(busy=streams, other=streams.filter(lambda stream: stream is not Stream.CONTROL), count=st.integers(0, 3 * REPLAY_WINDOW))
def test_a_busy_stream_pushes_nothing_out_of_the_window_of_another(busy: Stream, other: Stream, count: int) -> None:
    a, b = OpenKeyring("a", 1), OpenKeyring("b", 2)
    met(a, b)
    late = a.seal("b", 2, 0, b"late", other)
    for _ in range(count):
        b.open("a", a.seal("b", 2, 0, b"", busy))
    if busy is other and count >= REPLAY_WINDOW:
        with pytest.raises(BadMessage, match="received twice"):
            b.open("a", late)
    else:
        assert b.open("a", late) == b"late"


def test_a_message_moved_to_another_stream_is_refused(papers: dict[str, Papers]) -> None:
    a, b = papers["a"].keyring(1), papers["b"].keyring(1)
    met(a, b)
    sealed = a.seal("b", 1, 0, b"hello", Stream.DATA)
    moved = read_envelope(sealed.envelope)._replace(stream=Stream.BULK).pack()
    with pytest.raises(BadMessage, match="not sealed by it"):
        b.open("a", Sealed(moved, sealed.body))
    unknown = sealed.envelope[:1] + bytes([len(Stream)]) + sealed.envelope[2:]
    with pytest.raises(BadMessage, match="unknown stream 3"):
        b.open("a", Sealed(unknown, sealed.body))
    assert b.open("a", sealed) == b"hello"


def test_an_envelope_of_another_version_is_refused_and_says_so(papers: dict[str, Papers]) -> None:
    with pytest.raises(BadMessage, match="has 25 bytes instead of 26; its sender may run another version"):
        papers["b"].keyring(1).open("a", Sealed(bytes(25), b""))


class NonceRecorder:
    """A cipher that keeps the nonces, as those of an open network leave no trace of them."""

    def __init__(self, nonces: list[bytes]) -> None:
        self._nonces = nonces

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        self._nonces.append(nonce)
        return data

    decrypt = encrypt


@pytest.fixture
def nonces(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    used: list[bytes] = []
    monkeypatch.setattr(keyring_module, "_NoCipher", lambda: NonceRecorder(used))
    return used


def test_no_nonce_is_used_twice_by_several_threads(nonces: list[bytes]) -> None:
    a, b = OpenKeyring("a", 1), OpenKeyring("b", 2)
    met(a, b)

    def seal() -> None:
        for number in range(500):
            a.seal("b", 2, 0, b"", Stream(number % 3))

    threads = [threading.Thread(target=seal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(nonces)) == len(nonces) == 2000


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(streams | st.sampled_from(["forget", "displace"]), max_size=60))
def test_no_nonce_is_used_twice_with_a_session_that_was_forgotten_and_met_again(nonces: list[bytes], actions: list) -> None:
    nonces.clear()
    a, b = OpenKeyring("a", 1), OpenKeyring("b", 2)
    met(a, b)
    for action in actions:
        if action == "forget":
            a._forget(lambda peer: peer.node == "b")
        elif action == "displace":
            for epoch in range(10, 10 + MAX_EPOCHS_PER_NODE):
                a.meet(OpenKeyring("b", epoch).card())
            a._forget(lambda peer: peer.epoch >= 10)
        else:
            a.meet(b.card())
            a.seal("b", 2, 0, b"", action)
    assert len(set(nonces)) == len(nonces) == sum(isinstance(action, Stream) for action in actions)


def test_a_life_that_was_not_met_cannot_be_written_to(papers: dict[str, Papers]) -> None:
    with pytest.raises(Unreachable, match="b"):
        papers["a"].keyring(1).seal("b", 1, 0, b"hello")


# ---- cards ----


def test_a_card_shown_again_changes_nothing(papers: dict[str, Papers]) -> None:
    a, b = papers["a"].keyring(1), papers["b"].keyring(1)
    met(a, b)
    sealed = a.seal("b", 1, 0, b"hello")
    assert b.open("a", sealed) == b"hello"
    b.meet(a.card())
    with pytest.raises(BadMessage, match="received twice"):
        b.open("a", sealed)


def test_a_second_card_of_one_life_is_refused(papers: dict[str, Papers]) -> None:
    a, b, twin = papers["a"].keyring(1), papers["b"].keyring(1), papers["a"].keyring(1)
    met(a, b)
    with pytest.raises(Untrusted, match="differ"):
        b.meet(twin.card())
    assert b.open("a", a.seal("b", 1, 0, b"hello")) == b"hello"


def test_an_old_card_does_not_displace_a_later_life(papers: dict[str, Papers]) -> None:
    a, old, b = papers["a"].keyring(9), papers["a"].keyring(3), papers["b"].keyring(1)
    met(a, b)
    b.meet(old.card())
    assert a.open("b", b.seal("a", 9, 0, b"hello")) == b"hello"


def test_only_the_latest_lives_of_a_node_are_kept(papers: dict[str, Papers]) -> None:
    b = papers["b"].keyring(1)
    lives = [papers["a"].keyring(epoch) for epoch in range(10, 10 + MAX_EPOCHS_PER_NODE + 1)]
    for life in lives:
        b.meet(life.card())
    assert [b.has_met("a", life.epoch) for life in lives] == [False] + [True] * MAX_EPOCHS_PER_NODE
    with pytest.raises(Untrusted, match="earlier start"):
        b.meet(lives[0].card())


def test_a_card_of_another_authority_is_refused(papers: dict[str, Papers], tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").invite("b").keyring(1)
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        papers["a"].keyring(1).meet(stranger.card())


def test_a_card_for_another_network_is_refused(papers: dict[str, Papers]) -> None:
    elsewhere = papers["b"]
    card = type(elsewhere)(**{**vars(elsewhere), "network": "elsewhere"}).keyring(1).card()
    with pytest.raises(Untrusted, match="not signed by it for this network"):
        papers["a"].keyring(1).meet(card)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")  # as it may be in a certificate that nobody has signed
@given(place=st.integers(0, 2000), change=st.integers(1, 255))
def test_a_card_that_was_changed_is_refused_or_says_the_same(papers: dict[str, Papers], place: int, change: int) -> None:
    a, b = papers["a"].keyring(1), papers["b"].keyring(7)
    card = bytearray(b.card())
    card[place % len(card)] ^= change  # its length differs from one signature to the next
    try:
        life = a.meet(bytes(card))
    except Untrusted:
        return
    assert (life.node, life.epoch, life.session_key) == ("b", 7, a.meet(b.card()).session_key)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@given(data=st.data())
def test_a_card_with_a_changed_certificate_is_refused_by_name(papers: dict[str, Papers], data: st.DataObject) -> None:
    a = papers["a"].keyring(1)
    certificate, *rest = msgspec.msgpack.decode(papers["b"].keyring(7).card())
    changed = data.draw(mutated(certificate).filter(lambda changed: changed != certificate))
    with pytest.raises(Untrusted):
        a.meet(msgspec.msgpack.encode([changed, *rest]))


@given(st.binary(max_size=200))
def test_nonsense_is_no_card(papers: dict[str, Papers], nonsense: bytes) -> None:
    with pytest.raises(Untrusted):
        papers["a"].keyring(1).meet(nonsense)
    with contextlib.suppress(Untrusted):  # everybody may write a card there
        OpenKeyring("a", 1).meet(nonsense)


def test_a_certificate_swapped_into_anothers_card_is_refused(papers: dict[str, Papers]) -> None:
    a, b, c = papers["a"].keyring(1), papers["b"].keyring(1), papers["c"].keyring(1)
    fields = msgspec.msgpack.decode(c.card())
    fields[0] = msgspec.msgpack.decode(b.card())[0]
    with pytest.raises(Untrusted, match="not signed by it"):
        a.meet(msgspec.msgpack.encode(fields))


# ---- who is out ----


def test_a_revoked_certificate_is_forgotten_and_not_met_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    a, b = authority.invite("a").keyring(1), authority.invite("b").keyring(1)
    met(a, b)
    letter = b.seal("a", 1, 0, b"hello")
    taken_back = revocations.read(authority.revoke("b"), a.authority)
    assert [life.node for life in a.revoke(taken_back)] == ["b"]
    with pytest.raises(BadMessage):
        a.open("b", letter)
    with pytest.raises(Unreachable):
        a.seal("b", 1, 0, b"hello")
    with pytest.raises(Untrusted, match="revoked"):
        a.meet(b.card())
    assert not a.is_revoked
    b.revoke(taken_back)
    assert b.is_revoked
    a.meet(authority.invite("b").keyring(2).card())  # invited again, with a new certificate


def test_a_certificate_that_is_revoked_while_its_card_is_read_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    a, b = authority.invite("a").keyring(1), authority.invite("b").keyring(1)
    taken_back = revocations.read(authority.revoke("b"), a.authority)
    read = a._read

    def read_then_revoke(card: bytes) -> KnownPeer:
        life = read(card)
        assert a.revoke(taken_back) == [], "nobody to forget yet"
        return life

    monkeypatch.setattr(a, "_read", read_then_revoke)
    with pytest.raises(Untrusted, match="revoked"):
        a.meet(b.card())
    assert not a.has_met("b", 1)


def test_a_certificate_that_ends_is_forgotten(tmp_path: Path) -> None:
    authority, now = Authority(tmp_path), [datetime.now(UTC)]
    a = authority.invite("a").keyring(1, clock=lambda: now[0])
    b = authority.invite("b", seconds=3600).keyring(1)
    a.meet(b.card())
    assert a.expire() == []
    now[0] += timedelta(hours=2)
    assert [life.node for life in a.expire()] == ["b"]
    with pytest.raises(Untrusted, match="expired on"):
        a.meet(b.card())


def test_papers_that_are_no_good_are_refused_at_home(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    papers = authority.invite("a")
    with pytest.raises(Untrusted, match=r"a\.pem.*expired.*invitation"):
        papers.keyring(1, clock=lambda: datetime.now(UTC) + timedelta(days=30))
    renamed = type(papers)(**{**vars(papers), "node": "b"})
    with pytest.raises(ConfigError, match="issued to node 'a', but this node is called 'b'"):
        renamed.keyring(1)
    rogue = Authority(tmp_path, "stranger").invite("a", trusting=authority.file)
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        rogue.keyring(1)
