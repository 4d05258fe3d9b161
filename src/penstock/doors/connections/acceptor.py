"""Acceptor: takes connections from a listening socket, as many as may be open."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from penstock.doors.connections.admission import Admission, client_address
from penstock.doors.connections.connection import Connection, plain_response
from penstock.network.log_throttle import LogThrottle

logger = logging.getLogger("penstock.http")

MAX_ACCEPTS = 16  # per event loop pass, so that requests of open connections are read before more are accepted
RETRY_S = 0.1  # after the system ran out of descriptors or memory for connections
TLS_SHUTDOWN_S = 5.0
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

FULL = plain_response(503, "The server has as many connections as it accepts. Try again later.\n", b"retry-after: 5")


class Acceptor:
    """Replaces asyncio's server object, which cannot choose which connections it accepts.

    make: makes a Connection.
    tls: returns what encrypts the next connection; None for plain HTTP.
    handshake_timeout: seconds.
    on_unread: called with 503 for each connection that is turned away with that answer.
    """

    def __init__(
        self,
        listening: socket.socket,
        admission: Admission[Connection],
        make: Callable[[], Connection],
        *,
        tls: Callable[[], ssl.SSLContext] | None,
        handshake_timeout: float,
        on_unread: Callable[[int], None] = lambda status: None,
    ) -> None:
        self._listening = listening
        self._admission = admission
        self._make = make
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._on_unread = on_unread
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._throttle = LogThrottle()

    def start(self) -> None:
        self._listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more, and give up on handshakes."""
        self._loop.remove_reader(self._listening)
        if self._retry is not None:
            self._retry.cancel()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                client, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._pause(error)
                    return
                continue  # the client left before its connection was accepted
            self._take(client, client_address(peer[0]))

    def _pause(self, error: OSError) -> None:
        """Close a waiting connection to make room, and try again in a moment."""
        if self._throttle.should_log():
            logger.warning("cannot accept connections: %s", error.strerror)
        waiting = self._admission.longest_waiting()
        if waiting is not None:
            waiting.drop()
        self._loop.remove_reader(self._listening)
        self._retry = self._loop.call_later(RETRY_S, self._resume)

    def _take(self, client: socket.socket, address: str) -> None:
        connection = self._make()
        admitted, evicted = self._admission.admit(connection, address)
        if evicted is not None:
            evicted.drop()
        if (evicted is not None or not admitted) and self._throttle.should_log():
            what = "those that have waited longest are closed" if admitted else "new ones are refused"
            logger.warning("too many connections (%d are open): %s", len(self._admission), what)
        if not admitted:
            self._turn_away(client)
            return
        task = self._loop.create_task(self._open(connection, client))
        self._opening.add(task)
        task.add_done_callback(lambda task: self._opened(task, connection, client))
        # without TLS it opens almost at once, and uvloop loses track of a connection that is cancelled while opening
        connection.open(task.cancel if self._tls is not None else lambda: None)

    def _turn_away(self, client: socket.socket) -> None:
        with client:
            if self._tls is None:
                client.setblocking(False)
                self._on_unread(503)
                try:
                    client.send(FULL)
                    client.recv(1 << 16)  # closing with unread bytes would discard the answer
                except OSError:
                    pass

    async def _open(self, connection: Connection, client: socket.socket) -> None:
        """Complete the TLS handshake, if there is one, and hand the socket over."""
        client.setblocking(False)
        if self._tls is None:
            await self._loop.connect_accepted_socket(lambda: connection, client)
            return
        await self._loop.connect_accepted_socket(
            lambda: connection,
            client,
            ssl=self._tls(),
            ssl_handshake_timeout=self._handshake_timeout,
            ssl_shutdown_timeout=TLS_SHUTDOWN_S,
        )

    def _opened(self, task: asyncio.Task[None], connection: Connection, client: socket.socket) -> None:
        self._opening.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):  # an OSError is a client that left, or a failed handshake
            logger.error("a connection was not opened", exc_info=error)
        if error is not None or task.cancelled():
            client.close()
            connection.forget()
