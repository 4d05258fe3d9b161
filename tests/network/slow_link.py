"""SlowLink: a TCP proxy that lets so many bytes a second pass in each direction, as a narrow line to another machine does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

READ_BYTES = 4096
BUFFER_BYTES = 1 << 15
SEGMENT_BYTES = 1400  # as on Ethernet: with the segments of loopback, 64 KiB each, the sender's own buffer holds megabytes


class SlowLink:
    """A context. `port` is where to connect, a free one unless it is given; `connections` counts those that succeeded."""

    def __init__(self, target_port: int, bytes_per_second: float, *, port: int = 0) -> None:
        self._target_port = target_port
        self._rate = bytes_per_second
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        self._listener.bind(("127.0.0.1", port))
        self._listener.listen()
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for end in list(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            end.close()
        for thread in list(self._threads):
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                far.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
                try:
                    far.connect(("127.0.0.1", self._target_port))
                except ConnectionRefusedError:  # nobody listens there yet; the caller tries again
                    near.close()
                    far.close()
                    continue
                self.connections += 1
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    pump = threading.Thread(target=self._pump, args=(source, sink), daemon=True)
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        due = time.monotonic()
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                due = max(due, time.monotonic()) + len(data) / self._rate
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
