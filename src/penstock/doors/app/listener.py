"""Listening and leaving: a socket that is taken before the model is loaded, and a server that lets answers finish."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import uvicorn

from penstock.errors import ConfigError

BACKLOG = 2048  # connections that wait to be let in
GRACE = 5.0  # seconds for the last words, after what still ran was ended


class Door(Protocol):
    app: Any
    draining: bool

    def hurry(self) -> None: ...


def take_port(host: str, port: int) -> socket.socket:
    """Bind at once, so that a used port is told before a model was loaded; nobody is let in yet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"The host '{host}' cannot be found: {error.strerror}.", hint="Use 127.0.0.1, or an address here."
        ) from None
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return taken


def begin_to_listen(taken: socket.socket) -> None:
    """Two servers that start together can both bind. Only one can listen, and the event loop would not say so to the other."""
    try:
        taken.listen(BACKLOG)
    except OSError as error:
        host, port = taken.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"The server cannot listen on {host}, port {port}: {error.strerror or error}.",
        hint="Choose another with --port, or 0 for any free one.",
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # the terminal was closed


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """For the last steps, which are quick and must not be left half-done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in SIGNALS}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


class Listener(uvicorn.Server):
    """Runs a door on a bound socket until SIGINT, SIGTERM or SIGHUP. Then nobody new is let in, running answers get `patience`
    seconds, and the others are ended: the door is told to `hurry`, and `end` is called. A second signal ends them at once, a
    third does not even wait for that."""

    def __init__(
        self,
        door: Door,
        *,
        patience: float,
        on_ready: Callable[[], None],
        on_leaving: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                door.app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=int(patience + GRACE) + 1,
            )
        )
        self._door, self._patience = door, patience
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # from the moment that it runs
        self._on_ready, self._on_leaving, self._end = on_ready, on_leaving, end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        alarm = asyncio.get_running_loop().call_later(self._patience, self._end_all)
        try:
            await super().shutdown(sockets)
        finally:
            alarm.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._door.draining = self.should_exit = True
        if self._signals == 1:
            self._on_leaving()
        elif self._signals == 2:
            self._end_all()
        else:
            self.force_exit = True

    def _end_all(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._door.hurry)
        threading.Thread(target=self._end, daemon=True).start()  # it waits for the compute thread

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without uvicorn's habit of raising the signal once more at the end: whoever drained has left in good order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        nohup = [sig for sig in SIGNALS[2:] if signal.getsignal(sig) is signal.SIG_IGN]  # it shall outlive its terminal
        before = {sig: signal.signal(sig, self.handle_exit) for sig in SIGNALS if sig not in nohup}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
