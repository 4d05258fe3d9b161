"""GrammarPool: the compiled grammars of one model, and each key's share of memory and CPU time for them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple
from weakref import WeakSet

from penstock.doors.grammar.constraint import GrammarFactory, WaitBudget
from penstock.doors.grammar.remote import (
    ABORT_POLL_S,
    Aborted,
    ForkServerProcess,
    Refused,
    RemoteGrammar,
    TooComplex,
    check_client,
)
from penstock.errors import KeyLimit

MAX_IDLE = 32  # unused compiled grammars, retained for later requests
MAX_IDLE_OF_KEY = 8  # ... of one key, so that no key evicts the grammars of others by sending new ones
MAX_USES = 1000  # compile a grammar again after this many uses, since its automaton grows with use
MAX_LIVE = 128  # grammars of one key at the same time
BASE_MEMORY_BYTES = 12 * 1024 * 1024  # what a small grammar reports; most of it is shared with the others
MAX_REFUSED = 256  # grammars that were too complex, remembered so that repeating them costs nothing
RETRY_AFTER_S = 5
KEY_SHARE = 0.8  # how much of a step's waiting time for grammars one key can use

# CPU time for compiling the grammars of one key: a burst, and a number of cores in the long run. Beyond that, they wait.
COMPILE_BURST_S = 0.25
COMPILE_SHARE = (os.cpu_count() or 1) / 16
PROCESS_CPU_S = 0.012  # charged for each process, in addition to the CPU time that it reports
MAX_COMPILE_CHARGE_S = 2.0  # the most charged for one grammar, so that a single mistake does not block a key for long


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on the resources of grammars.

    compile_cpu_s: CPU time for all grammars of one request.
    memory_bytes: for all grammars of one key, beside BASE_MEMORY_BYTES for each.
    hold_s: how long the compute thread may wait for grammars in one step.
    """

    compile_cpu_s: float = 3.0
    memory_bytes: int = 256 * 1024 * 1024
    hold_s: float = 0.045


class GrammarKey(NamedTuple):
    """owner: keys do not share grammars, since a hostile client can make one fail."""

    owner: str | None
    kind: str
    text: str


@dataclass(slots=True)
class CpuBudget:
    """CPU time that one request may still spend on compiling, in seconds."""

    left: float


@dataclass(slots=True)
class _Compiled:
    grammar: RemoteGrammar
    mask: bytes
    uses: int = 1


class _GrammarAccount:
    """The grammars of a key, and its time budgets.

    turn: held while a grammar of the key is compiled, one at a time.
    compile_budget: CPU time that the key may use for compiling now.
    """

    def __init__(self, limits: GrammarLimits, shared: WaitBudget) -> None:
        self._max_memory = limits.memory_bytes
        self._grammars: WeakSet[RemoteGrammar] = WeakSet()
        self.wait_budget = WaitBudget(KEY_SHARE * limits.hold_s, shared)
        self.compile_budget = WaitBudget(COMPILE_BURST_S, share=COMPILE_SHARE)
        self.turn = threading.Lock()

    def add(self, grammar: RemoteGrammar) -> None:
        self._grammars.add(grammar)

    @property
    def live(self) -> list[RemoteGrammar]:
        return [grammar for grammar in self._grammars if not grammar.has_ended]

    @property
    def memory(self) -> int:
        return sum(max(0, grammar.memory - BASE_MEMORY_BYTES) for grammar in self.live)

    @property
    def is_full(self) -> bool:
        return len(self.live) >= MAX_LIVE or self.memory > self._max_memory


class GrammarPool:
    """Safe in any thread."""

    def __init__(self, processes: ForkServerProcess, limits: GrammarLimits) -> None:
        self._processes = processes
        self._limits = limits
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarKey, _Compiled] = OrderedDict()  # the least recently used first
        self._accounts: dict[str | None, _GrammarAccount] = {}
        self._wait_budget = WaitBudget(limits.hold_s)
        self._refused: OrderedDict[bytes, Literal["CPU time", "memory"]] = OrderedDict()

    def factory(
        self, key: GrammarKey, field: str, budget: CpuBudget, aborted: threading.Event, *, keep: bool = True
    ) -> GrammarFactory:
        """Compile a grammar, if it is not known yet. Raises Refused, TooComplex, KeyLimit, Aborted or ComputeFailed.

        keep: for later requests.
        """
        with self._lock:
            account = self._accounts.setdefault(key.owner, _GrammarAccount(self._limits, self._wait_budget))
        found = self._find(key, field, account)
        if found is not None:
            return found
        with _turn(account, aborted):
            found = self._find(key, field, account)  # it was compiled while we waited
            if found is not None:
                return found
            while key.owner is not None and account.compile_budget.left <= 0:  # the operator may use the whole machine
                check_client(aborted)
                time.sleep(ABORT_POLL_S)
            compiled = self._compile(key, account, budget, aborted)
            made = GrammarFactory(compiled.grammar, compiled.mask, account.wait_budget, field)
            if keep:
                self._keep(key, compiled)
            return made

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            for known in self._compiled.values():
                known.grammar.close()
            self._compiled.clear()
        self._processes.close()

    def _find(self, key: GrammarKey, field: str, account: _GrammarAccount) -> GrammarFactory | None:
        with self._lock:  # until the factory marks the grammar as used: other threads end unused ones
            found = self._compiled.pop(key, None)
            if found is None or found.grammar.has_ended:
                return None
            found.uses += 1
            if found.uses < MAX_USES:
                self._compiled[key] = found
            return GrammarFactory(found.grammar, found.mask, account.wait_budget, field)

    def _compile(self, key: GrammarKey, account: _GrammarAccount, budget: CpuBudget, aborted: threading.Event) -> _Compiled:
        digest = hashlib.sha256(f"{key.kind} {key.text}".encode("utf-8", "replace")).digest()
        with self._lock:
            if digest in self._refused:
                raise TooComplex(self._refused[digest])
            self._make_room(key.owner, account)
        if budget.left <= 0:
            raise TooComplex("CPU time")
        grammar = RemoteGrammar(self._processes.fork(), lambda grown: self._on_growth(grown, account))
        with self._lock:
            account.add(grammar)
        whole_budget = budget.left == self._limits.compile_cpu_s
        began, spent = time.monotonic(), 0.0
        try:
            mask, spent = grammar.compile(key.kind, key.text, budget.left, aborted)
        except Refused as error:
            spent = error.cpu_s
            raise
        except TooComplex as error:
            spent = budget.left
            if whole_budget:
                self._remember(digest, error)
            raise
        except Aborted:
            spent = min(budget.left, time.monotonic() - began)  # at most
            raise
        finally:
            budget.left -= spent
            account.compile_budget.spend(min(spent + PROCESS_CPU_S, MAX_COMPILE_CHARGE_S))
        return _Compiled(grammar, mask)

    def _keep(self, key: GrammarKey, compiled: _Compiled) -> None:
        with self._lock:
            self._compiled[key] = compiled
            self._end_idle(MAX_IDLE_OF_KEY, [known for known in self._compiled if known.owner == key.owner])
            self._end_idle(MAX_IDLE, list(self._compiled))

    def _end_idle(self, keep: int, keys: list[GrammarKey]) -> None:
        """End the unused ones of these grammars, except the last `keep`."""
        idle = [key for key in keys if not self._compiled[key].grammar.is_used]
        for key in idle[:-keep]:
            self._compiled.pop(key).grammar.close()

    def _make_room(self, owner: str | None, account: _GrammarAccount) -> None:
        """End unused grammars of this key, the least recently used first, while it has too many."""
        for key in [key for key, known in self._compiled.items() if key.owner == owner and not known.grammar.is_used]:
            if not account.is_full:
                return
            self._compiled.pop(key).grammar.close()
        if account.is_full:
            raise KeyLimit(
                f"{len(account.live)} different schemas and grammars are in use at once, and take {account.memory >> 20} MB: "
                f"the limits are {MAX_LIVE} and {self._limits.memory_bytes >> 20} MB.",
                retry_after=RETRY_AFTER_S,
                hint="Wait until other answers are complete, or use the same schema for more of them.",
            )

    def _remember(self, digest: bytes, error: TooComplex) -> None:
        with self._lock:
            self._refused[digest] = error.resource
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _on_growth(self, grown: RemoteGrammar, account: _GrammarAccount) -> None:
        with self._lock:
            exceeded = account.memory > self._limits.memory_bytes
        if exceeded:
            grown.fail(TooComplex("memory"))


@contextmanager
def _turn(account: _GrammarAccount, aborted: threading.Event) -> Iterator[None]:
    while not account.turn.acquire(timeout=ABORT_POLL_S):
        check_client(aborted)
    try:
        check_client(aborted)
        yield
    finally:
        account.turn.release()
