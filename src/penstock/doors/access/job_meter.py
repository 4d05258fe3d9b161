"""JobMeter: decides when jobs of the workspace fit the tokens per minute of their key.

Jobs are counted apart from interactive requests, so that a batch does not use up their tokens. A job that does not fit waits, and
none is cut short: one that may need more than a whole minute's tokens starts once all others have finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.config.keys import KeyLimits
from penstock.doors.access.keys import Caller
from penstock.doors.access.meter import MIN_RETRY_S, Account, Ticket
from penstock.errors import KeyLimit

MAX_RETRY_S = 5  # the limit may be changed meanwhile


class JobTicket:
    """A job that was admitted. Its holder counts the tokens as they are used, and must close it."""

    def __init__(self, ticket: Ticket, lock: threading.Lock) -> None:
        self._ticket = ticket
        self._lock = lock

    def count(self, tokens: int) -> None:
        with self._lock:
            self._ticket.count(tokens)

    def close(self) -> None:
        with self._lock:
            self._ticket.close()


class JobMeter:
    """Safe in any thread. limits_of: the limits of a key, by the owner of its jobs."""

    def __init__(self, limits_of: Callable[[str | None], KeyLimits], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[str | None, Account] = {}

    def admit(self, owner: str | None, tokens: int) -> JobTicket:
        """Admit a job that may use up to `tokens`, or raise KeyLimit if it must wait."""
        limit = self._limits_of(owner).tokens_per_minute
        with self._lock:
            account = self._accounts.setdefault(owner, Account(self._clock))
            needed = 0 if limit is None else min(tokens, limit)
            account.expire()
            if limit is not None and account.used + account.reserved + needed > limit:
                wait = MIN_RETRY_S if account.open else min(MAX_RETRY_S, account.seconds_until(limit - needed))
                raise KeyLimit(f"The jobs of this key may use {limit} tokens a minute.", retry_after=wait)
            ticket = Ticket(account, Caller(), outputs=1, max_tokens=tokens, reserved=needed)
            account.open.add(ticket)
        return JobTicket(ticket, self._lock)
