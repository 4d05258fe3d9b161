"""Outage measures how long answers stall when a route breaks; WaitLimits fails jobs that wait too long."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from penstock.config.engine import EngineConfig
from penstock.domain.job import TERMINAL, Sequence
from penstock.domain.kv_need import KvNeed
from penstock.engine.routing.origin.route_opener import ActiveRoute
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.errors import NotReady
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.route")

LEASE_TIMEOUT_S = 20.0  # how long a prompt waits for memory that other origins have leased


class Outage:
    """The time from the break of a route until every answer that ran on it has resumed or ended."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._since = 0.0
        self._stopped: dict[int, Sequence] = {}  # by id: those that have not resumed
        self._count = 0

    def begin(self, since: float, stopped: Iterable[Sequence]) -> None:
        """Start an outage for these sequences. Another break during an outage only extends it."""
        if not self._stopped:
            self._since, self._count = since, 0
        self._stopped |= {seq.seq_id: seq for seq in stopped}
        self._count = max(self._count, len(self._stopped))

    def record_resumed(self, seqs: Iterable[Sequence], now: float) -> None:
        """Record that these sequences make progress again."""
        if not self._stopped:
            return
        first = len(self._stopped) == self._count
        resumed = [self._stopped.pop(seq.seq_id) for seq in seqs if seq.seq_id in self._stopped]
        if resumed and first:
            self._stats.recoveries += 1
            self._stats.last_pause = now - self._since
        self._stopped = {number: seq for number, seq in self._stopped.items() if seq.state not in TERMINAL}
        if resumed:
            self._stats.longest_wait = now - self._since
        if resumed and not self._stopped:
            pause, last = self._stats.last_pause, self._stats.longest_wait
            which = "1 answer" if self._count == 1 else f"{self._count} answers"
            logger.warning("%s resumed after an outage: the first after %.2f s, the last after %.2f s", which, pause, last)


class WaitLimits:
    """Limits how long jobs wait for a route, or for memory that other origins have leased."""

    def __init__(self, config: EngineConfig, pipe: Pipe, sequences: EngineSequenceManager, recovery_timeout: float) -> None:
        self._config = config
        self._pipe = pipe
        self._sequences = sequences
        self._recovery_timeout = recovery_timeout
        self._unserved_since: float | None = None
        self._starved_since: dict[int, float] = {}  # by id: since when a sequence waits for more memory than the route has

    def enforce(self, route: ActiveRoute | None, trouble: str, now: float) -> None:
        """Fail jobs that have waited too long. `route` is None while none works."""
        waiting = list(self._sequences.queued.values())
        if route is None:
            waiting += self._sequences.holders.values()
            self._end_unserved(waiting, trouble, now)
        else:
            self._unserved_since = None
            self._end_starved(waiting, now)

    def _end_unserved(self, waiting: list[Sequence], trouble: str, now: float) -> None:
        if not waiting or self._unserved_since is None:
            self._unserved_since = now if waiting else None
            return
        for seq in waiting:
            if now - max(seq.job.arrival, self._unserved_since) >= self._recovery_timeout and seq.job.open:
                why = self._pipe.explain() or f"No route could be opened: {trouble}."
                hint = "`penstock network status` shows which node holds what, and what to run."
                self._sequences.fail(seq.job, NotReady(why, hint=hint))

    def _end_starved(self, waiting: list[Sequence], now: float) -> None:
        if not waiting:
            self._starved_since = {}
            return
        pool = self._sequences.pool
        longest = KvNeed(pool.windows, pool.block_size, self._config.max_pass_tokens).longest(pool.capacity)
        starved = [seq for seq in waiting if seq.min_length > longest]
        self._starved_since = {seq.seq_id: self._starved_since.get(seq.seq_id, now) for seq in starved}
        for seq in starved:
            if now - self._starved_since[seq.seq_id] > LEASE_TIMEOUT_S and seq.job.open:
                error = NotReady(
                    f"The prompt needs KV memory for {seq.min_length} tokens, but only {longest} "
                    "are left beside the work of other nodes.",
                    hint="Try again later, shorten it, or give the nodes more KV memory (kv_memory).",
                )
                self._sequences.fail(seq.job, error)
