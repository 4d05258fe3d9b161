"""Scheduler: decides which sequences get a Span now. It changes nothing; `on_schedule` applies its output.

A batch is stall-free: all ready decodes first, then prompts, started or new, by urgency within a token budget.
If a decode or a started prompt lacks memory, the least urgent sequence is preempted and computed again later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.config.engine import IDLE_FACTOR, MAX_CHUNK, EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.job import PAUSED, Job, Sequence
from penstock.domain.kv_need import KvNeed
from penstock.engine.scheduling.policies import POLICIES, to_promote
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.scheduling.waiting_queue import Ranking, WaitingQueue

MIN_DYNAMIC_CHUNK = 64  # tokens; prompts make progress on the slowest machine
CROWD_FACTOR = 4  # full crowd_chunk once one sequence waits for its first token per this many that decode


class Grant(NamedTuple):
    """`n` more tokens of a sequence. `hits` are cached blocks of its prefix, when it is admitted."""

    seq: Sequence
    n: int
    hits: tuple[int, ...] = ()


@dataclass(slots=True)
class SchedulerOutput:
    grants: list[Grant] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    ignored: list[Sequence] = field(default_factory=list)
    promoted: Job | None = None  # a background job that ranks like any other from the next round on
    longest: int = 0  # tokens of the longest sequence that could be admitted

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that it grants; the others are decodes."""
        return sum([grant.n for grant in self.grants if not grant.seq.decoding])

    @property
    def has_events(self) -> bool:
        """Whether it does more than to grant."""
        return bool(self.preempted or self.ignored or self.promoted)

    def __bool__(self) -> bool:
        return bool(self.grants) or self.has_events


class Scheduler:
    def __init__(self, config: EngineConfig, predictor: StepTimePredictor) -> None:
        self._config = config
        self._predictor = predictor
        self._policy = POLICIES[config.policy]

    def schedule(
        self,
        pool: BlockPool,
        queue: WaitingQueue,
        holders: Collection[Sequence],
        now: float,
        *,
        window: int = 1,
        pipelined: bool = False,
        reach: int | None = None,
        max_chunk: int = MAX_CHUNK,
    ) -> SchedulerOutput:
        """Decide one batch.

        queue: sequences without memory (WAITING, WAITING_PREEMPT).
        holders: sequences with memory (RUNNING, PAUSED).
        window: NetworkJobs that may be in flight; each carries its part of the decodes.
        pipelined: there are several nodes to keep busy.
        reach: rows that the pool may grow to; a prompt that would fit then waits for them.
        max_chunk: tokens of prompts that the links of the route carry well in one NetworkJob.
        """
        ranking = Ranking(self._config.policy, now, self._predictor, self._config.busy_chunk)
        need = KvNeed(pool.windows, pool.block_size, self._config.max_pass_tokens)
        held = Holders(holders, pool, need)
        round_ = _Round(pool, need, self._config, held, lambda seq: self._urgency(seq, now), reach or pool.capacity)
        if not queue.has_promoted(ranking):
            stalled = queue.stalled_longest(ranking)
            round_.out.promoted = to_promote(held.background if stalled is None else [stalled, *held.background], now)
        if queue.max_priority(ranking) > held.lowest:
            round_.preempt_for_priority(self._in_order(queue, ranking))
        decodes = held.ready_decodes
        if len(decodes) * pool.groups > pool.available and round_.blocks_to_decode(decodes) > pool.available:
            decodes = sorted(decodes, key=round_.urgency)  # the order matters only if some may be preempted
        if window > 1:
            decodes = decodes[: -(-held.decoding // window)]
        round_.decode(decodes)
        round_.budget = min(max_chunk, self._chunk(decodes, held, len(queue), pipelined=pipelined or window > 1))
        started = sorted(held.ready_prompts, key=round_.urgency)
        waiting = self._in_order(queue, ranking) if round_.may_admit() else iter(())
        self._read_prompts(round_, started, waiting)
        round_.drop_ignored_jobs()
        return round_.out

    def _in_order(self, queue: WaitingQueue, ranking: Ranking) -> Iterator[Sequence]:
        return queue.in_order(ranking)

    def _read_prompts(self, round_: _Round, started: list[Sequence], waiting: Iterator[Sequence]) -> None:
        """Grant chunks to started prompts and admit new ones, by urgency. Looks at as few waiting ones as possible."""
        newcomer = next(waiting, None)
        for seq in started:
            while newcomer is not None and round_.urgency(newcomer) < round_.urgency(seq):
                newcomer = next(waiting, None) if round_.admit(newcomer) else None
            round_.continue_prompt(seq)
        while newcomer is not None:
            newcomer = next(waiting, None) if round_.admit(newcomer) else None

    def _chunk(self, decodes: Collection[Sequence], held: Holders, waiting: int, *, pipelined: bool) -> int:
        config = self._config
        if config.step_target is None:
            # long passes are faster, but they stall decodes and leave other stages of a pipeline idle
            if pipelined:
                return config.busy_chunk
            if not held.decoding:
                return config.idle_chunk or IDLE_FACTOR * config.busy_chunk
            if config.crowd_chunk is None:
                return config.busy_chunk
            # the more prompts wait, the larger the chunks that decodes must wait for
            crowd = CROWD_FACTOR * (waiting + len(held.all) - held.decoding) / held.decoding
            return config.crowd_chunk if crowd >= 1.0 else max(config.busy_chunk, int(config.crowd_chunk * crowd))
        context = sum(seq.step_processed for seq in decodes)
        # if decodes alone take the whole target, prompts get as much again: otherwise none would ever be read
        target = max(config.step_target, 2 * self._predictor.step(len(decodes), context))
        return max(MIN_DYNAMIC_CHUNK, self._predictor.chunk_within(target, len(decodes), context))

    def _urgency(self, seq: Sequence, now: float) -> Urgency:
        """Sort key, lower first: priority, then the policy, then arrival, then the order of outputs."""
        remaining = self._predictor.prefill(seq.remaining, self._config.busy_chunk)
        return (-seq.job.effective_priority, self._policy(seq, now, remaining), seq.job.arrival, seq.seq_id)


Urgency = tuple[int, float, float, int]


class Holders:
    """The sequences with memory, looked at once.

    ready_decodes, ready_prompts: those that may be granted a Span now.
    background: those of priority below 0.
    lowest: the lowest priority.
    decoding: how many generate.
    outstanding: blocks that started prompts still need: no other prompt is admitted into them.
    """

    def __init__(self, holders: Collection[Sequence], pool: BlockPool, need: KvNeed) -> None:
        self.all = holders
        self.ready_decodes: list[Sequence] = []
        self.ready_prompts: list[Sequence] = []
        self.background: list[Sequence] = []
        self.decoding = 0
        self.outstanding = 0
        lowest: float = math.inf
        for seq in holders:  # properties are written out, since this loop is most of a step with hundreds of sequences
            length, job = len(seq.tokens), seq.job
            decoding = seq.step_processed == length - 1 and length > seq.prompt_len
            if decoding:
                self.decoding += 1
            else:
                self.outstanding += outstanding(seq, pool, need)
            if seq.state is PAUSED and seq.scheduled < length:
                (self.ready_decodes if decoding else self.ready_prompts).append(seq)
            priority = job.request.priority
            if priority < 0:
                self.background.append(seq)
                priority = job.effective_priority
            if priority < lowest:
                lowest = priority
        self.lowest = lowest


def outstanding(seq: Sequence, pool: BlockPool, need: KvNeed) -> int:
    """Blocks that the rest of a started prompt needs."""
    return 0 if seq.decoding else need.rest(pool.rows_of(seq.table), seq.committed, len(seq.tokens))


class _Round:
    """One decision in progress: what is granted so far, and the memory that is left."""

    def __init__(
        self,
        pool: BlockPool,
        need: KvNeed,
        config: EngineConfig,
        held: Holders,
        rank: Callable[[Sequence], Urgency],
        reach: int,
    ) -> None:
        self.out = SchedulerOutput(longest=need.longest(reach))
        self.budget = 0
        self._pool = pool
        self._need = need
        self._reach = reach * pool.groups  # blocks
        self._config = config
        self._held = held
        self._rank = rank
        self._ranks = dict[int, Urgency]()
        self._free = pool.available
        self._granted: set[int] = set()
        self._gone: set[int] = set()
        self._released: set[int] = set()  # blocks freed by preemptions of this round
        self._running = len(held.all)
        self._promised = held.outstanding

    def urgency(self, seq: Sequence) -> Urgency:
        found = self._ranks.get(seq.seq_id)
        if found is None:
            found = self._ranks[seq.seq_id] = self._rank(seq)
        return found

    def may_admit(self) -> bool:
        return self.budget > 0 and self._running < self._config.max_sequences

    def preempt_for_priority(self, waiting: Iterator[Sequence]) -> None:
        """Preempt lower-priority sequences if that lets the most urgent waiting one in. Never preempts equals."""
        for newcomer in waiting:
            if newcomer.job.effective_priority <= self._held.lowest:
                return
            if self._fits_pool(newcomer) and not self._waits_for_first_output(newcomer):
                self._preempt_for(newcomer)
                return

    def _preempt_for(self, newcomer: Sequence) -> None:
        need, groups = self._need.whole(len(newcomer.tokens)), self._pool.groups
        free, running = self._free - self._promised, self._running
        victims: list[Sequence] = []
        below = (seq for seq in self._held.all if seq.job.effective_priority < newcomer.job.effective_priority)
        candidates = sorted(below, key=self.urgency)
        while free < need + running * groups or running >= self._config.max_sequences:
            if not candidates:
                return  # preempting all of them would not be enough
            victims.append(candidates.pop())
            free += len(self._pool.exclusive(victims[-1].table)) + self._outstanding(victims[-1])
            running -= 1
        for victim in victims:
            self._preempt(victim)

    def decode(self, seqs: Collection[Sequence]) -> None:
        """Grant a token to each of these. If there is memory for all, none is preempted, and there is little to decide."""
        if not self._gone:
            need = self.blocks_to_decode(seqs)
            if need <= self._free:
                self._free -= need
                self._granted.update([seq.seq_id for seq in seqs])
                self.out.grants += [Grant(seq, 1) for seq in seqs]
                return
        for seq in seqs:
            if seq.seq_id not in self._gone:
                need = self.blocks_to_decode((seq,))
                if self._make_room(need, seq):
                    self._grant(seq, 1, need)

    def blocks_to_decode(self, seqs: Collection[Sequence]) -> int:
        """Blocks that these must be given before the next token of each is computed."""
        size, groups = self._pool.block_size, self._pool.groups
        return groups * sum([1 for seq in seqs if seq.scheduled // size * groups >= len(seq.table)])

    def continue_prompt(self, seq: Sequence) -> None:
        """Grant the next chunk of a started prompt."""
        if seq.seq_id in self._gone or self.budget <= 0:
            return
        n = min(seq.remaining, self.budget)
        promised = self._outstanding(seq)
        need = self._blocks_to_continue(seq, n)
        if need > promised + self._spare:
            # memory is scarce: it gets what it was promised, and waits for its earlier chunks to release blocks
            n = min(n, self._need.room(seq.scheduled, seq.committed))
            if n <= 0:
                return
            need = self._blocks_to_continue(seq, n)
        if self._make_room(need, seq):
            self._grant(seq, n, need)
            self.budget -= n
            self._promised -= min(need, promised)

    def _blocks_to_continue(self, seq: Sequence, n: int) -> int:
        """Blocks that the next `n` tokens of a sequence need. A rewound one has kept its table."""
        return max(0, self._pool.rows_for(seq.scheduled + n) * self._pool.groups - len(seq.table))

    @property
    def _spare(self) -> int:
        """Blocks that are not promised to started prompts, and not in reserve: a row for each running sequence."""
        return self._free - self._promised - self._running * self._pool.groups

    def _outstanding(self, seq: Sequence) -> int:
        return outstanding(seq, self._pool, self._need)

    def admit(self, seq: Sequence) -> bool:
        """Admit a new prompt if all of it fits. False ends admission: no prompt overtakes one that waits for running ones to free
        memory. One that waits for memory of other origins is skipped, since nothing of ours holds it up."""
        if not self.may_admit():
            return False
        if self._waits_for_first_output(seq):
            return True
        pool = self._pool
        if not self._fits_pool(seq):
            if self._need.whole(seq.min_length) > self._reach:
                self.out.ignored.append(seq)
            return True
        if self._spare <= 0:
            return False  # at least one block is needed, whatever is cached
        hits = self._hits(seq)
        cached = pool.rows_of(hits)
        # a hit is free while another sequence holds the block
        taken = pool.count_idle(hits) + sum(map(self._released.__contains__, hits))
        rest = self._need.rest(cached, cached, len(seq.tokens))
        # the reserve is for running sequences, so that the new one is not preempted at once
        if self._spare < rest + taken:
            return False
        start = cached * pool.block_size
        n = min(len(seq.tokens) - start, self.budget, self._need.room(start, cached))
        new = pool.rows_for(start + n) * pool.groups - len(hits)
        now = new + taken
        self._promised += rest - new
        self._grant(seq, n, now, tuple(hits))
        self.budget -= n
        self._running += 1
        return True

    def drop_ignored_jobs(self) -> None:
        """Take back grants to jobs that fail this round because another of their outputs can never fit."""
        if self.out.ignored:
            ended = {seq.job for seq in self.out.ignored}
            self.out.grants = [grant for grant in self.out.grants if grant.seq.job not in ended]

    def _hits(self, seq: Sequence) -> list[int]:
        """Cached blocks of the prompt, without its last token, which must be computed for its logits."""
        if not self._config.prefix_cache or not seq.prefix_trusted or seq.wants_rows:
            return []
        full = (len(seq.tokens) - 1) // self._pool.block_size
        return self._pool.lookup(seq.chain.up_to(seq.tokens, full))

    def _make_room(self, need: int, seq: Sequence) -> bool:
        while self._free < need:
            victims = [v for v in self._held.all if v.seq_id not in self._granted and v.seq_id not in self._gone]
            victim = max(victims, key=self.urgency)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._gone.add(victim.seq_id)
        self.out.preempted.append(victim)
        released = self._pool.exclusive(victim.table)
        self._released.update(released)
        self._free += len(released)
        self._running -= 1
        self._promised -= self._outstanding(victim)

    def _grant(self, seq: Sequence, n: int, blocks: int, hits: tuple[int, ...] = ()) -> None:
        self._granted.add(seq.seq_id)
        self._free -= blocks
        self.out.grants.append(Grant(seq, n, hits))

    def _fits_pool(self, seq: Sequence) -> bool:
        return self._need.whole(seq.min_length) <= self._pool.capacity * self._pool.groups

    def _waits_for_first_output(self, seq: Sequence) -> bool:
        """Whether a further output of a job (n > 1) must wait for the first: to find its prompt in the cache, or because prompt
        logprobs are to be reported before any token."""
        first = seq.job.sequences[0]
        if seq is first or not (self._config.prefix_cache or first.wants_rows):
            return False
        return first.finish is None and not first.is_step_processing_complete
