"""Reception: handles messages as they arrive, and keeps this node's route open, on threads that never compute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from penstock.domain.fsm import HEAD_STEP
from penstock.domain.messages import Control, Mark, Message, Ping
from penstock.domain.span import NetworkJob
from penstock.engine.commands import Deliver
from penstock.engine.inbox import Inbox
from penstock.engine.routing.host.heartbeat import Heartbeat
from penstock.engine.routing.host.route_host import RouteHost
from penstock.engine.routing.origin.no_origin import NoOrigin
from penstock.engine.routing.origin.origin import Origin
from penstock.network.log_throttle import LogThrottle
from penstock.pipes.pipe import Pipe

logger = logging.getLogger("penstock.route")

KEEP_ALIVE_S = 0.05  # between checks whether a Ping is due
HEADER_FACTOR = 16  # bytes of memory for each byte of a message, except hidden states: a Notice of 8 bytes is a tuple of 112
SPAN_BYTES = 352  # of memory for each Span, which can be a single byte of a message: a tuple and seven numbers


class Reception:
    """count_refused: called with a reason and the sender of a message that is dropped."""

    def __init__(
        self,
        pipe: Pipe,
        host: RouteHost,
        origin: Origin | NoOrigin,
        heartbeat: Heartbeat,
        inbox: Inbox,
        count_refused: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._pipe = pipe
        self._host = host
        self._origin = origin
        self._heartbeat = heartbeat
        self._inbox = inbox
        self._count_refused = count_refused
        self._clock = clock
        self._ended = threading.Event()
        self._throttle = LogThrottle()

    def take(self, sender: str, message: Message, size: int) -> None:
        """Log what arrives, answer Pings, and hand the rest to the compute thread.

        A message is dropped if too much is waiting. The origin of a NetworkJob notices the loss; all others are repeated.
        """
        memory = _memory(message, size)
        if isinstance(message, NetworkJob):
            message.sender, message.memory = sender, memory
        elif isinstance(message, Mark):
            back = message.layer == self._pipe.num_layers
            (self._origin if back else self._host).on_mark(sender, message)
            return
        elif isinstance(message, Ping):
            self._answer(sender, message)
        if not self._inbox.reserve(sender, memory):
            self._count_refused("backlog", sender)
            return
        if isinstance(message, NetworkJob):
            (self._origin if message.step is HEAD_STEP else self._host).on_arrival(sender, message, size)
        self._inbox.put(Deliver(sender, message, self._clock(), memory))

    def reply(self, node: str, message: Control) -> None:
        """Send a message to an origin, which may be this node's own."""
        if node != self._pipe.node:
            self._pipe.send_control(node, message)
        else:
            self._inbox.put(Deliver(node, message, self._clock()))

    def keep_alive(self) -> None:
        """Keep this node's route open, unless the compute thread hangs: then other nodes should have their memory back."""
        if self._heartbeat.hung:
            return
        own = self._origin.ping()
        if own is not None:
            self.take(self._pipe.node, own, 0)

    def run(self) -> None:
        """Keep the route open until `stop`."""
        while not self._ended.wait(KEEP_ALIVE_S):
            try:
                self.keep_alive()
            except Exception:  # a bug, but without this thread every lease of this node would end
                if self._throttle.should_log():
                    logger.exception("failed to keep the route open")

    def stop(self) -> None:
        self._ended.set()

    def _answer(self, sender: str, ping: Ping) -> None:
        """Answer a Ping at once: the compute thread may be in a long pass."""
        for node, mark in self._host.marks(sender, ping):
            self._pipe.send_mark(node, mark)
        self.reply(sender, self._host.answer(sender, ping))


def _memory(message: Message, size: int) -> int:
    """Return the bytes that a message takes while it waits. `size`: of the message as it arrived; 0 if it is this node's own."""
    packed, spans = (message.packed_bytes, len(message.spans)) if isinstance(message, NetworkJob) else (0, 0)
    return packed + (SPAN_BYTES * spans + HEADER_FACTOR * (size - packed) if size else 0)
