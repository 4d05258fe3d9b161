"""What the machine that created a network does while its node runs: it dates its list of revocations."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.home import Home, JoinedNetwork
from penstock.config.network import NetworkConfig
from penstock.network.trust import authority, joining
from penstock.peers import authority_duties
from penstock.peers.authority_duties import AuthorityDuties
from tests.network.nets import wait_for


def config_of(network: JoinedNetwork) -> NetworkConfig:
    return NetworkConfig(
        name=network.name,
        listen=network.listen,
        ca_file=network.ca_file,
        certificate_file=network.certificate_file,
        key_file=network.key_file,
    )


def test_a_network_from_before_there_were_stamps_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority_duties, "INTERVAL_S", 0.02)
    network = authority.create(Home(tmp_path / "a"), "home", node="desk", listen="tls/192.0.2.7:7447")
    network.stamp_file.unlink()
    duties = AuthorityDuties.of(config_of(network))
    assert duties is not None
    duties.start()
    wait_for(network.stamp_file.exists, "the first stamp")
    duties.close()


def test_only_the_machine_that_created_a_network_has_duties(tmp_path: Path) -> None:
    network = authority.create(Home(tmp_path / "a"), "home", node="desk", listen="tls/192.0.2.7:7447")
    member = joining.join(Home(tmp_path / "b"), authority.invite(network, "laptop")).network
    assert AuthorityDuties.of(config_of(member)) is None
    assert AuthorityDuties.of(NetworkConfig(listen=("tcp/127.0.0.1:1",), open=True)) is None
