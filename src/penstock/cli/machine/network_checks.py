"""The checks of `penstock doctor` about servers and networks: ports, certificates, and whether other nodes can be reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.cli.client.api import Client, ServerUntrusted
from penstock.cli.client.server_url import URL_VARIABLE, default_url, named_url
from penstock.cli.machine.findings import CheckResult, Finding
from penstock.config.home import home
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.config.home import JoinedNetwork

CONNECT_TIMEOUT_S = 2.0
MAX_NAMED = 5  # endpoints or nodes in one line


def check_server() -> Iterator[Finding]:
    """The port of the API: free, or a Penstock server; and with one, the versions of the nodes that it sees."""
    named = named_url(None)
    url = named or default_url()
    if not _answers(url.host, url.port):
        if named is not None:
            yield Finding("Server", CheckResult.WARNING, f"none answers at {url}", f"{URL_VARIABLE} names it: is it running?")
            return
        yield Finding("Port", CheckResult.GOOD, f"{url.port} is free for `penstock serve`")
        return
    try:
        client = Client(url)
        version = client.get("/health")["version"]
    except (PenstockError, KeyError, TypeError) as error:
        if isinstance(error, PenstockError) and (named is not None or isinstance(error, ServerUntrusted)):
            yield Finding("Server", CheckResult.WARNING, error.message, error.hint)
            return
        advice = "Choose another with `penstock serve --port`, and PENSTOCK_PORT for the other commands."
        yield Finding("Port", CheckResult.WARNING, f"{url.port} is in use by a program that is not a Penstock server", advice)
        return
    if version == __version__:
        yield Finding("Server", CheckResult.GOOD, f"Penstock {version} answers at {url}")
    else:
        advice = "Restart it to run the installed version."
        yield Finding("Server", CheckResult.WARNING, f"Penstock {version} answers at {url}; this is {__version__}", advice)
    try:
        nodes = client.get("/network")["nodes"]
    except PenstockError as error:
        yield Finding("Nodes", CheckResult.WARNING, f"the server does not list them: {error.message}", error.hint)
        return
    if nodes:
        yield _versions(nodes)


def check_networks() -> Iterator[Finding]:
    """Each network that this machine has joined: its certificate; of the current one, its port and its other nodes."""
    here = home(os.environ)
    if here is None or not here.names():
        return
    current = here.current()
    for name in here.names():
        try:
            network = here.network(name)
            yield _certificate(network)
        except PenstockError as error:
            yield Finding("Network", CheckResult.WARNING, f"{name}: {error.message}", error.hint)
            continue
        if name == current:
            yield from _listening(network)
            yield from _others(network)


def _certificate(network: JoinedNetwork) -> Finding:
    from penstock.network.trust.expiry import expires, expiry_warning

    warning = expiry_warning(network.certificate_file)
    seen = f"{network.name}, as node {network.node}; its certificate is valid until {expires(network.certificate_file):%Y-%m-%d}"
    if warning is None:
        return Finding("Network", CheckResult.GOOD, seen)
    return Finding("Network", CheckResult.WARNING, seen, warning)


def _listening(network: JoinedNetwork) -> Iterator[Finding]:
    """Where this machine's node listens for others: free, or used by the node itself."""
    from penstock.network.trust.listening import is_loopback, split

    for endpoint in network.listen:
        _, host, port = split(endpoint)
        if is_loopback(host):
            settings = f'name = "{network.name}" and listen = ["tls/0.0.0.0:{port}"]'
            advice = f"To let others in, set {settings} in [network] of the node file."
            yield Finding("Listening", CheckResult.WARNING, f"only this machine can reach {endpoint}", advice)
        else:
            state = "in use: by a running node, or another program" if _answers("127.0.0.1", port) else "free"
            advice = "" if state == "free" else "If no node is running here, find the program: ss -ltnp"
            yield Finding("Listening", CheckResult.GOOD, f"{endpoint}; {state}", advice)


def _others(network: JoinedNetwork) -> Iterator[Finding]:
    """The known addresses of other nodes. One node may have several, of which this machine can reach some."""
    from penstock.network.trust.known_endpoints import load_endpoints
    from penstock.network.trust.listening import split

    known = dict.fromkeys([*network.connect, *(load_endpoints(network.peers_file) if network.peers_file else ())])
    if not known:
        return
    reached = [endpoint for endpoint in known if _answers(*split(endpoint)[1:])]
    if reached:
        yield Finding("Reachable", CheckResult.GOOD, f"{len(reached)} of {len(known)} known addresses: {_some(reached)}")
    else:
        advice = "Start `penstock serve` on another machine of the network, or check the firewall: its port must be open."
        yield Finding("Reachable", CheckResult.WARNING, f"none of the known addresses answers: {_some(known)}", advice)


def _versions(nodes: list[dict[str, Any]]) -> Finding:
    others = [f"{node['node']} has {node['version']}" for node in nodes if node.get("version") != __version__]
    if others:
        advice = "Nodes of different versions may not understand each other: install the same one everywhere."
        return Finding("Nodes", CheckResult.WARNING, f"{len(nodes)} are live; {_some(others)}", advice)
    return Finding("Nodes", CheckResult.GOOD, f"{len(nodes)} are live, all with Penstock {__version__}")


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _some(words: Iterable[str]) -> str:
    found = list(words)
    return ", ".join(found[:MAX_NAMED]) + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")
