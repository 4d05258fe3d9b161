"""Tokens that are valid once: one machine gets in with its own key, and everyone else is refused and told why."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.home import Home, JoinedNetwork
from penstock.errors import ConfigError, MalformedMessage, Unreachable, Untrusted
from penstock.network.joining import admission, authority, invitation_book, join_client, join_listener, joining, stranger_listener
from penstock.network.joining.admission import invite_once
from penstock.network.joining.invitation_book import MAX_WRONG_PROOFS, InvitationState
from penstock.network.joining.join_client import request_certificate
from penstock.network.joining.join_listener import JoinListener
from penstock.network.joining.join_protocol import (
    MAX_ANSWER_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_REQUEST_BYTES,
    Channel,
    JoinAnswer,
    JoinHello,
    JoinRefusal,
    JoinRequest,
)
from penstock.network.joining.join_token import JoinToken, decode_join, encode_join
from penstock.network.joining.token_text import from_text, to_text
from penstock.network.trust.certificates import load_identity, new_key, node_name, signing_request
from penstock.network.trust.revocation_stamp import read_stamp
from tests.network.joins import (
    HOURS_AGO,
    Impostor,
    admit,
    client_channel,
    connected,
    created,
    listening,
    request_of,
)
from tests.server import free_port

NAMES = (f"laptop{number}" for number in count())


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedNetwork]:
    """The network of a node that runs: its authority answers machines that join."""
    made = created(tmp_path_factory.mktemp("authority"))
    invite_once(made, "first")
    with listening(made):
        yield made


@pytest.fixture
def token(network: JoinedNetwork) -> JoinToken:
    return invite_once(network, next(NAMES))


def state(network: JoinedNetwork, token: JoinToken) -> InvitationState:
    found = invitation_book.read(network).find(token.id)
    assert found is not None
    return found.state(datetime.now(UTC))


def issued(network: JoinedNetwork, token: JoinToken) -> int:
    """How many certificates were issued to the node of this token."""
    found = invitation_book.read(network).find(token.id)
    assert found is not None
    return len(authority._register(network).get(found.node, []))


def refused(token: JoinToken) -> str:
    with pytest.raises(Untrusted) as error:
        request_certificate(token)
    assert "penstock network invite" in error.value.hint
    return error.value.message


# ---- the token ----


def test_a_token_is_read_as_it_was_and_holds_no_private_key(network: JoinedNetwork, token: JoinToken) -> None:
    text = encode_join(token)
    found = decode_join(f" {text[:70]}\n{text[70:]}\n")
    assert replace(found, expires=token.expires) == token
    assert abs(found.expires - token.expires) < timedelta(seconds=1)
    assert found.network == "home"
    assert timedelta(hours=5) < token.expires - datetime.now(UTC) <= timedelta(hours=6)
    assert text.startswith("penstock2:")
    assert len(text) < 1000


@given(data=st.data())
def test_a_token_that_was_cut_or_changed_is_refused_and_not_shown(network: JoinedNetwork, data: st.DataObject) -> None:
    pin = authority.signing_identity(network).certificate
    text = encode_join(JoinToken(pin, "desk", "0" * 12, bytes(32), ("tls/a:1",), HOURS_AGO))
    place = data.draw(st.integers(0, len(text) - 2))
    changed = data.draw(st.sampled_from([text[:place], text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]]))
    with pytest.raises(Untrusted) as error:
        decode_join(changed)
    assert text[20:60] not in str(error.value)


def test_a_larger_token_of_a_later_version_is_read(token: JoinToken) -> None:
    packed = from_text("penstock2:", encode_join(token), 10_000)
    later = msgspec.msgpack.encode([*msgspec.msgpack.decode(packed), "something new"])
    assert decode_join(to_text("penstock2:", later)).id == token.id


@pytest.mark.parametrize("seconds", [0, 30, 8 * 24 * 3600])
def test_an_invitation_is_for_minutes_to_days(network: JoinedNetwork, seconds: int) -> None:
    with pytest.raises(ConfigError, match="cannot be valid for"):
        invite_once(network, "phone", lifetime=timedelta(seconds=seconds))


def test_what_cannot_be_invited_is_refused_at_once(network: JoinedNetwork) -> None:
    with pytest.raises(ConfigError, match="name of this machine"):
        invite_once(network, "desk")
    with pytest.raises(ConfigError, match="cannot be the name of a node"):
        invite_once(network, "a/b")
    with pytest.raises(ConfigError, match="cannot be valid for 0 days"):
        invite_once(network, "phone", days=0)


# ---- joining ----


def test_a_machine_joins_with_a_key_of_its_own_and_gets_all_that_a_member_has(
    network: JoinedNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority.invite(network, "lost")
    authority.revoke(network, "lost")
    token = invite_once(network, "attic", days=20)
    with caplog.at_level(logging.INFO, "penstock.network"):
        joined = joining.join(Home(tmp_path), request_certificate(decode_join(encode_join(token)))).network
    identity = load_identity(joined.certificate_file.read_bytes(), joined.key_file.read_bytes())
    assert node_name(identity.certificate) == joined.node == "attic"
    assert timedelta(days=19) < identity.certificate.not_valid_after_utc - datetime.now(UTC) < timedelta(days=21)
    assert joined.connect == network.listen
    assert joined.revocations_file.read_bytes() == network.revocations_file.read_bytes()
    assert joined.stamp_file.read_bytes() == network.stamp_file.read_bytes()
    (use,) = [one.use for one in admission.invitations(network) if one.node == "attic"]
    assert use is not None
    assert use.address == "127.0.0.1"
    assert use.certificate == identity.certificate.public_bytes(Encoding.DER)
    assert f"a machine at 127.0.0.1 has joined as node attic with the invitation {token.id}" in caplog.text
    assert [member.node for member in authority.members(network) if not member.revoked and member.node == "attic"] == ["attic"]
    assert authority.revoke(network, "attic") == 1, "what was issued can be revoked"


def test_a_machine_that_is_a_member_gets_a_newer_certificate_and_keeps_its_stamp(network: JoinedNetwork, tmp_path: Path) -> None:
    home = Home(tmp_path)
    joining.join(home, request_certificate(invite_once(network, "cellar")), listen="tls/127.0.0.1:7000")
    old = replace(request_certificate(invite_once(network, "cellar")), stamp=b"")
    again = joining.join(home, old)
    assert (again.previous_node, again.network.listen) == ("cellar", ("tls/127.0.0.1:7000",))
    stamp = read_stamp(again.network.stamp_file.read_bytes(), old.authority)
    assert stamp.serial > 0


def test_an_answer_that_was_lost_is_given_again_to_the_same_key_alone(network: JoinedNetwork, token: JoinToken) -> None:
    key = new_key()
    first, second = (join_client._ask(token, key, token.endpoints[0]) for _ in range(2))
    assert first.identity.certificate == second.identity.certificate
    assert issued(network, token) == 1
    assert "used already" in refused(token)


def test_an_address_where_nothing_or_something_else_answers_does_not_keep_a_machine_out(
    network: JoinedNetwork, token: JoinToken, tmp_path: Path
) -> None:
    other = created(tmp_path)
    with closing(Impostor(other.certificate_file, other.key_file)) as impostor:
        nowhere = f"tls/127.0.0.1:{free_port()}"
        request_certificate(replace(token, endpoints=(nowhere, impostor.endpoint, *token.endpoints)))
        assert impostor.requests == []


# ---- refusals ----


def test_a_token_lets_one_machine_in(network: JoinedNetwork, token: JoinToken, caplog: pytest.LogCaptureFixture) -> None:
    request_certificate(token)
    assert refused(token) == "The invitation has been used already; each is good for one machine."
    assert issued(network, token) == 1
    assert f"the invitation {token.id} for" in caplog.text, "the authority's log says it too"
    assert "is used" in caplog.text


def test_of_machines_that_use_a_token_at_the_same_moment_one_gets_in(network: JoinedNetwork, token: JoinToken) -> None:
    requests = [request_of(token) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda request: admit(network, request).refusal, requests))
    assert sorted(answers) == [JoinRefusal.NONE, *[JoinRefusal.USED] * 7]
    assert issued(network, token) == 1


def test_a_token_that_has_expired_is_refused(network: JoinedNetwork, caplog: pytest.LogCaptureFixture) -> None:
    late = invite_once(network, next(NAMES), now=HOURS_AGO)
    assert refused(late) == "The invitation has expired."
    assert issued(network, late) == 0
    assert "is expired" in caplog.text


def test_a_token_that_was_withdrawn_is_refused(network: JoinedNetwork, token: JoinToken) -> None:
    (found,) = admission.withdraw(network, token.id)
    assert refused(token) == "The invitation was withdrawn."
    with pytest.raises(ConfigError, match="has no open invitation"):
        admission.withdraw(network, found.node)
    assert issued(network, token) == 0


def test_a_new_invitation_for_a_node_replaces_the_last_one(network: JoinedNetwork) -> None:
    old, new = (invite_once(network, "tablet") for _ in range(2))
    assert refused(old) == "The invitation was withdrawn."
    request_certificate(new)


def test_revoking_a_node_withdraws_its_invitation(network: JoinedNetwork) -> None:
    token = invite_once(network, "thief")
    assert authority.revoke(network, "thief") == 0
    assert refused(token) == "The invitation was withdrawn."
    with pytest.raises(ConfigError, match="No node 'nobody' was invited"):
        authority.revoke(network, "nobody")


def test_who_does_not_know_the_secret_learns_nothing_and_locks_the_invitation(network: JoinedNetwork, token: JoinToken) -> None:
    unknown = "The machine that created the network does not know this invitation."
    assert refused(replace(token, id="0" * 12)) == unknown
    used = invite_once(network, next(NAMES))
    request_certificate(used)
    assert refused(replace(used, secret=bytes(32))) == unknown, "not even whether it was used"
    for _ in range(MAX_WRONG_PROOFS):
        assert refused(replace(token, secret=bytes(32))) == unknown
    assert refused(token) == "The invitation was locked after too many attempts with a wrong secret."
    assert state(network, token) is InvitationState.LOCKED
    assert issued(network, token) == 0


@pytest.mark.parametrize("kind", ["stranger", "member"])
def test_only_the_machine_that_created_the_network_is_asked(
    network: JoinedNetwork, token: JoinToken, tmp_path: Path, kind: str
) -> None:
    """Neither the authority of another network of the same name, nor a member of this one, gets to see a proof."""
    if kind == "stranger":
        other = created(tmp_path)
    else:
        other = joining.join(Home(tmp_path), authority.invite(network, next(NAMES))).network
    with closing(Impostor(other.certificate_file, other.key_file)) as impostor:
        with pytest.raises(Untrusted, match="is not the machine that created 'home'") as error:
            request_certificate(replace(token, endpoints=(impostor.endpoint,)))
        assert "Nothing was sent to it" in error.value.hint
        assert impostor.requests == []
    request_certificate(token)  # and the token is still good


def test_a_machine_that_cannot_reach_the_authority_is_told_what_to_do(token: JoinToken) -> None:
    port = free_port()
    away = replace(token, endpoints=(f"tls/127.0.0.1:{port}",))
    with pytest.raises(Unreachable, match=rf"does not answer \(127\.0\.0\.1:{port}: Connection refused\)") as error:
        request_certificate(away, patience=0)
    for word in ("penstock serve", f"TCP port {port}", "with the same token", "--offline"):
        assert word in error.value.hint
    with pytest.raises(Unreachable, match="has expired since"):
        request_certificate(replace(away, expires=HOURS_AGO), patience=0)


def test_a_node_that_starts_to_listen_a_moment_later_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = created(tmp_path)
    token = invite_once(network, "laptop")
    started: list[JoinListener] = []
    clock = SimpleNamespace(
        time=time.time,
        monotonic=time.monotonic,
        sleep=lambda seconds: started.append(JoinListener(network, token.endpoints[0])),
    )
    monkeypatch.setattr(join_client, "time", clock)
    request_certificate(token)
    (listener,) = started
    listener.close()


@pytest.mark.parametrize("minutes", [-45, 45])
def test_clocks_that_differ_a_little_do_not_matter(
    network: JoinedNetwork, token: JoinToken, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    now = time.time()
    monkeypatch.setattr(join_listener, "time", SimpleNamespace(time=lambda: now + 60 * minutes))
    request_certificate(token)


def test_a_clock_that_is_hours_behind_is_noticed_before_the_token_is_used(
    network: JoinedNetwork, token: JoinToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        now = time.time()
        patch.setattr(join_listener, "time", SimpleNamespace(time=lambda: now + 3 * 3600))
        with pytest.raises(Untrusted, match=r"is 3\.0 hours behind") as error:
            request_certificate(token)
        assert "with the same token" in error.value.hint
    request_certificate(token)


# ---- strangers ----


def test_a_request_that_is_too_large_ends_the_connection(network: JoinedNetwork, token: JoinToken) -> None:
    with closing(connected(token)) as connection:
        channel = client_channel(connection, network)
        channel.receive(JoinHello, MAX_REQUEST_BYTES)
        channel.send(JoinRequest(token.id, bytes(MAX_REQUEST_BYTES + 1), bytes(32)))
        with pytest.raises((ssl.SSLEOFError, ConnectionError)):
            channel.receive(JoinAnswer, MAX_ANSWER_BYTES)
    assert state(network, token) is InvitationState.OPEN
    request_certificate(token)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(100_000)])
def test_what_is_not_tls_ends_the_connection(network: JoinedNetwork, token: JoinToken, sent: bytes) -> None:
    with closing(connected(token)) as connection:
        try:
            connection.sendall(sent)
            while connection.recv(1000):
                pass
        except ConnectionError:
            pass  # reset while there was more to send
    request_certificate(token)


def server_channel(network: JoinedNetwork, connection: socket.socket, max_bytes: int) -> Channel:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(network.certificate_file, network.key_file)
    return Channel(connection, context, server_side=True, seconds=10, max_bytes=max_bytes)


def test_a_conversation_has_a_limit_for_each_message_and_for_all_that_arrives(network: JoinedNetwork) -> None:
    here, there = socket.socketpair()
    with closing(here), closing(there), ThreadPoolExecutor(1) as thread:
        talking = thread.submit(client_channel, there, network)
        channel = server_channel(network, here, 1000)
        channel.handshake()
        talking.result().send(JoinRequest("0" * 12, bytes(500), bytes(32)))
        with pytest.raises(MalformedMessage, match="the limit is 100"):
            channel.receive(JoinRequest, 100)
    here, there = socket.socketpair()
    with closing(here), closing(there):
        there.sendall(b"\x16\x03\x01\x40\x00" + bytes(5000))  # the start of a message of 16 KiB
        with pytest.raises(MalformedMessage, match="Too many bytes"):
            server_channel(network, here, 4000 - MAX_HANDSHAKE_BYTES).handshake()


def test_a_connection_that_says_nothing_is_closed(
    network: JoinedNetwork, token: JoinToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_listener, "CONNECTION_S", 0.2)
    with closing(connected(token)) as connection:
        assert connection.recv(1) == b""
    request_certificate(token)


def test_connections_that_stall_keep_no_machine_out(
    network: JoinedNetwork, token: JoinToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stranger_listener, "MAX_CONNECTIONS", 3)
    with ExitStack() as stalling:
        for _ in range(5):
            stalling.enter_context(closing(connected(token)))
        request_certificate(token)


def test_a_machine_joins_after_the_system_had_no_thread_for_a_connection(network: JoinedNetwork, token: JoinToken) -> None:
    threading.stack_size(1 << 46)  # more than there is
    try:
        with closing(connected(token)) as connection:
            assert connection.recv(1) == b"", "it is closed"
    finally:
        threading.stack_size(0)
    request_certificate(token)


@pytest.mark.parametrize(
    "addresses, index",
    [(["a", "b", "b", "c"], 1), (["a", "b", "c"], 0), (["a", "b", "a", "b"], 0), (["h", "a", "a", "b", "b", "b"], 3)],
)
def test_the_oldest_of_the_greediest_address_is_closed_for_another(addresses: list[str], index: int) -> None:
    assert stranger_listener.to_evict(addresses) == index


@pytest.mark.parametrize("kind", ["nonsense", "another curve", "not its own key"])
def test_a_signing_request_that_cannot_be_used_leaves_the_invitation_open(
    network: JoinedNetwork, token: JoinToken, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = signing_request(new_key())
    bad = {
        "nonsense": b"nonsense",
        "another curve": signing_request(ec.generate_private_key(ec.SECP384R1())),
        "not its own key": good[:-1] + bytes([good[-1] ^ 1]),
    }[kind]
    with monkeypatch.context() as patch:
        patch.setattr(join_client, "signing_request", lambda key: bad)
        with pytest.raises(Untrusted, match="could not issue a certificate"):
            request_certificate(token)
    assert state(network, token) is InvitationState.OPEN
    request_certificate(token)


# ---- replay ----


def test_a_recorded_join_cannot_be_replayed(network: JoinedNetwork, token: JoinToken, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[JoinRequest] = []
    answers = join_listener.admit

    def record(network: JoinedNetwork, request: JoinRequest, **about: object) -> JoinAnswer:
        recorded.append(request)
        return JoinAnswer(JoinRefusal.FAILED) if len(recorded) == 1 else answers(network, request, **about)  # type: ignore[arg-type]

    monkeypatch.setattr(join_listener, "admit", record)
    with pytest.raises(Untrusted, match="could not issue"):
        request_certificate(token)  # the authority has not used it, so it is as good as new
    with closing(connected(token)) as connection:
        channel = client_channel(connection, network)
        channel.receive(JoinHello, MAX_REQUEST_BYTES)
        channel.send(recorded[0])
        assert channel.receive(JoinAnswer, MAX_ANSWER_BYTES).refusal == JoinRefusal.INVALID
    assert issued(network, token) == 0
    request_certificate(token)


@settings(max_examples=20)
@given(data=st.data())
def test_a_proof_is_good_for_its_own_conversation_alone(network: JoinedNetwork, data: st.DataObject) -> None:
    token = invite_once(network, "replayed")
    request = request_of(token)
    other = invite_once(network, "other")
    about = {"challenge": bytes(32), "server_certificate": b"shown by the server", "address": "192.0.2.9"}
    change = data.draw(st.sampled_from(["challenge", "server_certificate", "id", "signing_request", "proof"]))
    if change in about:
        about[change] = data.draw(st.binary(max_size=64).filter(lambda found: found != about[change]))
    else:
        place = data.draw(st.integers(0, 31))
        mutated = bytes(byte ^ (index == place) for index, byte in enumerate(request.proof))
        changed = {"id": other.id, "signing_request": signing_request(new_key()), "proof": mutated}[change]
        request = msgspec.structs.replace(request, **{change: changed})
    assert admission.admit(network, request, **about).refusal == JoinRefusal.INVALID  # type: ignore[arg-type]
    assert issued(network, token) == issued(network, other) == 0


def test_secrets_are_shown_nowhere(network: JoinedNetwork, token: JoinToken, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        admit(network, request_of(token))
        refused(replace(token, secret=bytes(32)))
    booked = invitation_book.read(network)
    shown = caplog.text + repr(token) + repr(booked) + repr(booked.invitations)
    for form in (token.secret.hex(), repr(token.secret)[2:-1]):
        assert form not in shown
    assert network.invitations_file.stat().st_mode & 0o777 == 0o600


def test_a_damaged_book_says_what_to_do(tmp_path: Path) -> None:
    network = created(tmp_path)
    network.invitations_file.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is damaged") as error:
        invite_once(network, "laptop")
    assert "Remove it" in error.value.hint


def test_the_port_stays_while_there_are_invitations_and_avoids_those_of_other_networks(tmp_path: Path) -> None:
    home = Home(tmp_path)
    networks = [authority.create(home, name, node="desk", listen=f"tls/127.0.0.1:{free_port()}") for name in ("home", "lab")]
    ports = []
    for network in networks:
        invite_once(network, "laptop")
        invite_once(network, "phone")
        ports.append(invitation_book.read(network).port)
    assert len(set(ports)) == 2
    with listening(networks[0]):
        invite_once(networks[0], "tablet")
    assert invitation_book.read(networks[0]).port == ports[0]
