"""Inbox: the commands for the compute thread, and how many bytes of hidden states wait for it."""

from __future__ import annotations

import queue
import threading

from penstock.engine.commands import Command

MAX_PENDING_BYTES = 1 << 29  # hidden states that may wait for the compute thread, of all senders together


class Inbox:
    """Any thread puts commands in; the compute thread takes them out."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._here = 0  # bytes of hidden states in the inbox
        self._taken = 0  # ... and of those that were taken out of it and wait for earlier ones or for a pass

    @property
    def pending_bytes(self) -> int:
        return self._here + self._taken

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def take(self, timeout: float | None) -> Command | None:
        """Return the next command, or None if there is none within so many seconds (None: wait for ever)."""
        try:
            return self._commands.get(block=timeout != 0.0, timeout=timeout)
        except queue.Empty:
            return None

    def reserve(self, size: int) -> bool:
        """Count hidden states that are about to be put in. False if too many wait already."""
        with self._lock:
            if size and self.pending_bytes + size > MAX_PENDING_BYTES:
                return False
            self._here += size
            return True

    def count(self, taken: int, waiting: int) -> None:
        """Record that `taken` bytes were taken out, and that `waiting` bytes that were taken out earlier still wait."""
        with self._lock:
            self._here -= taken
            self._taken = waiting
