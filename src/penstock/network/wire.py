"""The Wire: sends messages to other nodes without ever making the sender wait."""

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
from penstock.network.codec import encode
from penstock.network.router import Router

OnLost = Callable[[str, Message], None]

CAPACITY = 1024  # messages that may wait for one node
CAPACITY_BYTES = 1 << 28
MOST_NODES = 256  # with an outbox at once: names that a hostile peer makes up must not cost a thread each
IDLE = 60.0  # seconds after which an outbox that nobody uses ends

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Traffic:
    """What went to one node since the Wire was made."""

    sent: int = 0
    sent_bytes: int = 0
    dropped: int = 0


class Wire:
    """Each destination has an outbox with a thread of its own, so that a slow node delays nobody else, and what goes to one node
    goes in order.

    What does not fit into an outbox, or cannot be delivered, is dropped and told to `on_lost(node, message)`: on the thread that
    sends, or on the outbox's. It must be quick. That nothing was told does not mean that a message arrived.
    """

    def __init__(
        self,
        router: Router,
        *,
        encode: Callable[[Message], bytes] = encode,
        on_lost: OnLost = lambda node, message: None,
        capacity: int = CAPACITY,
        capacity_bytes: int = CAPACITY_BYTES,
        idle: float = IDLE,
    ) -> None:
        self._router, self._encode, self._on_lost = router, encode, on_lost
        self._capacity, self._capacity_bytes, self._idle = capacity, capacity_bytes, idle
        self._lock = threading.Lock()
        self._outboxes: dict[str, _Outbox] = {}
        self._traffic: dict[str, Traffic] = {}
        self._closed = False

    def send(self, node: str, message: Message) -> None:
        """Never waits. The message must not be changed afterwards: it is encoded later, on another thread."""
        with self._lock:
            known = node in self._outboxes or len(self._outboxes) < MOST_NODES
            taken = known and not self._closed and self._outbox(node).put(message, self._capacity, self._capacity_bytes)
        if not taken:
            self._lose(node, message, "this node leaves" if self._closed else "too much waits for it already")

    def traffic(self) -> Mapping[str, Traffic]:
        """By node: a snapshot."""
        with self._lock:
            return {node: replace(traffic) for node, traffic in self._traffic.items()}

    def waiting(self, node: str) -> int:
        """Messages that are not handed to the router yet."""
        with self._lock:
            outbox = self._outboxes.get(node)
            return outbox.unsent if outbox else 0

    def close(self, patience: float = 1.0) -> None:
        """Send what waits, for at most `patience` seconds in all; drop the rest. A router that hangs is left to itself."""
        with self._lock:
            self._closed = True
            outboxes = list(self._outboxes.values())
            for outbox in outboxes:
                outbox.more.notify()
        deadline = time.monotonic() + patience
        for outbox in outboxes:
            if outbox.thread is not threading.current_thread():
                outbox.thread.join(max(0.0, deadline - time.monotonic()))
        left = []
        with self._lock:
            for outbox in outboxes:
                left += [(outbox.node, message) for message in outbox.take_all()]
        for node, message in left:
            self._lose(node, message, "this node leaves")

    # ---- the outboxes; all that is theirs is changed under the lock ----

    def _outbox(self, node: str) -> _Outbox:
        if node not in self._outboxes:
            outbox = _Outbox(node, self._lock)
            outbox.thread = threading.Thread(target=self._run, args=(outbox,), name=f"outbox to {node}", daemon=True)
            self._outboxes[node] = outbox
            outbox.thread.start()
        return self._outboxes[node]

    def _run(self, outbox: _Outbox) -> None:
        while (message := self._next(outbox)) is not None:
            try:
                data = self._encode(message)
                self._router.send(outbox.node, data)
            except (Unreachable, BadMessage) as error:
                self._lose(outbox.node, message, str(error))
            except Exception as error:  # a defect, but a thread that ends with it would hold up everything behind
                log.exception("a message could not be sent to %s", outbox.node)
                self._lose(outbox.node, message, str(error))
            else:
                self._count(outbox.node, len(data))

    def _next(self, outbox: _Outbox) -> Message | None:
        """The next message, or None when the outbox is to end."""
        with self._lock:
            outbox.unsent = len(outbox.messages)
            while not outbox.messages:
                if self._closed or not outbox.more.wait(self._idle):
                    if outbox.messages:
                        continue  # it came as the wait ran out
                    del self._outboxes[outbox.node]
                    return None
            return outbox.take()

    # ---- the counters ----

    def _count(self, node: str, size: int) -> None:
        with self._lock:
            traffic = self._traffic.setdefault(node, Traffic())
            traffic.sent += 1
            traffic.sent_bytes += size

    def _lose(self, node: str, message: Message, why: str) -> None:
        with self._lock:
            self._traffic.setdefault(node, Traffic()).dropped += 1
        log.debug("a %s for %s was dropped: %s", type(message).__name__, node, why)
        try:
            self._on_lost(node, message)
        except Exception:
            log.exception("the loss of a message for %s could not be handled", node)


class _Outbox:
    """What waits for one node. `unsent` counts the message in its thread's hands too."""

    thread: threading.Thread

    def __init__(self, node: str, lock: threading.Lock) -> None:
        self.node = node
        self.messages: deque[tuple[Message, int]] = deque()
        self.more = threading.Condition(lock)
        self.unsent = 0
        self._bytes = 0

    def put(self, message: Message, capacity: int, capacity_bytes: int) -> bool:
        size = _weight(message)
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


def _weight(message: Message) -> int:
    """Bytes of hidden states and weights; the rest is small."""
    if isinstance(message, WeightsPart):
        return memoryview(message.data).nbytes
    if not isinstance(message, NetworkJob) or message.hidden is None:
        return 0
    if isinstance(message.hidden, PackedHidden):
        return memoryview(message.hidden.data).nbytes
    return int(getattr(message.hidden, "nbytes", 0))  # a tensor, which `encode` will pack
