"""IsolationMonitor: when to warn that a node of a closed network meets no other node, for it may have been shut out."""

from __future__ import annotations

WARN_AFTER_S = 30.0


class IsolationMonitor:
    """Decides when to warn about isolation.

    A revoked node gets no notice: other nodes just stop answering, as if they were off.
    """

    def __init__(self, *, expects_peers: bool) -> None:
        """`expects_peers`: whether there should be other nodes; set once the first one is met."""
        self._expects_peers = expects_peers
        self._since: float | None = None

    def should_warn(self, alone: bool, now: float) -> bool:
        """Whether to warn now. True once; then not again until another node has been met."""
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
