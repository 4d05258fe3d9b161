"""Where a node of a closed network listens, and under which endpoints others reach it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.config.checks import is_address
from penstock.config.home import Home
from penstock.config.network import CERTIFICATE_FILES, SECURE_PROTOCOLS, NetworkConfig
from penstock.errors import ConfigError
from penstock.network.trust.addresses import free_port, own_hosts

EVERYWHERE, EVERYWHERE_IPV6 = "0.0.0.0", "[::]"
_PAPERS: dict[str, Any] = dict.fromkeys(CERTIFICATE_FILES, Path())  # endpoints can be judged without looking into the files


def split(endpoint: str) -> tuple[str, str, int]:
    """Protocol, host and port; an IPv6 address keeps its brackets."""
    protocol, _, place = endpoint.partition("/")
    host, _, port = place.rpartition(":")
    return protocol, host, int(port)


def is_loopback(host: str) -> bool:
    bare = host.strip("[]")
    return ipaddress.ip_address(bare).is_loopback if is_address(bare) else bare.lower() == "localhost"


def check_connect(endpoints: tuple[str, ...]) -> None:
    """Raise ConfigError unless all of them can lead to nodes of a closed network."""
    NetworkConfig(connect=endpoints, **_PAPERS)


def check_listen(endpoint: str) -> None:
    NetworkConfig(open=True, listen=(endpoint,), **_PAPERS)
    protocol, _, port = split(endpoint)
    if protocol not in SECURE_PROTOCOLS or not port:
        raise ConfigError(
            f"A network with certificates cannot listen at {endpoint}.", hint="Write tls/0.0.0.0:7447, or quic/ and a port."
        )


def free_endpoint(home: Home, *, host: str = EVERYWHERE, taken: Iterable[int] = ()) -> str:
    """Where a node can listen, at a port that no other network of this machine uses either."""
    ports = {split(endpoint)[2] for name in home.names() for endpoint in home.network(name).listen}
    return f"tls/{host}:{free_port(host, ports | set(taken))}"


def reachable(listen: Iterable[str], further: Iterable[str]) -> tuple[str, ...]:
    """Endpoints that lead to what listens there; `further` are hosts that only people know of. A loopback endpoint leads to this
    machine alone, and has no other address."""
    found: dict[str, None] = {}
    for endpoint in listen:
        protocol, host, port = split(endpoint)
        if is_loopback(host):
            return (endpoint,)
        own = own_hosts(ipv6=host == EVERYWHERE_IPV6) if host in (EVERYWHERE, EVERYWHERE_IPV6) else [host]
        found |= dict.fromkeys(f"{protocol}/{_bracketed(name)}:{port}" for name in (*own, *further))
    return tuple(found)


def check_further(listen: Iterable[str], further: Iterable[str]) -> None:
    for host in further:
        check_connect((f"tls/{_bracketed(host)}:1",))
        for endpoint in listen:
            if is_loopback(split(endpoint)[1]):
                raise ConfigError(
                    f"Nobody can reach {host}: the network listens at {endpoint}, for this machine alone.",
                    hint="Leave --address out, or make the network with --listen tls/0.0.0.0:7447.",
                )


def _bracketed(host: str) -> str:
    return f"[{host}]" if is_address(host) and ":" in host else host
