"""`penstock doctor` on servers and networks: ports, certificates, who can be reached, and versions."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.cli.machine import network_checks
from penstock.cli.machine.findings import CheckResult, Finding
from penstock.cli.machine.network_checks import check_networks, check_server
from penstock.config.home import Home, home
from penstock.network.trust import expiry
from tests.jobs import cli


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A machine that has created a network, at which a node `b` is known and does not answer."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    done = cli("network", "create", "home", PENSTOCK_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = home({"PENSTOCK_HOME": str(tmp_path)})
    assert found is not None
    return found


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_a_port_is_free_or_names_what_has_it(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = listening.getsockname()[1]
    monkeypatch.setenv("PENSTOCK_PORT", str(port))
    monkeypatch.setattr("penstock.cli.client.api.READ_TIMEOUT_S", 0.1)
    found = by_name(check_server())["Port"]
    assert found.verdict is CheckResult.WARNING
    assert "no Penstock server" in found.seen
    listening.close()
    assert by_name(check_server())["Port"] == Finding("Port", CheckResult.GOOD, f"{port} is free for `penstock serve`")


@pytest.mark.parametrize(
    "versions,verdict,told",
    [((__version__, __version__), CheckResult.GOOD, "2 are live"), ((__version__, "0.0.9"), CheckResult.WARNING, "b has 0.0.9")],
)
def test_nodes_of_other_versions_are_named(
    versions: tuple[str, str], verdict: CheckResult, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"node": name, "version": version} for name, version in zip("ab", versions, strict=True)]
    answers: dict[str, Any] = {"/health": {"version": __version__}, "/network": {"nodes": nodes}}
    monkeypatch.setattr(network_checks, "_answers", lambda host, port: True)
    monkeypatch.setattr(network_checks.Client, "get", lambda self, path: answers[path])
    found = by_name(check_server())
    assert found["Server"].verdict is CheckResult.GOOD
    assert found["Nodes"].verdict is verdict
    assert told in found["Nodes"].seen
    answers["/health"] = {"version": "0.0.9"}
    assert "Start it again" in by_name(check_server())["Server"].advice


def test_networks_tell_their_certificates_their_port_and_who_answers(
    joined: Home, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_name(check_networks())
    assert found["Network"].verdict is CheckResult.GOOD
    assert "home, as node" in found["Network"].seen
    assert found["Listening"].verdict is CheckResult.GOOD
    assert "Reachable" not in found  # no other node is known yet

    network, port = joined.network("home"), listening.getsockname()[1]
    monkeypatch.setattr(
        Home, "network", lambda self, name: replace(network, connect=(f"tls/127.0.0.1:{port}", "tls/127.0.0.1:9"))
    )
    assert by_name(check_networks())["Reachable"].seen == f"1 of 2 known addresses: tls/127.0.0.1:{port}"
    listening.close()
    nobody = by_name(check_networks())["Reachable"]
    assert (nobody.verdict, "firewall" in nobody.advice) == (CheckResult.WARNING, True)

    late = expiry.expires(network.certificate_file)
    monkeypatch.setattr(expiry, "expires_soon", lambda ends, now=None: True)
    warned = by_name(check_networks())["Network"]
    assert warned.verdict is CheckResult.WARNING
    assert f"{late:%Y-%m-%d}" in warned.advice


def test_a_machine_in_no_network_is_not_asked_about_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert list(check_networks()) == []
