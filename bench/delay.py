"""A wire with a delay: a TCP proxy that forwards everything, in both directions, a fixed time after it arrived.

It adds latency but does not limit bandwidth. Byte counts show whether traffic really went through it.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Sequence

from child import Answer

PIECE = 1 << 18  # bytes


def delaying_proxy(listen: int, target: int, delay: float) -> Answer:
    """The proxy, for a `Child` process. It answers any question with the bytes forwarded (towards `target`, back)."""
    server = socket.create_server(("127.0.0.1", listen))
    counts = [0, 0]

    def accept() -> None:
        while True:
            near, _ = server.accept()
            try:
                far = socket.create_connection(("127.0.0.1", target))
            except OSError:  # nothing listens there yet; the caller tries again
                near.close()
                continue
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _carry(near, far, delay, counts, 0)
            _carry(far, near, delay, counts, 1)

    threading.Thread(target=accept, daemon=True).start()

    def answer(_: object) -> Sequence[int]:
        return tuple(counts)

    return answer


def _carry(source: socket.socket, sink: socket.socket, delay: float, counts: list[int], way: int) -> None:
    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def take() -> None:
        try:
            while data := source.recv(PIECE):
                counts[way] += len(data)
                held.put((time.monotonic() + delay, data))
        except OSError:
            pass
        held.put((0.0, b""))

    def give() -> None:
        try:
            while (item := held.get())[1]:
                time.sleep(max(0.0, item[0] - time.monotonic()))
                sink.sendall(item[1])
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    for run in (take, give):
        threading.Thread(target=run, daemon=True).start()
