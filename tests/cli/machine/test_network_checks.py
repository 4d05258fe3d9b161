"""`penstock doctor` on servers and networks: ports, certificates, who can be reached, and versions."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import __version__
from penstock.cli.machine.findings import CheckResult, Finding
from penstock.cli.machine.network_checks import check_networks, check_server
from penstock.config.home import Home, home
from penstock.network.trust import expiry
from tests.jobs import cli
from tests.model.sources.standin_server import Page, StandIn, serving
from tests.server import free_port

VERSION = re.escape(f"Penstock {__version__}")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A machine that has created a network."""
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
    monkeypatch.setattr("penstock.cli.client.api.GET_TIMEOUT_S", 0.1)
    found = by_name(check_server())["Port"]
    assert found.verdict is CheckResult.WARNING
    assert "not a Penstock server" in found.seen
    monkeypatch.setenv("PENSTOCK_URL", f"http://127.0.0.1:{port}")
    assert by_name(check_server())["Server"].seen == f"http://127.0.0.1:{port} did not answer in time."
    listening.close()
    found = by_name(check_server())["Server"]
    assert (found.verdict, found.seen) == (CheckResult.WARNING, f"none answers at http://127.0.0.1:{port}")
    monkeypatch.delenv("PENSTOCK_URL")
    assert by_name(check_server())["Port"] == Finding("Port", CheckResult.GOOD, f"{port} is free for `penstock serve`")


@pytest.mark.parametrize(
    "versions, message",
    [
        ((__version__, __version__), [f"✓ Server +Penstock {__version__} answers", f"✓ Nodes +2 are live, all with {VERSION}"]),
        ((__version__, "0.0.9"), ["! Nodes +2 are live; b has 0.0.9\n +→ .*install the same one everywhere"]),
        (("0.0.9", "0.0.9"), ["! Server +Penstock 0.0.9 answers .*\n +→ Restart it"]),
    ],
)
def test_servers_and_nodes_of_other_versions_are_named(versions: tuple[str, str], message: list[str]) -> None:
    """At a stand-in for a server; the first version is its own."""
    nodes = [{"node": name, "version": version} for name, version in zip("ab", versions, strict=True)]
    pages = {"/health": {"version": versions[0]}, "/network": {"nodes": nodes}}
    with serving(StandIn({path: Page(json.dumps(body).encode()) for path, body in pages.items()})) as server:
        shown = cli("doctor", PENSTOCK_URL=server.url, COLUMNS="200").stdout.decode()
    assert all(re.search(line, shown) for line in message), shown


def test_networks_tell_their_certificates_their_port_and_who_answers(tmp_path: Path) -> None:
    """Of a machine that has joined a network, whose other node answers, and then does not."""
    desk, laptop = ({"PENSTOCK_HOME": str(tmp_path / name), "COLUMNS": "200"} for name in ("desk", "laptop"))
    with socket.create_server(("127.0.0.1", 0)) as node:
        endpoint = f"tls/127.0.0.1:{node.getsockname()[1]}"
        cli("network", "create", "home", "--node", "desk", "--listen", endpoint, **desk)
        token = cli("network", "invite", "laptop", "--offline", **desk).stdout
        joined = cli("network", "join", "-", "--listen", f"tls/127.0.0.1:{free_port()}", stdin=token, **laptop)
        assert joined.returncode == 0, joined.stderr
        shown = cli("doctor", **laptop).stdout.decode()
    assert re.search(r"✓ Network +home, as node laptop; its certificate is valid until \d{4}-\d\d-\d\d\n", shown), shown
    assert re.search(r"! Listening +only this machine can reach tls/127", shown), shown
    assert re.search(rf"✓ Reachable +1 of 1 known addresses: {endpoint}\n", shown), shown
    shown = cli("doctor", **laptop).stdout.decode()
    assert re.search(rf"! Reachable +none of the known addresses answers: {endpoint}\n +→ .*check the firewall", shown), shown


def test_a_certificate_that_ends_soon_is_named(joined: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    late = expiry.expires(joined.network("home").certificate_file)
    monkeypatch.setattr(expiry, "expires_soon", lambda ends, now=None: True)
    warned = by_name(check_networks())["Network"]
    assert warned.verdict is CheckResult.WARNING
    assert f"{late:%Y-%m-%d}" in warned.advice


def test_a_machine_in_no_network_is_not_asked_about_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert list(check_networks()) == []
