"""LinkGuard: closes connections that would keep members out, and links that no member should have.

Zenoh accepts a connection before it knows whose it is, and accepts no other for a tenth of a second after each one that fails:
a few hundred idle connections of an outsider that end together close the port for half a minute. It also accepts every
certificate that is valid for TLS, and cannot close a single link. But the sockets belong to this process. The guard finds them
among its file descriptors, and works on duplicates:

- The system hands over a connection only once its first bytes have arrived. Silent ones never reach Zenoh.
- Of others that do not become a link, the oldest are closed one by one, slowly enough for members to connect in between.
- A link that should not be open is shut down; to Zenoh it looks as if the other side had closed it.

QUIC has one socket for all links, and Windows no list of descriptors: there the guard has no effect, and only Zenoh's own
time-outs and access control apply.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

DESCRIPTORS = "/dev/fd"
MAX_PENDING = 32  # pending connections (without a link) that may stay
MIN_AGE_S = 2.0  # a younger connection may still become a link
DEFER_S = 300  # for which the system holds back a silent connection
MAX_LINKS_PER_CERTIFICATE = 8  # a node has one, or two for a moment
CHECK_INTERVAL_S = 1.0
BUSY_INTERVAL_S = 0.2  # while too many connections are pending: each check closes one


class TcpConnection(NamedTuple):
    """A TCP connection of this process."""

    inode: int
    local: tuple[str, int]
    remote: tuple[str, int]


class LinkGuard:
    """ports: where this node listens, as far as known. Only their pending connections are closed.

    denied: common names of certificates that may have no link.
    """

    def __init__(
        self, ports: Collection[int], denied: Collection[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ports = frozenset(ports)
        self._denied = frozenset(denied)
        self._clock = clock
        self._unrelated: set[int] = set()  # sockets that are not the network's, by inode
        self._seen: dict[int, float] = {}  # pending connections, by inode: when they were first seen
        self._linked: dict[tuple[str, str], None] = {}  # locators of links, in the order in which they were first seen

    def defer_silent(self) -> None:
        """Make the system hold back silent connections to our ports. Call this once Zenoh listens."""
        if sys.platform != "linux":
            return
        for sock in _sockets():
            with sock, contextlib.suppress(OSError):
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and _is_tcp(sock) and sock.getsockname()[1] in self._ports:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_S)

    def check(self, links: Iterable[Any]) -> float:
        """Close what should not be open, and return the seconds until the next check. `links`: those of the Zenoh session."""
        found = {(str(link.src), str(link.dst)): str(link.auth_identifier or "") for link in links}
        self._linked = {key: None for key in [*self._linked, *found] if key in found}
        unwanted = self._unwanted(found)
        linked = {_ends(*key) for key in found}
        now, closed = self._clock(), 0
        with contextlib.ExitStack() as stack:
            sockets: dict[TcpConnection, socket.socket] = {}
            for connection, sock in self._connections(bool(unwanted)):
                sockets[connection] = stack.enter_context(sock)
            waiting = [one for one in sockets if one.local[1] in self._ports and (one.local, one.remote) not in linked]
            self._seen = {one.inode: self._seen.get(one.inode, now) for one in waiting}
            excess = self.choose(waiting, now)
            for connection, sock in sockets.items():
                if connection == excess or (connection.local, connection.remote) in unwanted:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        sock.shutdown(socket.SHUT_RDWR)
                        closed += 1
        return BUSY_INTERVAL_S if closed or len(waiting) > MAX_PENDING else CHECK_INTERVAL_S

    def choose(self, pending: Collection[TcpConnection], now: float) -> TcpConnection | None:
        """If too many connections are pending, return the one to close: the oldest from the address that has the most."""
        if len(pending) <= MAX_PENDING:
            return None
        counts = Counter(one.remote[0] for one in pending)
        old = [one for one in pending if now - self._seen[one.inode] >= MIN_AGE_S]
        return min(old, key=lambda one: (-counts[one.remote[0]], self._seen[one.inode]), default=None)

    def _unwanted(self, links: dict[tuple[str, str], str]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        """Return the ends of links with a denied certificate, and of a certificate's links beyond its limit."""
        unwanted, counts = set(), Counter[str]()
        for key in self._linked:
            name = links[key]
            counts[name] += bool(name)
            if name in self._denied or counts[name] > MAX_LINKS_PER_CERTIFICATE:
                unwanted.add(_ends(*key))
        return unwanted

    def _connections(self, with_outgoing: bool) -> Iterator[tuple[TcpConnection, socket.socket]]:
        """Yield the TCP connections at our ports, or all of them, each with a socket of its own to close."""
        unrelated: set[int] = set()

        def is_unrelated(inode: int) -> bool:
            known = inode in self._unrelated and not with_outgoing
            if known:
                unrelated.add(inode)
            return known

        for sock in _sockets(skip=is_unrelated):
            connection = _connection(sock)
            if connection is not None and (with_outgoing or connection.local[1] in self._ports):
                yield connection, sock
            else:
                unrelated.add(os.fstat(sock.fileno()).st_ino)
                sock.close()
        self._unrelated = unrelated


def _sockets(skip: Callable[[int], bool] = lambda inode: False) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process, unless its inode is to be skipped. The caller closes it.

    Zenoh can close a descriptor at any time, and the number may then belong to another socket. A duplicate stays valid.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(DESCRIPTORS):
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                if not skip(os.fstat(int(name)).st_ino):
                    copy = os.dup(int(name))
                    if stat.S_ISSOCK(os.fstat(copy).st_mode):
                        yield socket.socket(fileno=copy)
                    else:
                        os.close(copy)


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and bool(sock.type & socket.SOCK_STREAM)


def _connection(sock: socket.socket) -> TcpConnection | None:
    """Return what is known of a TCP connection; None for any other socket."""
    if not _is_tcp(sock):
        return None
    try:
        local, remote = sock.getsockname(), sock.getpeername()
    except OSError:  # it is not connected
        return None
    return TcpConnection(os.fstat(sock.fileno()).st_ino, (_host(local[0]), local[1]), (_host(remote[0]), remote[1]))


def _ends(src: str, dst: str) -> tuple[tuple[str, int], tuple[str, int]]:
    return _address(src), _address(dst)


def _address(locator: str) -> tuple[str, int]:
    """Return host and port of a locator, such as `tls/[::1]:7447`; port 0 if it has none."""
    host, _, port = locator.partition("/")[2].partition("?")[0].partition("#")[0].rpartition(":")
    return _host(host.strip("[]")), int(port) if port.isdecimal() else 0


def _host(text: str) -> str:
    """Return an address without the name of its interface."""
    return text.partition("%")[0]
