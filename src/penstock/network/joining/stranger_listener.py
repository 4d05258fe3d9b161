"""StrangerListener: a TLS port that anyone can connect to. Connections that stall keep nobody out, and threads are bounded."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from cryptography.hazmat.primitives.serialization import Encoding

from penstock.config import files
from penstock.config.home import JoinedNetwork
from penstock.network.trust.certificates import load_certificate
from penstock.network.trust.listening import split

MAX_CONNECTIONS = 32  # at once
BACKLOG = 16
MIN_ACCEPT_INTERVAL_S = 0.05  # a handshake costs a signature
POLL_INTERVAL_S = 0.2

logger = logging.getLogger("penstock.network")

Serve = Callable[[socket.socket, str], bool]
"""Serves a connection from an address, and returns whether it stays open: then the callee closes it."""


class _PendingConnection(NamedTuple):
    connection: socket.socket
    address: str
    thread: threading.Thread


class StrangerListener:
    """Listens at an endpoint from construction until `close`, and answers from `start` on. Raises OSError if it cannot.

    Every connection is served on a thread. When there are too many, a new one replaces the oldest from the address that has the
    most. So keeping others out takes many addresses, and constant reconnecting.

    context, certificate: those of the network's node here; the certificate is in DER.
    """

    def __init__(self, network: JoinedNetwork, endpoint: str, serve: Serve) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0
        self.context.load_cert_chain(network.certificate_file, network.key_file)
        self.certificate = load_certificate(files.read(network.certificate_file)).public_bytes(Encoding.DER)
        self._serve = serve
        self._guests: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._socket = _listen_at(endpoint)
        self._acceptor = threading.Thread(target=self._accept_loop, name="penstock-strangers", daemon=True)

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Stop listening. Connections that are being served continue until their deadline."""
        self._closing.set()
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._socket.close()

    def _accept_loop(self) -> None:
        self._socket.settimeout(POLL_INTERVAL_S)
        while not self._closing.is_set():
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                if not isinstance(error, TimeoutError):
                    self._closing.wait(POLL_INTERVAL_S)  # such as too many open files
                continue
            self._make_room()
            address = str(peer[0])
            thread = threading.Thread(target=self._run, args=(connection, address), name="penstock-stranger", daemon=True)
            with self._lock:
                self._guests[connection] = _PendingConnection(connection, address, thread)
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # the system has no thread for it now
                self._end(connection)
                self._closing.wait(POLL_INTERVAL_S)
                continue
            self._closing.wait(MIN_ACCEPT_INTERVAL_S)

    def _make_room(self) -> None:
        with self._lock:
            guests = [*self._guests.values()]
            if len(guests) < MAX_CONNECTIONS:
                return
            guest = guests[to_evict([guest.address for guest in guests])]
            with suppress(OSError):  # it has ended by itself
                guest.connection.shutdown(socket.SHUT_RDWR)  # its thread closes it
        guest.thread.join()

    def _run(self, connection: socket.socket, address: str) -> None:
        stays = False
        try:
            stays = self._serve(connection, address)
        except Exception:
            logger.exception("failed to answer a machine at %s", address)
        finally:
            self._end(connection, stays=stays)

    def _end(self, connection: socket.socket, *, stays: bool = False) -> None:
        with self._lock:
            del self._guests[connection]
            if not stays:
                connection.close()


def to_evict(addresses: Sequence[str]) -> int:
    """Return the index of the connection to close for a new one. addresses: of the connections, oldest first."""
    counts = Counter(addresses)
    return max(range(len(addresses)), key=lambda i: (counts[addresses[i]], -i))


def _listen_at(endpoint: str) -> socket.socket:
    """Return a socket that listens at an endpoint such as tls/0.0.0.0:7448."""
    _, host, port = split(endpoint)
    bare = host.strip("[]")
    family, *_, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    dual = family == socket.AF_INET6 and bare == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual)
