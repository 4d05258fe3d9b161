"""Listener: binds the port before models are loaded, and lets answers finish before it shuts down."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn

from penstock.config.node import LimitsConfig
from penstock.doors.connections.acceptor import Acceptor
from penstock.doors.connections.admission import Admission
from penstock.doors.connections.connection import Connection
from penstock.doors.connections.open_files import connections_that_fit, raise_open_files_limit
from penstock.errors import ConfigError

logger = logging.getLogger("penstock.http")

MAX_PENDING_CONNECTIONS = 2048
ABORT_GRACE_S = 5.0  # for the last events, after running answers were aborted


class Door(Protocol):
    app: Any
    draining: bool

    def abort_unread(self) -> None: ...

    def count_unread(self, status: int) -> None: ...


def bind_port(host: str, port: int) -> socket.socket:
    """Bind a port without accepting connections, so that a used port is reported before models are loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.bind(address)  # also fails if another server has bound the port and is still loading its models
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections of an ended server do not matter
            bound.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"The host '{host}' cannot be found: {error.strerror}.", hint="Use 127.0.0.1, or an address of this machine."
        ) from None
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return bound


def start_listening(bound: socket.socket) -> None:
    """Accept connections. Two servers that start together can both bind; only one can listen, and the event loop hides that."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for its connections, when the next server takes the port
    try:
        bound.listen(MAX_PENDING_CONNECTIONS)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"The server cannot listen on {host}, port {port}: {error.strerror or error}.",
        hint="Choose another with --port, or 0 for any free one.",
    )


SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []),
)  # SIGHUP: the terminal was closed


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore signals during the last steps, which are quick and must be completed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in SIGNALS}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


@contextmanager
def handling_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    nohup = [sig for sig in SIGNALS[2:] if signal.getsignal(sig) is signal.SIG_IGN]  # started with nohup
    before = {sig: signal.signal(sig, handle) for sig in SIGNALS if sig not in nohup}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def wait_for_signal(*, on_ready: Callable[[], None], on_leaving: Callable[[], None]) -> None:
    """Wait until a node without a port gets a signal to stop. A second signal ends the process as usual."""
    leaving = threading.Event()
    with handling_signals(lambda sig, frame: leaving.set()):
        on_ready()
        leaving.wait()
    on_leaving()


class Listener(uvicorn.Server):
    """Runs a server on a bound socket until SIGINT, SIGTERM or SIGHUP.

    Then no new request is accepted, and running answers get `limits.drain_timeout` seconds. After that, or at a second signal,
    the rest is aborted: `door.abort_unread` and `abort` are called. A third signal exits without waiting for that.

    tls: returns what encrypts the next connection; None for plain HTTP.
    """

    def __init__(
        self,
        door: Door,
        limits: LimitsConfig,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        on_ready: Callable[[], None],
        on_leaving: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                door.app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=limits.idle_timeout,  # type: ignore[arg-type]  # any number of seconds
                timeout_graceful_shutdown=int(limits.drain_timeout + ABORT_GRACE_S) + 1,
            )
        )
        self._door = door
        self._limits = limits
        self._tls = tls
        self._drain_timeout = limits.drain_timeout
        self._on_ready = on_ready
        self._on_leaving = on_leaving
        self._abort = abort
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # set when it runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup([])  # we accept connections ourselves
        admission: Admission[Connection] = Admission(self._max_connections(), self._limits.max_waiting_per_address)
        for listening in sockets or ():
            acceptor = Acceptor(
                listening,
                admission,
                lambda: self._connection(admission),
                tls=self._tls,
                handshake_timeout=self._limits.header_timeout,
                on_unread=self._door.count_unread,
            )
            acceptor.start()
            self.servers.append(acceptor)  # type: ignore[arg-type]  # it is closed like those of asyncio
        if not self.should_exit:
            self._on_ready()

    def _connection(self, admission: Admission[Connection]) -> Connection:
        assert self._loop is not None
        return Connection(
            self.config,
            self.server_state,
            self.lifespan.state,
            self._loop,
            admission=admission,
            limits=self._limits,
            on_unread=self._door.count_unread,
        )

    def _max_connections(self) -> int:
        """As many as the settings say, or as the system has descriptors for."""
        open_files = raise_open_files_limit()
        wanted, fit = self._limits.max_connections, connections_that_fit(open_files)
        if fit < wanted:
            logger.warning(
                "at most %d connections are accepted, not %d (limits.max_connections): this process may have %d files open. "
                "To change that, raise the limit (ulimit -n) before the server starts.",
                fit,
                wanted,
                open_files,
            )
        return min(wanted, fit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        alarm = asyncio.get_running_loop().call_later(self._drain_timeout, self._abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            alarm.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._door.draining = self.should_exit = True
        if self._signals == 1 and self._loop is not None:
            # not here: the signal may have interrupted a log write, and logging is not reentrant
            self._loop.call_soon_threadsafe(self._on_leaving)
        elif self._signals == 1:
            self._on_leaving()
        elif self._signals == 2:
            self._abort_all()
        else:
            self.force_exit = True

    def _abort_all(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._door.abort_unread)
        threading.Thread(target=self._abort, daemon=True).start()  # it waits for the compute thread

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals without raising them again at the end, as uvicorn does: a drained server exits with 0."""
        with handling_signals(self.handle_exit):
            yield
