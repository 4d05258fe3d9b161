"""IsolationMonitor: when to warn that a node of a closed network meets no other node, for it may have been shut out."""

from __future__ import annotations

WARN_AFTER_S = 30.0


class IsolationMonitor:
    """Decides when to warn about isolation.

    A node is never told that it was revoked: other nodes just stop answering, as if they were off.
    """

    def __init__(self, *, expects_peers: bool) -> None:
        """`expects_peers`: there should be other nodes. It becomes true when the first one is met."""
        self._expects_peers = expects_peers
        self._since: float | None = None

    def should_warn(self, alone: bool, now: float) -> bool:
        """Whether to warn now. Warns once, then not again before another node was met."""
        if not alone:
            self._expects_peers = True
            self._since = None
            return False
        if self._since is None:
            self._since = now
        if not self._expects_peers or now - self._since < WARN_AFTER_S:
            return False
        self._expects_peers = False
        return True
