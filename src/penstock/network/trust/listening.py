"""Where a node listens, and at which endpoints other nodes reach it."""

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

ANY_IPV4 = "0.0.0.0"
ANY_IPV6 = "[::]"
_PLACEHOLDER_FILES: dict[str, Any] = dict.fromkeys(CERTIFICATE_FILES, Path())  # to check endpoints, without reading any files


def split(endpoint: str) -> tuple[str, str, int]:
    """Split an endpoint into protocol, host and port; an IPv6 address keeps its brackets."""
    protocol, _, address = endpoint.partition("/")
    host, _, port = address.rpartition(":")
    return protocol, host, int(port)


def is_loopback(host: str) -> bool:
    bare = host.strip("[]")
    return ipaddress.ip_address(bare).is_loopback if is_address(bare) else bare.lower() == "localhost"


def check_connect(endpoints: tuple[str, ...]) -> None:
    """Raise ConfigError unless all of them can be endpoints of nodes of a closed network."""
    NetworkConfig(connect=endpoints, **_PLACEHOLDER_FILES)


def check_listen(endpoint: str) -> None:
    NetworkConfig(open=True, listen=(endpoint,), **_PLACEHOLDER_FILES)
    protocol, _, port = split(endpoint)
    if protocol not in SECURE_PROTOCOLS or not port:
        raise ConfigError(
            f"A closed network cannot listen at {endpoint}.", hint="Use tls/ or quic/ and a port, such as tls/0.0.0.0:7447."
        )


def free_endpoint(home: Home, *, host: str = ANY_IPV4, taken: Iterable[int] = ()) -> str:
    """Return an endpoint to listen at, with a free port that no other network of this machine uses."""
    ports = {split(endpoint)[2] for name in home.names() for endpoint in home.network(name).listen}
    return f"tls/{host}:{free_port(host, ports | set(taken))}"


def reachable_endpoints(listen: Iterable[str], extra_hosts: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the endpoints at which other machines reach what listens there, that of the default route first.

    extra_hosts: further names or addresses of this machine. A loopback endpoint has no others: only this machine reaches it.
    """
    found: dict[str, None] = {}
    for endpoint in listen:
        protocol, host, port = split(endpoint)
        if is_loopback(host):
            return (endpoint,)
        own = own_hosts(ipv6=host == ANY_IPV6) if host in (ANY_IPV4, ANY_IPV6) else [host]
        found |= dict.fromkeys(f"{protocol}/{_in_brackets(name)}:{port}" for name in (*own, *extra_hosts))
    return tuple(found)


def check_hosts(listen: Iterable[str], extra_hosts: Iterable[str]) -> None:
    for host in extra_hosts:
        check_connect((f"tls/{_in_brackets(host)}:1",))
        for endpoint in listen:
            if is_loopback(split(endpoint)[1]):
                raise ConfigError(
                    f"Other machines cannot reach {host}: the network listens at {endpoint}, which only this machine can reach.",
                    hint="Leave --address out, or create the network with --listen tls/0.0.0.0:7447.",
                )


def _in_brackets(host: str) -> str:
    return f"[{host}]" if is_address(host) and ":" in host else host
