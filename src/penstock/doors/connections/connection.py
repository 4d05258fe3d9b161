"""Connection: HTTP on one socket, with limits on the size and the time of what a client sends before it is answered."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.config.node import LimitsConfig
from penstock.doors.connections.admission import Admission

MAX_HEADER_BYTES = 1 << 16  # request line and headers together; also the trailers of a body
MAX_PIPELINED = 16  # requests sent before the previous ones were answered
REFUSED_OPEN_S = 1.0  # keep a refused connection open, unread, so that a client sending garbage cannot reconnect at once
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
MIN_PROBE_S, MAX_PROBE_S = 0.05, 5.0  # probe intervals; each is twice the one before
OUTPUT_STALL_S = 30.0  # close a connection if its client reads nothing for this long while there is something to read


def plain_response(status: int, message: str, *headers: bytes) -> bytes:
    """A whole response, for a client whose request never reaches the API. The connection is closed after it."""
    lines = [
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode(),
        b"content-type: text/plain; charset=utf-8",
        f"content-length: {len(message)}".encode(),
        b"connection: close",
        *headers,
    ]
    return b"\r\n".join([*lines, b"", message.encode()])


class Connection(HttpToolsProtocol):
    """A uvicorn connection, from the moment its socket is accepted, so before the TLS handshake.

    Headers must be complete `header_timeout` seconds after the connection was opened, or after the first byte of a later request.
    Between requests it may be idle for `idle_timeout` seconds. The endpoints limit how long a body may take.

    A client that has only half-closed its connection still gets its answer. Only a write can tell it from one that has
    left, so interim responses are written to it, which clients skip.

    on_unread: called with the status of an answer to a request that does not reach the API.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        *,
        admission: Admission[Connection],
        limits: LimitsConfig,
        on_unread: Callable[[int], None] = lambda status: None,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._admission = admission
        self._header_timeout = limits.header_timeout
        self._on_unread = on_unread
        self._cancel_handshake: Callable[[], object] = lambda: None
        self._made = False  # whether there is a transport
        self._dropped = False
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._output_check: asyncio.TimerHandle | None = None
        self._unanswered = 0  # requests with complete headers whose answer is not complete
        self._in_body = False  # the headers of the last request are complete, but not its body
        self._room = MAX_HEADER_BYTES  # bytes that may still arrive before the headers, or the next piece of a body, are complete
        self._active: RequestResponseCycle | None = None  # the request that is being answered
        self._half_closed = False
        self._probe: asyncio.TimerHandle | None = None

    # ---- opening and closing ----

    def open(self, cancel_handshake: Callable[[], object]) -> None:
        """Start the clock; `connection_made` is called when a handshake is complete."""
        self._cancel_handshake = cancel_handshake
        self._set_deadline()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made = True
        if self._dropped:
            transport.abort()

    def drop(self) -> None:
        """Close at once, whatever the client does."""
        self._dropped = True
        if self._made:
            self.transport.abort()
        else:
            self._cancel_handshake()

    def forget(self) -> None:
        """Remove this connection from the open ones."""
        self._admission.remove(self)
        self._clear_deadline()
        self._unset_keepalive_if_required()
        self._unwatch_output()
        if self._probe is not None:
            self._probe.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.forget()

    def _close(self) -> None:
        self.transport.close()  # waits until everything is sent
        self._watch_output()

    def _refuse(self, status: int, message: str) -> None:
        self._refused = True
        if self._unanswered:  # this would end up in the middle of an answer
            self._close()
            return
        self.transport.write(plain_response(status, message))
        self._on_unread(status)
        self.transport.pause_reading()
        self._clear_deadline()
        self._deadline = self.loop.call_later(REFUSED_OPEN_S, self._close)

    # ---- a half-closed connection ----

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to stay open. TLS cannot, and HTTP 1.0 has no interim responses."""
        if not self._unanswered or self._in_body or self._active is None or self.scheme == "https":
            return False
        if self._active.scope["http_version"] == "1.0":
            return False
        self._half_closed = True
        self._send_probe(MIN_PROBE_S)
        return True

    def _send_probe(self, interval: float) -> None:
        """Write to a client that may have left: if it has, the next write finds the connection closed."""
        self._probe = None
        if self.transport.is_closing() or self._active is None:
            return
        if not self._active.response_started:
            self.transport.write(INTERIM)
        self._probe = self.loop.call_later(interval, self._send_probe, min(2 * interval, MAX_PROBE_S))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    # ---- deadlines ----

    def _set_deadline(self) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(self._header_timeout, self._on_deadline)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        half_sent = self._room < MAX_HEADER_BYTES and not self._in_body
        if half_sent and not self.transport.is_closing():
            self._refuse(408, f"The headers of the request were not complete after {self._header_timeout:g} seconds.")
        else:
            self.drop()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    # ---- the request ----

    def data_received(self, data: bytes) -> None:
        if not self._unanswered and self._deadline is None:
            self._set_deadline()  # for the next headers, or the rest of a request that was answered before it was complete
        while data and not self._refused and not self.transport.is_closing():
            part, data = data[: self._room], data[self._room :]
            self._room -= len(part)
            super().data_received(part)
            if self._room <= 0 and not self._refused and not self.transport.is_closing():
                self._refuse(431, f"The request line and the headers have more than {MAX_HEADER_BYTES} bytes.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # ends in `send_400_response`
        super().on_headers_complete()
        self._clear_deadline()
        self._unanswered += 1
        self._in_body = True
        self._room = MAX_HEADER_BYTES
        self._admission.set_busy(self)

    def on_body(self, body: bytes) -> None:
        self._room = MAX_HEADER_BYTES
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._room = MAX_HEADER_BYTES
        super().on_message_complete()
        if not self._unanswered:  # it was answered before it was complete
            self._clear_deadline()
            self._set_idle()

    # ---- the answer ----

    def on_response_complete(self) -> None:
        self._unanswered -= 1
        super().on_response_complete()
        if self._half_closed and not self._unanswered and not self.transport.is_closing():
            self._close()
        elif self.transport.is_closing():
            self._watch_output()
        elif not self._unanswered:
            self._admission.set_waiting(self)

    def _set_idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # ---- a client that does not read ----

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_output()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch_output()
        if self.transport.is_closing():
            self._watch_output()

    def _watch_output(self) -> None:
        """Drop the connection if the client stops reading. Used only while nothing is written: a smaller buffer is progress."""
        size = self.transport.get_write_buffer_size()
        if size and self._output_check is None:
            self._output_check = self.loop.call_later(OUTPUT_STALL_S, self._check_output, size)

    def _unwatch_output(self) -> None:
        if self._output_check is not None:
            self._output_check.cancel()
            self._output_check = None

    def _check_output(self, before: int) -> None:
        self._output_check = None
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_output()
