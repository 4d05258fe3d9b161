"""Admission: which connections may be open at once, and which one is closed for a new one."""

from __future__ import annotations

import ipaddress
from typing import Generic, NamedTuple, TypeVar

IPV6_NETWORK_BITS = 64  # the prefix that a provider assigns to one client

C = TypeVar("C")


class AdmissionResult(NamedTuple, Generic[C]):
    """admitted: whether the new connection may stay. evicted: the one to close for it."""

    admitted: bool
    evicted: C | None = None


class Admission(Generic[C]):
    """The open connections. A connection waits until the headers of a request are complete, and again after its answer.

    If a new connection exceeds a limit, the longest-waiting one of the same address is closed for it, so that no client can
    crowd out others; if none of that address waits, the longest-waiting of all. A connection with a request is never closed for
    another: if all have one, the new connection is refused.

    max_open: connections in all.
    max_waiting: connections of one address that wait. A proxy, whose connections all have the same address, is not limited in
        the requests that it forwards.
    """

    def __init__(self, max_open: int, max_waiting: int) -> None:
        self.max_open = max_open
        self._max_waiting = max_waiting
        self._addresses: dict[C, str] = {}
        self._waiting: dict[C, None] = {}  # the one that has waited longest comes first, here and below
        self._waiting_at: dict[str, dict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: C, address: str) -> AdmissionResult[C]:
        """Decide about a new connection. If it is admitted, it waits."""
        evicted = None
        neighbours = self._waiting_at.get(address, {})
        if len(neighbours) >= self._max_waiting or len(self._addresses) >= self.max_open:
            evicted = next(iter(neighbours), self.longest_waiting())
            if evicted is None:
                return AdmissionResult(False)
            self.remove(evicted)
        self._addresses[connection] = address
        self.set_waiting(connection)
        return AdmissionResult(True, evicted)

    def longest_waiting(self) -> C | None:
        return next(iter(self._waiting), None)

    def set_waiting(self, connection: C) -> None:
        """Mark a connection as having no request: its last one was answered."""
        address = self._addresses.get(connection)
        if address is not None and connection not in self._waiting:
            self._waiting[connection] = None
            self._waiting_at.setdefault(address, {})[connection] = None

    def set_busy(self, connection: C) -> None:
        """Mark a connection as busy: the headers of its request are complete."""
        if connection in self._waiting:
            address = self._addresses[connection]
            del self._waiting[connection]
            del self._waiting_at[address][connection]
            if not self._waiting_at[address]:
                del self._waiting_at[address]

    def remove(self, connection: C) -> None:
        self.set_busy(connection)
        self._addresses.pop(connection, None)


def client_address(host: str) -> str:
    """The part of an IP address that one client cannot change: all of IPv4, the network of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK_BITS), strict=False))
