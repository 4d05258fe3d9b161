"""PeerContacts: the endpoints of the peers that a node is connected to, for the next session that it opens."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError

LIFETIME_S = 60.0  # how long to remember a peer after its link has ended: it may just be opening a new session


class PeerContacts:
    """Remembers the peers that a node has connected to. Otherwise those learnt from a node that is gone would be lost.

    Call `note` regularly, not only before a session closes: when two nodes open new sessions at the same time, the link may
    already be gone, and a node that never connected to this one does not know where this one listens.
    """

    def __init__(self, config: NetworkConfig) -> None:
        self._config = config
        self._ports = {endpoint.rpartition(":")[2] for endpoint in config.listen}
        self._known: dict[str, tuple[str | None, float]] = {}  # endpoint: its certificate's common name, when last linked

    def note(self, session: Any) -> None:
        """Remember the peers at the other ends of the links that this node opened.

        On a link that the other side opened, its port is not its listening port. Such links are recognized by our own
        listening port, which must therefore be known.
        """
        if self._config.mode == "client" or not self._ports or "0" in self._ports:
            return
        now = time.monotonic()
        for link in session.info.links():
            if str(link.src).rpartition(":")[2] not in self._ports:
                self._known[str(link.dst)] = (link.auth_identifier, now)
        self._known = {endpoint: seen for endpoint, seen in self._known.items() if now - seen[1] < LIFETIME_S}

    def add_to(self, config: NetworkConfig, denied: Collection[str]) -> NetworkConfig:
        """Return `config` with these peers to connect to, except those whose certificates have a common name in `denied`."""
        found = [endpoint for endpoint, (name, _) in self._known.items() if name not in denied]
        try:
            return replace(config, connect=tuple(dict.fromkeys([*config.connect, *found])))
        except ConfigError:  # an address in a form that only Zenoh uses, such as one with an interface name
            return config
