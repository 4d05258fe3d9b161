"""Pairing over real sockets: what both sides show is the same, unless somebody is in between."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from penstock.config.home import JoinedNetwork
from penstock.errors import Unreachable, Untrusted
from penstock.network.joining import pairing, stranger_listener
from penstock.network.joining.join_protocol import Channel
from penstock.network.joining.pairing import (
    MAX_MESSAGE_BYTES,
    NUMBER_BYTES,
    PAIRING_MARK,
    Pairing,
    PairingCommitment,
    PairingListener,
    PairingNumber,
    commit,
    pair_with,
    pairing_words,
    word_list,
)
from tests.network.joins import created
from tests.server import free_port

PATIENCE_S = 20.0
TOKEN = "penstock2:token"


@pytest.fixture
def home(tmp_path: Path) -> JoinedNetwork:
    return created(tmp_path / "a")


class Host:
    """A machine that created a network and pairs."""

    def __init__(self, network: JoinedNetwork) -> None:
        self.endpoint = f"tls/127.0.0.1:{free_port()}"
        self.listener = PairingListener(network, self.endpoint)
        self._thread = ThreadPoolExecutor(1)
        self.pairing: Future[Pairing] = self._thread.submit(self.listener.wait, PATIENCE_S)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.endpoint.rpartition(":")[2])

    def close(self) -> None:
        self.listener.__exit__()
        self._thread.shutdown()


@pytest.fixture
def host(home: JoinedNetwork) -> Iterator[Host]:
    with closing(Host(home)) as host:
        yield host


def unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_both_sides_show_the_same_words_and_the_token_arrives_once_they_were_compared(host: Host) -> None:
    guest = pair_with(host.endpoint)
    pairing = host.pairing.result(PATIENCE_S)
    assert pairing.words == guest.words
    assert len(pairing.words.split()) == 4
    assert pairing.address == "127.0.0.1"
    pairing.give(TOKEN)
    assert guest.receive_token() == TOKEN


def test_the_words_of_two_pairings_differ(home: JoinedNetwork) -> None:
    words = set()
    for _ in range(3):
        with closing(Host(home)) as host:
            words.add(pair_with(host.endpoint).words)
    assert len(words) == 3


def test_who_stands_in_between_makes_the_words_differ(host: Host, tmp_path: Path) -> None:
    """It passes on all messages, and can show no certificate but its own."""
    other = created(tmp_path / "between")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other.certificate_file, other.key_file)
    with closing(socket.create_server(("127.0.0.1", 0))) as between:

        def relay() -> None:
            near = Channel(between.accept()[0], context, server_side=True, seconds=PATIENCE_S, max_bytes=MAX_MESSAGE_BYTES)
            far = Channel(
                socket.create_connection(host.address),
                unchecked(),
                server_side=False,
                seconds=PATIENCE_S,
                max_bytes=MAX_MESSAGE_BYTES,
            )
            near.handshake()
            far.handshake()
            far.send(near.receive(PairingCommitment, MAX_MESSAGE_BYTES))
            near.send(far.receive(PairingNumber, MAX_MESSAGE_BYTES))
            far.send(near.receive(PairingNumber, MAX_MESSAGE_BYTES))
            kept.extend([near, far])

        kept: list[Channel] = []
        thread = threading.Thread(target=relay)
        thread.start()
        guest = pair_with(f"tls/127.0.0.1:{between.getsockname()[1]}")
        thread.join()
        pairing = host.pairing.result(PATIENCE_S)
    assert pairing.words != guest.words
    assert not pairing.matches(guest.words)


def send_another_number(channel: Channel) -> None:
    channel.handshake()
    channel.send(PairingCommitment(PAIRING_MARK, commit(bytes(NUMBER_BYTES))))
    channel.receive(PairingNumber, MAX_MESSAGE_BYTES)
    channel.send(PairingNumber(b"\1" * NUMBER_BYTES))


def send_another_mark(channel: Channel) -> None:
    channel.handshake()
    channel.send(PairingCommitment(b"penstock pair 0\n", commit(bytes(NUMBER_BYTES))))
    channel.receive(PairingNumber, MAX_MESSAGE_BYTES)
    channel.send(PairingNumber(bytes(NUMBER_BYTES)))


def hang_up(channel: Channel) -> None:
    channel.handshake()


@pytest.mark.parametrize("cheat", [send_another_number, send_another_mark, hang_up])
def test_a_number_that_was_chosen_late_is_no_pairing_and_the_next_machine_gets_its_turn(
    host: Host, cheat: Callable[[Channel], None]
) -> None:
    with closing(socket.create_connection(host.address)) as connection:
        cheat(Channel(connection, unchecked(), server_side=False, seconds=PATIENCE_S, max_bytes=MAX_MESSAGE_BYTES))
    guest = pair_with(host.endpoint)
    assert host.pairing.result(PATIENCE_S).words == guest.words


def test_a_machine_that_stalls_is_dropped_and_the_next_one_gets_its_turn(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "EXCHANGE_S", 0.05)
    with closing(socket.create_connection(host.address, PATIENCE_S)) as stalling:
        assert stalling.recv(1) == b""
    monkeypatch.undo()
    guest = pair_with(host.endpoint)
    assert host.pairing.result(PATIENCE_S).words == guest.words


def test_connections_that_stall_hold_up_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger_listener, "MAX_CONNECTIONS", 3)
    with ExitStack() as stalling:
        for _ in range(5):
            stalling.enter_context(closing(socket.create_connection(host.address)))
        guest = pair_with(host.endpoint)
        assert host.pairing.result(PATIENCE_S).words == guest.words


def test_a_stranger_that_pairs_first_does_not_take_the_place_of_the_machine(host: Host) -> None:
    stranger = pair_with(host.endpoint)
    host.pairing.result(PATIENCE_S)
    guest = pair_with(host.endpoint)
    while (found := host.listener.find(guest.words)) is None:
        time.sleep(0.01)
    found.give(TOKEN)
    assert guest.receive_token() == TOKEN
    assert host.listener.find("acorn actor adult agent") is None
    host.listener.__exit__()
    with pytest.raises(Untrusted, match="sent no invitation"):
        stranger.receive_token()


def learn_the_words_and_leave(host: Host) -> None:
    with closing(socket.create_connection(host.address)) as connection:
        channel = Channel(connection, unchecked(), server_side=False, seconds=PATIENCE_S, max_bytes=MAX_MESSAGE_BYTES)
        channel.handshake()
        channel.send(PairingCommitment(PAIRING_MARK, commit(bytes(NUMBER_BYTES))))
        channel.receive(PairingNumber, MAX_MESSAGE_BYTES)


def test_who_leaves_if_the_words_do_not_suit_cannot_try_for_ever(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "MAX_EXCHANGES_PER_ADDRESS", 3)
    for _ in range(3):
        learn_the_words_and_leave(host)
    with pytest.raises((ssl.SSLEOFError, ConnectionError)):
        learn_the_words_and_leave(host)
    monkeypatch.setattr(pairing, "MAX_EXCHANGES_PER_ADDRESS", 100)
    monkeypatch.setattr(pairing, "MAX_EXCHANGES", 4)
    learn_the_words_and_leave(host)
    with pytest.raises(Untrusted, match="Too many machines"):
        host.pairing.result(PATIENCE_S)


def test_a_token_that_does_not_come_is_an_error(host: Host) -> None:
    guest = pair_with(host.endpoint)
    host.pairing.result(PATIENCE_S)
    host.listener.__exit__()
    with pytest.raises(Untrusted, match="sent no invitation"):
        guest.receive_token()


def test_words_that_are_compared_for_too_long_are_an_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "COMPARE_S", 0.0)
    pair_with(host.endpoint)
    with pytest.raises(Unreachable, match="took too long"):
        host.pairing.result(PATIENCE_S).give(TOKEN)


def test_where_nobody_pairs_is_said(home: JoinedNetwork) -> None:
    with pytest.raises(Unreachable, match=r"No machine is pairing at 127\.0\.0\.1"):
        pair_with(f"tls/127.0.0.1:{free_port()}")
    with (
        PairingListener(home, f"tls/127.0.0.1:{free_port()}") as listener,
        pytest.raises(Unreachable, match="No machine has come"),
    ):
        listener.wait(0.01)


def test_words_are_easily_told_apart_and_follow_from_all_that_is_compared() -> None:
    assert len(word_list()) == len(set(word_list())) == 256
    assert all(word.isascii() and word.islower() and 3 <= len(word) <= 8 for word in word_list())
    made = {pairing_words(*parts) for parts in ((b"c", b"a", b"b"), (b"d", b"a", b"b"), (b"c", b"b", b"b"), (b"c", b"a", b"a"))}
    assert len(made) == 4


@pytest.mark.parametrize("typed, same", [("Acorn-actor adult  AGENT", True), ("acorn actor adult", False), ("", False)])
def test_words_may_be_typed_as_people_type(typed: str, same: bool) -> None:
    assert Pairing("acorn actor adult agent", "", None).matches(typed) == same  # type: ignore[arg-type]
