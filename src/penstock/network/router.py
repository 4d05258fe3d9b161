"""The Router: how nodes of a network find each other, publish their records, and send each other bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

from penstock.config.network import NAME
from penstock.errors import ConfigError, Unreachable
from penstock.network.stream import Stream

MAX_RECORD_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 28  # twice the maximum of a NetworkJob's hidden states

Bytes = bytes | bytearray | memoryview
OnMessage = Callable[[str, bytes], None]  # sender, data
OnChange = Callable[[], None]

logger = logging.getLogger("penstock.network")


class Router(Protocol):
    """A node's connection to a network. Code outside this folder does not know which kind it is.

    docs/router.md has the whole contract, and `penstock.network.conformance` tests it.

    on_message: called on one thread of the router for each stream, in order per sender and stream.
    on_change: called on another thread when `records` may have changed; several changes may share one call.

    Exceptions of these callbacks are logged, and the router goes on.
    """

    @property
    def node_id(self) -> str: ...

    @property
    def seals(self) -> bool:
        """Whether the router rejects messages that were changed in transit, by accident or on purpose."""

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        """Join the network."""

    def publish(self, record: bytes) -> None:
        """Replace this node's record; it vanishes with the node. May block while the wire is full, and come before `start`.

        At most MAX_RECORD_BYTES; the caller checks.
        """

    def records(self) -> Mapping[str, bytes]:
        """Return the newest record of every live node, including this one, as a snapshot that never changes."""

    def send(self, node: str, data: Bytes, stream: Stream = Stream.DATA) -> None:
        """Hand `data` to the wire, waiting while it is full. Raises Unreachable if the node is not live.

        Neither a call that waits nor a slow `on_message` holds up other streams, least of all CONTROL. If nothing is raised,
        `data` can still get lost. At most MAX_MESSAGE_BYTES; the caller checks.
        """

    def refused(self) -> Mapping[str, int]:
        """Count the refused messages by error code."""

    def close(self) -> None:
        """Leave the network. Can be called twice, and from the callbacks."""


@lru_cache(maxsize=1024)
def is_node_id(text: str) -> bool:
    return NAME.fullmatch(text) is not None  # has no character that is special in a key, a path or a URL


def check_node_id(text: str) -> str:
    if not is_node_id(text):
        raise ConfigError(
            f"{text!r} cannot be the name of a node.",
            hint="Use up to 64 letters, digits, dots, dashes and underscores for node_id, starting with a letter or digit.",
        )
    return text


def name_taken(node_id: str) -> ConfigError:
    return ConfigError(
        f"The network already has a live node named {node_id!r}.",
        hint="If this node is not running already, give it another name: with --node-id NAME in an open network, with a new "
        "invitation in a closed one.",
    )


def unreachable(node: str) -> Unreachable:
    return Unreachable(f"Node {node!r} cannot be reached.", hint="It left the network, stopped, or never joined.")


class ChangeNotifier:
    """Calls `on_change` on its own thread after `notify`, because the thread that made the change may hold locks."""

    def __init__(self, on_change: OnChange, name: str) -> None:
        self._on_change = on_change
        self._pending = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def notify(self) -> None:
        self._pending.set()

    def _run(self) -> None:
        while True:
            self._pending.wait()
            self._pending.clear()
            if self._stopped:
                return
            try:
                self._on_change()
            except Exception:
                logger.exception("failed to handle a change in the network")

    def stop(self) -> None:
        self._stopped = True
        self._pending.set()
        join(self._thread)


def join(thread: threading.Thread) -> None:
    """Wait for a thread to end, unless it is the current one."""
    if thread is not threading.current_thread():
        thread.join()
