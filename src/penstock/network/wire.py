"""The Wire: sends messages to other nodes without ever blocking the caller."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from penstock.domain.messages import Message, WeightsPart
from penstock.domain.span import NetworkJob, PackedHidden
from penstock.errors import BadMessage, Unreachable
from penstock.network import codec
from penstock.network.router import Bytes, Router
from penstock.network.stream import Stream, stream_of

OnLost = Callable[[str, Message], None]

MAX_QUEUED = 1024  # messages per node and stream
MAX_QUEUED_BYTES = 1 << 28  # per node and stream
MAX_OUTBOXES = 256 * len(Stream)  # one thread each: bounds what a hostile peer that makes up names can cost
IDLE_TIMEOUT_S = 60.0  # after which an unused outbox ends

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """Messages to one node since the Wire was created."""

    sent: int = 0
    sent_bytes: int = 0
    dropped: int = 0


class Wire:
    """One outbox per destination and stream, each with its own thread: neither a slow node nor a large message delays others.
    Messages to a node stay in order within their stream.

    on_lost: called as `on_lost(node, message)` for a message that does not fit into its outbox or cannot be delivered, on the
        sender's or the outbox's thread. It must be quick. A message may get lost without it being called.
    """

    def __init__(
        self,
        router: Router,
        *,
        encode: Callable[[Message], Bytes] | None = None,
        on_lost: OnLost = lambda node, message: None,
        capacity: int = MAX_QUEUED,
        capacity_bytes: int = MAX_QUEUED_BYTES,
        idle: float = IDLE_TIMEOUT_S,
    ) -> None:
        self._router = router
        self._encode = encode or (lambda message: codec.encode(message, sent=time.monotonic(), sealed=router.seals))
        self._on_lost = on_lost
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._idle = idle
        self._lock = threading.Lock()
        self._outboxes: dict[tuple[str, Stream], _Outbox] = {}
        self._traffic: dict[str, Traffic] = {}
        self._closed = False

    def send(self, node: str, message: Message) -> None:
        """Queue a message; never blocks. It must not be changed afterwards: another thread encodes it later."""
        key = (node, stream_of(message))
        with self._lock:
            known = key in self._outboxes or len(self._outboxes) < MAX_OUTBOXES
            taken = known and not self._closed and self._outbox(*key).put(message, self._capacity, self._capacity_bytes)
        if not taken:
            self._drop(node, message, "this node is leaving" if self._closed else "its queue is full")

    def traffic(self) -> Mapping[str, Traffic]:
        """Return a snapshot of the traffic, by node."""
        with self._lock:
            return {node: replace(traffic) for node, traffic in self._traffic.items()}

    def waiting(self, node: str) -> int:
        """Count the messages to a node that are not handed to the router yet."""
        with self._lock:
            outboxes = (self._outboxes.get((node, stream)) for stream in Stream)
            return sum(outbox.unsent for outbox in outboxes if outbox is not None)

    def close(self, timeout: float = 1.0) -> None:
        """Send queued messages for up to `timeout` seconds in all, then drop the rest. Does not wait for a router that hangs."""
        with self._lock:
            self._closed = True
            outboxes = list(self._outboxes.values())
            for outbox in outboxes:
                outbox.more.notify()
        deadline = time.monotonic() + timeout
        for outbox in outboxes:
            if outbox.thread is not threading.current_thread():
                outbox.thread.join(max(0.0, deadline - time.monotonic()))
        left = []
        with self._lock:
            for outbox in outboxes:
                left += [(outbox.node, message) for message in outbox.take_all()]
        for node, message in left:
            self._drop(node, message, "this node is leaving")

    # ---- outboxes; changed only under the lock ----

    def _outbox(self, node: str, stream: Stream) -> _Outbox:
        if (node, stream) not in self._outboxes:
            outbox = _Outbox(node, stream, self._lock)
            name = f"outbox to {node} ({stream.name.lower()})"
            outbox.thread = threading.Thread(target=self._run, args=(outbox,), name=name, daemon=True)
            self._outboxes[node, stream] = outbox
            outbox.thread.start()
        return self._outboxes[node, stream]

    def _run(self, outbox: _Outbox) -> None:
        while (message := self._next(outbox)) is not None:
            try:
                data = self._encode(message)
                self._router.send(outbox.node, data, outbox.stream)
            except (Unreachable, BadMessage) as error:
                self._drop(outbox.node, message, str(error))
            except Exception as error:  # a bug, but if the thread ended here the whole queue would be stuck
                log.exception("failed to send a message to %s", outbox.node)
                self._drop(outbox.node, message, str(error))
            else:
                self._count(outbox.node, len(data))

    def _next(self, outbox: _Outbox) -> Message | None:
        """Wait for the next message; None when the outbox should end."""
        with self._lock:
            outbox.unsent = len(outbox.messages)
            while not outbox.messages:
                if self._closed or not outbox.more.wait(self._idle):
                    if outbox.messages:
                        continue  # a message arrived just as the wait ended
                    del self._outboxes[outbox.node, outbox.stream]
                    return None
            return outbox.take()

    # ---- counters ----

    def _count(self, node: str, size: int) -> None:
        with self._lock:
            traffic = self._traffic.setdefault(node, Traffic())
            traffic.sent += 1
            traffic.sent_bytes += size

    def _drop(self, node: str, message: Message, why: str) -> None:
        with self._lock:
            self._traffic.setdefault(node, Traffic()).dropped += 1
        log.debug("dropped a %s for %s: %s", type(message).__name__, node, why)
        try:
            self._on_lost(node, message)
        except Exception:
            log.exception("failed to handle the loss of a message for %s", node)


class _Outbox:
    """The queue of one node and stream. `unsent` includes the message that its thread is sending now."""

    thread: threading.Thread

    def __init__(self, node: str, stream: Stream, lock: threading.Lock) -> None:
        self.node = node
        self.stream = stream
        self.messages: deque[tuple[Message, int]] = deque()
        self.more = threading.Condition(lock)
        self.unsent = 0
        self._bytes = 0

    def put(self, message: Message, capacity: int, capacity_bytes: int) -> bool:
        size = _payload_bytes(message)
        if len(self.messages) >= capacity or (self.messages and self._bytes + size > capacity_bytes):
            return False
        self.messages.append((message, size))
        self._bytes += size
        self.unsent += 1
        self.more.notify()
        return True

    def take(self) -> Message:
        message, size = self.messages.popleft()
        self._bytes -= size
        return message

    def take_all(self) -> list[Message]:
        return [self.take() for _ in range(len(self.messages))]


def _payload_bytes(message: Message) -> int:
    """Return the bytes of hidden states or weights; everything else is small."""
    if isinstance(message, WeightsPart):
        return memoryview(message.data).nbytes
    if not isinstance(message, NetworkJob) or message.hidden is None:
        return 0
    if isinstance(message.hidden, PackedHidden):
        return memoryview(message.hidden.data).nbytes
    return int(getattr(message.hidden, "nbytes", 0))  # a tensor, which `encode` will pack
