"""Meter: counts what each key uses, and decides whether another request fits its limits.

A request is admitted with a reservation: its prompt and the most that it may generate. Tokens move from the reservation into the
window of the last minute as they are used; the rest is released when the request ends. So the tokens of any 60 seconds, together
with all reservations, never exceed the limit. An answer without max_tokens gets what is left of the minute, and ends there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.doors.access.keys import Caller, revoked
from penstock.errors import KeyLimit, KeyRevoked, RequestError

TICKS_PER_S = 10  # the resolution of the window
WINDOW_TICKS = 60 * TICKS_PER_S
MIN_OPEN_ENDED_TOKENS = 256  # an answer without max_tokens is admitted if this many are left in the minute
MIN_RETRY_S = 1  # Retry-After where the end of open answers cannot be predicted


class Used(NamedTuple):
    """Open answers, and tokens that were used in the last minute or are reserved."""

    jobs: int
    tokens: int


class UsedTokens(NamedTuple):
    prompt: int = 0
    generated: int = 0


Record = Callable[[str | None, UsedTokens], None]
"""Takes the tokens that an owner has used now."""


def _ignore(owner: str | None, tokens: UsedTokens) -> None:
    pass


@dataclass(eq=False, slots=True)
class Ticket:
    """An admitted request. Its holder counts tokens, those of the prompt once its jobs run, and must close it.

    max_tokens: the limit of each of its answers.
    record: called with all tokens that are counted.
    """

    account: Account
    caller: Caller
    outputs: int
    max_tokens: int
    reserved: int
    record: Record = _ignore
    _revoked: KeyRevoked | None = None
    _callback: Callable[[KeyRevoked], None] | None = None

    def count(self, tokens: int, *, generated: bool = False) -> None:
        """Count tokens of the prompt, or generated ones, that were used now. Does nothing after `close`."""
        if self in self.account.open:
            self.reserved -= min(tokens, self.reserved)
            self.account.use(tokens)
            self.record(self.caller.owner, UsedTokens(0, tokens) if generated else UsedTokens(tokens, 0))

    def close(self) -> None:
        self.account.open.discard(self)

    def on_revoked(self, callback: Callable[[KeyRevoked], None]) -> None:
        """Call back if the key is revoked while this is open; at once if it already was."""
        self._callback = callback
        if self._revoked is not None:
            callback(self._revoked)

    def revoke(self) -> None:
        self._revoked = revoked(self.caller.name)
        if self._callback is not None:
            self._callback(self._revoked)


@dataclass(slots=True)
class Account:
    """The open tickets and used tokens of one key.

    window: ticks and the tokens of each, oldest first. A token counts from the end of its tick, so it never expires too early.
    """

    clock: Callable[[], float]
    open: set[Ticket] = field(default_factory=set)
    window: deque[tuple[int, int]] = field(default_factory=deque)
    used: int = 0

    def use(self, tokens: int) -> None:
        now = self.clock() * TICKS_PER_S
        self._expire(now)
        tick = math.ceil(now)
        before = self.window.pop()[1] if self.window and self.window[-1][0] == tick else 0
        self.window.append((tick, before + tokens))
        self.used += tokens

    def expire(self) -> None:
        self._expire(self.clock() * TICKS_PER_S)

    def _expire(self, now: float) -> None:
        begin = math.floor(now) - WINDOW_TICKS
        while self.window and self.window[0][0] <= begin:
            self.used -= self.window.popleft()[1]

    @property
    def jobs(self) -> int:
        return sum(ticket.outputs for ticket in self.open)

    @property
    def reserved(self) -> int:
        return sum(ticket.reserved for ticket in self.open)

    def seconds_until(self, tokens: int) -> int:
        """Whole seconds until at most `tokens` of the window are left in it."""
        left, wait = self.used, 0
        for tick, used in self.window:
            if left <= tokens:
                break
            left, wait = left - used, math.ceil((tick + WINDOW_TICKS) / TICKS_PER_S - self.clock())
        return max(MIN_RETRY_S, wait)


class Meter:
    """Used on the event loop only. record: called with all tokens that are counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, record: Record = _ignore) -> None:
        self._clock = clock
        self._record = record
        self._accounts: dict[Caller, Account] = {}

    def admit(self, caller: Caller, *, outputs: int, prompt_tokens: int, max_tokens: int, open_ended: bool = False) -> Ticket:
        """Admit a request, or raise KeyLimit if it must wait, RequestError if it can never fit.

        prompt_tokens: of all its prompts.
        max_tokens: of each answer, already cut to the context and the server's limit.
        open_ended: the request sets no max_tokens itself, so that the ticket may grant less.
        """
        account = self._account(caller)
        needed = _needed_tokens(caller, outputs, prompt_tokens, max_tokens, open_ended)
        self._check_jobs(caller, account, outputs)
        self._check_tokens(caller, account, prompt_tokens + outputs * needed)
        limit, granted, reserved = caller.limits.tokens_per_minute, max_tokens, 0
        if limit is not None:
            if open_ended:
                granted = min(max_tokens, (limit - account.used - account.reserved - prompt_tokens) // outputs)
            reserved = prompt_tokens + outputs * granted
        ticket = Ticket(account, caller, outputs=outputs, max_tokens=granted, reserved=reserved, record=self._record)
        account.open.add(ticket)
        return ticket

    def hold(self, caller: Caller) -> Ticket:
        """Admit a request that has not been parsed yet: it counts as one open answer and needs one token left."""
        return self.admit(caller, outputs=1, prompt_tokens=1, max_tokens=0)

    def revoke(self, caller: Caller) -> None:
        """Revoke all open tickets of a caller."""
        for ticket in list(self._account(caller).open):
            ticket.revoke()

    def used(self, caller: Caller) -> Used:
        account = self._account(caller)
        account.expire()
        return Used(account.jobs, account.used + account.reserved)

    def _account(self, caller: Caller) -> Account:
        return self._accounts.setdefault(caller, Account(self._clock))

    def _check_jobs(self, caller: Caller, account: Account, outputs: int) -> None:
        limit = caller.limits.jobs
        if limit is None or account.jobs + outputs <= limit:
            return
        if outputs > limit:
            raise RequestError(
                f"The key '{caller.name}' may have {limit} answers open at once; this request alone asks for {outputs}.",
                field="n",
                hint="Ask for fewer.",
            )
        raise KeyLimit(
            f"The key '{caller.name}' may have {limit} answers open at once; {account.jobs} are open, this request asks for "
            f"{outputs}.",
            retry_after=MIN_RETRY_S,
            hint="Try again when one has ended.",
        )

    def _check_tokens(self, caller: Caller, account: Account, tokens: int) -> None:
        limit = caller.limits.tokens_per_minute
        account.expire()
        if limit is None or account.used + account.reserved + tokens <= limit:
            return
        # How much of a large reservation will be used is unknown, so report when the request fits if no more is used.
        room = limit - tokens
        wait = account.seconds_until(room - account.reserved if account.reserved <= room else room)
        raise KeyLimit(
            f"The key '{caller.name}' may use {limit} tokens a minute; {account.used} are used and {account.reserved} reserved "
            f"for open answers, and this request may need {tokens}.",
            retry_after=wait,
            hint=f"Try again in {wait} seconds, or ask for less (max_tokens).",
        )


def _needed_tokens(caller: Caller, outputs: int, prompt_tokens: int, max_tokens: int, open_ended: bool) -> int:
    """The tokens that each answer needs. An open-ended request always fits an unused minute."""
    limit = caller.limits.tokens_per_minute
    if limit is None:
        return max_tokens
    available = (limit - prompt_tokens) // outputs
    wanted = min(max_tokens, MIN_OPEN_ENDED_TOKENS, max(1, available)) if open_ended else max_tokens
    if wanted > available:
        raise RequestError(
            f"The key '{caller.name}' may use {limit} tokens a minute, and this request may need "
            f"{prompt_tokens + outputs * wanted}: its prompt has {prompt_tokens}.",
            field="max_tokens",
            hint="Shorten the prompt, or ask for less (max_tokens, n).",
        )
    return wanted
