"""Addresses of this machine, and ports that are free on it, asked of the system without any other program."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Collection, Iterable
from contextlib import closing, suppress

USUAL_PORT = 7447
LOOPBACK = "127.0.0.1"
# Addresses of nobody, kept for documents: a socket that is told to send there finds out from where, and sends nothing.
NOBODY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
SIOCGIFADDR = 0x8915


def own_hosts(*, ipv6: bool = False) -> list[str]:
    """The addresses of this machine, that of its default route first; loopback only where it has no other."""
    families = [socket.AF_INET, *([socket.AF_INET6] if ipv6 else [])]
    found = [*_of_default_route(families), *_of_interfaces(), *_of_host_name(families)]
    usable = [address for address in map(ipaddress.ip_address, found) if not _is_local(address)]
    return list(dict.fromkeys(map(str, usable))) or [LOOPBACK]


def free_port(host: str, taken: Collection[int] = ()) -> int:
    """The usual port, or one that the system picks where somebody has that. `host` is an IPv4 address of this machine."""
    port = None if USUAL_PORT in taken else _bound(host, USUAL_PORT)
    while port is None or port in taken:
        port = _bound(host, 0)
    return port


def _bound(host: str, port: int) -> int | None:
    with closing(socket.socket(socket.AF_INET)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whoever had it a minute ago needs it no more
        try:
            trial.bind((host, port))
        except OSError as error:
            if port and error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None
            raise
        return int(trial.getsockname()[1])


def _is_local(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_loopback or address.is_link_local or address.is_unspecified


def _of_default_route(families: Iterable[socket.AddressFamily]) -> list[str]:
    found = []
    for family in families:
        with suppress(OSError), closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect((NOBODY[family], USUAL_PORT))
            found.append(probe.getsockname()[0])
    return found


def _of_interfaces() -> list[str]:
    """The first IPv4 address of each network card; other systems than Linux are asked by their host name alone."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # a card without an address
                told = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(told[20:24]))
    return found


def _of_host_name(families: Collection[socket.AddressFamily]) -> list[str]:
    try:
        told = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(place[0]).partition("%")[0] for family, _, _, _, place in told if family in families]
