"""Solitude: when to tell the user of a closed network that this node meets nobody, for it may be this node that is shut out."""

from __future__ import annotations

PATIENCE = 30.0  # seconds


class IsolationMonitor:
    """Nobody tells a node that it was revoked: the others do not answer any more. To it they might as well be off."""

    def __init__(self, *, expects: bool) -> None:
        """`expects` whether there is somebody to be met; after the first meeting there is."""
        self._expects = expects
        self._since: float | None = None

    def should_warn(self, alone: bool, now: float) -> bool:
        """Whether to tell, now. Once, until somebody is met again."""
        if not alone:
            self._expects, self._since = True, None
            return False
        if self._since is None:
            self._since = now
        if not self._expects or now - self._since < PATIENCE:
            return False
        self._expects = False
        return True
