"""The Router: how the nodes of a network find each other, tell each other who they are, and send each other bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.config.network import NAME
from penstock.errors import ConfigError, Unreachable

OnMessage = Callable[[str, bytes], None]  # sender, data
OnChange = Callable[[], None]

logger = logging.getLogger("penstock.network")


class Router(Protocol):
    """A node's place in a network. Nothing above this folder knows which kind it is.

    `on_message` is called on one thread of the router, in order per sender. `on_change` is called on another whenever `records`
    may have changed; several changes may be one call. What they raise is logged and ends nothing.
    """

    @property
    def node_id(self) -> str: ...

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        """Join the network."""

    def publish(self, record: bytes) -> None:
        """Replace this node's record; it vanishes with the node. May wait while the wire is full."""

    def records(self) -> Mapping[str, bytes]:
        """The newest record of every live node, this one too: a snapshot that never changes."""

    def send(self, node: str, data: bytes) -> None:
        """Hand `data` to the wire, waiting while it is full. Raises Unreachable when that node is not live; that nothing is
        raised does not mean that it arrived."""

    def refused(self) -> Mapping[str, int]:
        """How often something that came was not taken, by the kind of error."""

    def close(self) -> None:
        """Leave. May be called twice, and by the callbacks."""


def is_node_id(text: str) -> bool:
    return NAME.fullmatch(text) is not None  # nothing that means something in a key, a path or a URL


def check_node_id(text: str) -> str:
    if not is_node_id(text):
        raise ConfigError(
            f"{text!r} cannot name a node.",
            hint="Use up to 64 letters, digits, dots, dashes and underscores for node_id, beginning with a letter or digit.",
        )
    return text


def name_taken(node_id: str) -> ConfigError:
    return ConfigError(
        f"The network already has a live node named {node_id!r}.",
        hint="Is it running already? Otherwise give this one another name: --node-id NAME in an open network, an invitation in a "
        "closed one.",
    )


def unreachable(node: str) -> Unreachable:
    return Unreachable(f"Node {node!r} cannot be reached.", hint="It left the network, died, or never joined.")


class ChangeNotifier:
    """Calls `on_change` on a thread of its own after `ring`: never on the thread that caused the change, which may hold locks."""

    def __init__(self, on_change: OnChange, name: str) -> None:
        self._on_change = on_change
        self._rung = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ring(self) -> None:
        self._rung.set()

    def _run(self) -> None:
        while True:
            self._rung.wait()
            self._rung.clear()
            if self._stopped:
                return
            try:
                self._on_change()
            except Exception:
                logger.exception("a change in the network could not be handled")

    def stop(self) -> None:
        self._stopped = True
        self._rung.set()
        join(self._thread)


def join(thread: threading.Thread) -> None:
    """Wait for a thread that was told to end, unless it is the one that asks."""
    if thread is not threading.current_thread():
        thread.join()
