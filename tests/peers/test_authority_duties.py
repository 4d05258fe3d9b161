"""What the machine that created a network does while its node runs: it lets in who was invited, and dates its list."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from penstock.config.home import Home, JoinedNetwork
from penstock.config.network import NetworkConfig
from penstock.errors import Untrusted
from penstock.network.joining import authority, invitation_book, joining
from penstock.network.joining.admission import invite_once
from penstock.network.joining.invitation_book import InvitationBook
from penstock.network.joining.join_client import request_certificate
from penstock.network.trust.listening import split
from penstock.peers import authority_duties
from penstock.peers.authority_duties import AuthorityDuties
from tests.network.joins import created
from tests.network.nets import wait_for


def config_of(network: JoinedNetwork) -> NetworkConfig:
    return NetworkConfig(
        name=network.name,
        listen=network.listen,
        ca_file=network.ca_file,
        certificate_file=network.certificate_file,
        key_file=network.key_file,
    )


@contextmanager
def on_duty(network: JoinedNetwork) -> Iterator[AuthorityDuties]:
    duties = AuthorityDuties.of(config_of(network))
    assert duties is not None
    duties.start()
    try:
        yield duties
    finally:
        duties.close()


def answers(network: JoinedNetwork) -> bool:
    port = invitation_book.read(network).port
    with socket.socket() as trial:
        return port > 0 and trial.connect_ex(("127.0.0.1", port)) == 0


def test_a_node_answers_from_the_invitation_on_and_no_longer_than_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority_duties, "INTERVAL_S", 0.02)
    network = created(tmp_path / "a")
    network.stamp_file.unlink()
    with on_duty(network):
        wait_for(network.stamp_file.exists, "the first stamp of an old network")
        assert not network.invitations_file.exists()
        token = invite_once(network, "laptop")
        joined = joining.join(Home(tmp_path / "b"), request_certificate(token)).network
        assert joined.node == "laptop"
        assert answers(network), "a second machine is told that the token was used"
        book = invitation_book.read(network)
        (used,) = book.invitations
        past = msgspec.structs.replace(used, expires=used.made - timedelta(days=1))
        network.invitations_file.write_bytes(InvitationBook(book.port, (past,)).encode())
        wait_for(lambda: not answers(network), "the port to close")


def test_a_port_that_another_program_has_is_named_once_and_used_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(authority_duties, "INTERVAL_S", 0.02)
    network = created(tmp_path)
    token = invite_once(network, "laptop")
    port = split(token.endpoints[0])[2]
    with socket.create_server(("127.0.0.1", port)), on_duty(network):
        wait_for(lambda: "Invited machines cannot join" in caplog.text, "the error")
    assert f"127.0.0.1:{port}" in caplog.text
    with on_duty(network):
        request_certificate(token)
    assert caplog.text.count("Invited machines cannot join") == 1


def test_a_list_that_cannot_be_read_does_not_keep_invited_machines_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(authority_duties, "INTERVAL_S", 0.02)
    network = created(tmp_path)
    token = invite_once(network, "laptop")
    monkeypatch.setattr(authority_duties, "stamp_revocations_if_due", _failing)
    with on_duty(network):
        request_certificate(token)
    assert caplog.text.count("cannot be read today") == 1


def _failing(network: JoinedNetwork) -> bool:
    raise Untrusted("The list cannot be read today.")


def test_only_the_machine_that_created_a_network_has_duties(tmp_path: Path) -> None:
    network = created(tmp_path / "a")
    member = joining.join(Home(tmp_path / "b"), authority.invite(network, "laptop")).network
    assert AuthorityDuties.of(config_of(member)) is None
    assert AuthorityDuties.of(NetworkConfig(listen=("tcp/127.0.0.1:1",), open=True)) is None
