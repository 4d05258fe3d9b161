"""Inbox: the commands for the compute thread, and the memory that messages waiting for it take."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping

from penstock.engine.commands import Command

MAX_PENDING_BYTES = 1 << 29  # of messages that wait for the compute thread, of all senders together
MAX_SHARE = 3  # a sender may use up to this many times what remains for all: three quarters if it is the only one


class Inbox:
    """Any thread puts commands in; the compute thread takes them out."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._here: dict[str, int] = {}  # bytes of messages in the inbox, by sender
        self._taken: Mapping[str, int] = {}  # ... of those that were taken out of it and wait for earlier ones or for a pass
        self._here_bytes = 0  # of all senders
        self.taken_bytes = 0

    @property
    def pending_bytes(self) -> int:
        return self._here_bytes + self.taken_bytes

    @property
    def empty(self) -> bool:
        return self._commands.empty()

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def take(self, timeout: float | None) -> Command | None:
        """Return the next command, or None if none comes within this many seconds (None: wait forever)."""
        if timeout == 0.0 and self.empty:
            return None  # without the cost of an exception
        try:
            return self._commands.get(block=timeout != 0.0, timeout=timeout)
        except queue.Empty:
            return None

    def reserve(self, sender: str, size: int) -> bool:
        """Count a message that is about to be put in. False if too much waits already, of this sender or of all."""
        if not size:
            return True
        with self._lock:
            here = self._here.get(sender, 0) + size
            left = MAX_PENDING_BYTES - self._here_bytes - self.taken_bytes - size
            if here + self._taken.get(sender, 0) > MAX_SHARE * left:
                return False
            self._here[sender] = here
            self._here_bytes += size
            return True

    def release(self, sender: str, size: int, waiting: Mapping[str, int] | None = None) -> None:
        """Record that a message was taken out, and how many bytes still wait of those taken out so far, if that has changed."""
        with self._lock:
            here = self._here.pop(sender) - size
            if here:
                self._here[sender] = here
            self._here_bytes -= size
            if waiting is not None:
                self._count(waiting)

    def count_waiting(self, waiting: Mapping[str, int]) -> None:
        """Record how many bytes of each sender still wait of the messages that were taken out."""
        with self._lock:
            self._count(waiting)

    def _count(self, waiting: Mapping[str, int]) -> None:
        self._taken = waiting
        self.taken_bytes = sum(waiting.values())
