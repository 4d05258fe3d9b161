"""Meter: what each key uses, and whether one more request fits into its limits.

A request is admitted with a reservation: its prompt and the most that it may generate. What it uses moves from there into the
window of the last minute, what is left when it ends is given back. So what is used in any 60 seconds, together with all that may
still come, never exceeds the limit. An answer that may be as long as it likes gets what the minute has left, and ends there.
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

TICKS_PER_S = 10  # in a second; tokens of one tick are kept as one number
WINDOW_TICKS = 60 * TICKS_PER_S
MIN_OPEN_ENDED_TOKENS = 256  # tokens that the minute must have left for an answer that names no max_tokens
MIN_RETRY_S = 1  # seconds; when an open answer will end, nobody knows


class Used(NamedTuple):
    """Answers that are open, and tokens that are used in this minute or reserved."""

    jobs: int
    tokens: int


class Ticket:
    """One admitted request; each of its answers may have `max_tokens`. Whoever holds it counts its tokens (the prompt's too, once
    its jobs run: what is refused after it was admitted costs nothing), and closes it whatever happens."""

    def __init__(self, account: _Account, caller: Caller, *, outputs: int, max_tokens: int, reserved: int) -> None:
        self._account, self._caller = account, caller
        self.outputs, self.max_tokens, self.reserved = outputs, max_tokens, reserved
        self._revoked: KeyRevoked | None = None
        self._callback: Callable[[KeyRevoked], None] | None = None

    def count(self, tokens: int) -> None:
        """So many more were used now. After `close` it does nothing."""
        if self in self._account.open:
            self.reserved -= min(tokens, self.reserved)
            self._account.use(tokens)

    def close(self) -> None:
        self._account.open.discard(self)

    def on_revoked(self, callback: Callable[[KeyRevoked], None]) -> None:
        """Called once when the key is taken back while this is open; at once if it was already."""
        self._callback = callback
        if self._revoked is not None:
            callback(self._revoked)

    def revoke(self) -> None:
        self._revoked = revoked(self._caller.name)
        if self._callback is not None:
            self._callback(self._revoked)


@dataclass(slots=True)
class _Account:
    """What one key has open, and what it used. `window` has ticks and the tokens of each, the oldest first; a token counts from
    the end of its tick, so it is never forgotten too early."""

    clock: Callable[[], float]
    open: set[Ticket] = field(default_factory=set)
    window: deque[tuple[int, int]] = field(default_factory=deque)
    used: int = 0

    def use(self, tokens: int) -> None:
        self.expire()
        tick = math.ceil(self.clock() * TICKS_PER_S)
        before = self.window.pop()[1] if self.window and self.window[-1][0] == tick else 0
        self.window.append((tick, before + tokens))
        self.used += tokens

    def expire(self) -> None:
        begin = math.floor(self.clock() * TICKS_PER_S) - WINDOW_TICKS
        while self.window and self.window[0][0] <= begin:
            self.used -= self.window.popleft()[1]

    @property
    def jobs(self) -> int:
        return sum(ticket.outputs for ticket in self.open)

    @property
    def reserved(self) -> int:
        return sum(ticket.reserved for ticket in self.open)

    def seconds_until(self, tokens: int) -> int:
        """Whole seconds, after which no more than `most` tokens of those in the window are left there."""
        left, wait = self.used, 0
        for tick, used in self.window:
            if left <= tokens:
                break
            left, wait = left - used, math.ceil((tick + WINDOW_TICKS) / TICKS_PER_S - self.clock())
        return max(MIN_RETRY_S, wait)


class Meter:
    """Belongs to the event loop: nothing here is for two threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[Caller, _Account] = {}

    def admit(self, caller: Caller, *, outputs: int, prompt_tokens: int, max_tokens: int, open_ended: bool = False) -> Ticket:
        """Take a request of so many answers. `prompt_tokens` are those of all its prompts; `max_tokens` is for each answer, as
        the context and the server have cut it. Where that is all that bounds them they are `open_ended`, and the ticket may
        give them less. Raises KeyLimit when the request must wait, and RequestError when it would wait for ever.
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
        ticket = Ticket(account, caller, outputs=outputs, max_tokens=granted, reserved=reserved)
        account.open.add(ticket)
        return ticket

    def revoke(self, caller: Caller) -> None:
        """Tell all that it has open."""
        for ticket in list(self._account(caller).open):
            ticket.revoke()

    def used(self, caller: Caller) -> Used:
        account = self._account(caller)
        account.expire()
        return Used(account.jobs, account.used + account.reserved)

    def _account(self, caller: Caller) -> _Account:
        return self._accounts.setdefault(caller, _Account(self._clock))

    def _check_jobs(self, caller: Caller, account: _Account, outputs: int) -> None:
        limit = caller.limits.jobs
        if limit is None or account.jobs + outputs <= limit:
            return
        if outputs > limit:
            raise RequestError(
                f"The key '{caller.name}' may have {limit} answers open at once, and this request alone asks for {outputs}.",
                field="n",
                hint="Ask for fewer.",
            )
        raise KeyLimit(
            f"The key '{caller.name}' may have {limit} answers open at once; {account.jobs} are open, and this request asks for "
            f"{outputs}.",
            retry_after=MIN_RETRY_S,
            hint="Try again when one has ended.",
        )

    def _check_tokens(self, caller: Caller, account: _Account, tokens: int) -> None:
        limit = caller.limits.tokens_per_minute
        account.expire()
        if limit is None or account.used + account.reserved + tokens <= limit:
            return
        # Where too much is reserved, nobody knows how much of it will be used: then say when it fits if nothing more is.
        room = limit - tokens
        wait = account.seconds_until(room - account.reserved if account.reserved <= room else room)
        raise KeyLimit(
            f"The key '{caller.name}' may use {limit} tokens a minute; {account.used} are used and {account.reserved} reserved "
            f"for open answers, and this request may need {tokens}.",
            retry_after=wait,
            hint=f"Try again in {wait} seconds, or ask for less (max_tokens).",
        )


def _needed_tokens(caller: Caller, outputs: int, prompt_tokens: int, max_tokens: int, open_ended: bool) -> int:
    """The tokens that each answer must be able to have. An open end alone never keeps a request out of an unused minute."""
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
