"""InProcessRouter: a network inside one process, for tests and for several nodes in one Python program."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from types import MappingProxyType

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError
from penstock.network.router import Bytes, ChangeNotifier, OnChange, OnMessage, check_node_id, join, name_taken, unreachable
from penstock.network.stream import Stream

Inbox = queue.SimpleQueue[tuple[str, bytes] | None]  # sender and data; None ends it

logger = logging.getLogger("penstock.network")


class Hub:
    """Connects the routers of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, InProcessRouter] = {}
        self._records: dict[str, bytes] = {}
        self._snapshot: Mapping[str, bytes] = MappingProxyType({})

    def join(self, router: InProcessRouter) -> None:
        with self._lock:
            if router.node_id in self._members:
                raise name_taken(router.node_id)
            self._members[router.node_id] = router
        self._changed()

    def leave(self, router: InProcessRouter) -> None:
        with self._lock:
            if self._members.get(router.node_id) is not router:
                return  # killed earlier, and another router may have the name now
            del self._members[router.node_id]
            self._records.pop(router.node_id, None)
        self._changed()

    def kill(self, node_id: str) -> None:
        """Cut a node off without a goodbye: it receives nothing more, and nothing it sends arrives."""
        with self._lock:
            router = self._members.get(node_id)
        if router is not None:
            self.leave(router)

    def has(self, router: InProcessRouter) -> bool:
        return self._members.get(router.node_id) is router

    def publish(self, router: InProcessRouter, record: bytes) -> None:
        with self._lock:
            if not self.has(router):
                return
            self._records[router.node_id] = record
        self._changed()

    def records(self) -> Mapping[str, bytes]:
        return self._snapshot

    def find(self, node_id: str) -> InProcessRouter | None:
        return self._members.get(node_id)

    def _changed(self) -> None:
        with self._lock:
            self._snapshot = MappingProxyType(dict(self._records))
            members = list(self._members.values())
        for member in members:
            member.notify()


class InProcessRouter:
    def __init__(self, hub: Hub, node_id: str) -> None:
        self._hub = hub
        self._node_id = check_node_id(node_id)
        self._inboxes: dict[Stream, Inbox] = {stream: queue.SimpleQueue() for stream in Stream}
        self._record: bytes | None = None
        self._notifier: ChangeNotifier | None = None
        self._receivers: list[threading.Thread] = []
        self._closed = False

    @property
    def node_id(self) -> str:
        return self._node_id

    @property
    def seals(self) -> bool:
        return False

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        assert not self._receivers and not self._closed, "a router starts once"
        self._hub.join(self)
        self._notifier = ChangeNotifier(on_change, f"network-changes-{self._node_id}")
        for stream, inbox in self._inboxes.items():
            name = f"network-{stream.name.lower()}-{self._node_id}"
            self._receivers.append(threading.Thread(target=self._receive, args=(inbox, on_message), name=name, daemon=True))
            self._receivers[-1].start()
        if self._record is not None:
            self._hub.publish(self, self._record)

    def publish(self, record: bytes) -> None:
        self._record = record
        self._hub.publish(self, record)

    def records(self) -> Mapping[str, bytes]:
        return self._hub.records() if self._hub.has(self) else MappingProxyType({})

    def send(self, node: str, data: Bytes, stream: Stream = Stream.DATA) -> None:
        other = self._hub.find(node)
        if other is None or not self._hub.has(self):
            raise unreachable(node)
        other.deliver(self._node_id, bytes(data), stream)

    def refused(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._hub.leave(self)
        for inbox in self._inboxes.values():
            inbox.put(None)
        if self._notifier is not None:
            self._notifier.stop()
        for receiver in self._receivers:
            join(receiver)

    # ---- called by the hub ----

    def deliver(self, sender: str, data: bytes, stream: Stream) -> None:
        self._inboxes[stream].put((sender, data))

    def notify(self) -> None:
        if self._notifier is not None:
            self._notifier.notify()

    def _receive(self, inbox: Inbox, on_message: OnMessage) -> None:
        while (message := inbox.get()) is not None:
            if not self._hub.has(self):
                continue  # left in the inbox of a node that was killed
            try:
                on_message(*message)
            except Exception:
                logger.exception("failed to handle a message", extra={"sender": message[0]})


_process_hubs: dict[str, Hub] = {}  # by network name; process-wide
_opening = threading.Lock()


def join_process_network(config: NetworkConfig, node_id: str, epoch: int) -> InProcessRouter:
    """Make a router for `network.router = "in-process"`: nodes of one process with the same network name find each other."""
    unused = [name for name in ("listen", "connect", "multicast") if getattr(config, name)]
    if unused:
        raise ConfigError(
            f"network.{unused[0]} cannot be used with network.router = 'in-process': it reaches no other process.",
            hint="Leave it out, or leave network.router out.",
        )
    with _opening:
        hub = _process_hubs.setdefault(config.name, Hub())
    return InProcessRouter(hub, node_id)
