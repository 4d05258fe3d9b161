"""The addresses of this machine and its free ports, without running other programs."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys
from collections.abc import Collection, Iterable
from contextlib import closing, suppress

DEFAULT_PORT = 7447
LOOPBACK = "127.0.0.1"
# Reserved for documentation: connecting a UDP socket to them sends nothing, and shows which address the default route uses.
UNROUTED = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
SIOCGIFADDR = 0x8915


def own_hosts(*, ipv6: bool = False) -> list[str]:
    """Return the addresses of this machine, the one of its default route first; loopback only if there is no other."""
    families = [socket.AF_INET, *([socket.AF_INET6] if ipv6 else [])]
    found = [*_of_default_route(families), *_of_interfaces(), *_of_host_name(families)]
    usable = [address for address in map(ipaddress.ip_address, found) if not _is_local(address)]
    return list(dict.fromkeys(map(str, usable))) or [LOOPBACK]


def free_port(host: str, taken: Collection[int] = (), *, preferred: int = DEFAULT_PORT) -> int:
    """Return the preferred port, or one that the system picks if that is in use. `host` is an IPv4 address of this machine."""
    port = None if preferred in taken else _try_bind(host, preferred)
    while port is None or port in taken:
        port = _try_bind(host, 0)
    return port


def _try_bind(host: str, port: int) -> int | None:
    with closing(socket.socket(socket.AF_INET)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also a port that was closed a minute ago
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
            probe.connect((UNROUTED[family], DEFAULT_PORT))
            found.append(probe.getsockname()[0])
    return found


def _of_interfaces() -> list[str]:
    """Return the first IPv4 address of each interface. Only on Linux; elsewhere the host name has to do."""
    if sys.platform != "linux":
        return []
    import fcntl

    found = []
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return found


def _of_host_name(families: Collection[socket.AddressFamily]) -> list[str]:
    try:
        reply = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]).partition("%")[0] for family, _, _, _, address in reply if family in families]
