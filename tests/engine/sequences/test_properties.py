"""The invariants of sequences, blocks and spans, over random arrivals, cancels, failures, memory pressure and policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableSequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from penstock.config.engine import POLICY_NAMES, EngineConfig
from penstock.domain.blocks import NULL_BLOCK, BlockPool
from penstock.domain.job import HOLDS_KV, QUEUED, TERMINAL, Job, Sequence
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import Embedded, FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, TokensOut
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.scheduling.scheduler import SchedulerOutput
from tests.engine.fakes import FakeSegment, Windows, embedding, finish, make_engine, make_job, oracle, own
from tests.examples import examples

configs = st.builds(
    EngineConfig,
    policy=st.sampled_from(POLICY_NAMES),
    chunk=st.integers(1, 12),
    idle_chunk=st.sampled_from([None, 1, 3, 40]),
    step_target=st.sampled_from([None, None, 0.02]),
    max_sequences=st.integers(1, 8),
    block_size=st.integers(1, 5),
    prefix_cache=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5]),
)
params = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 3]),
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 1]),
)
# few letters and a common beginning: prefixes are shared often
prompts = st.builds(
    lambda common, own: [1, 2, 3, 4, 5, 6, 7, 8][:common] + own,
    st.integers(0, 8),
    st.lists(st.integers(1, 3), min_size=1, max_size=14),
)
submissions = st.tuples(
    st.just("submit"),
    prompts,
    params,
    st.integers(-1, 1),
    st.sampled_from([None, 0.1, 5.0]),
    st.sampled_from([0, 0, 0, 1, 4, 99]),
)
events = st.lists(
    st.one_of(
        submissions,
        submissions,
        submissions,
        st.tuples(st.just("embed"), prompts, st.integers(-1, 1)),
        st.tuples(st.just("turn"), st.integers(1, 6)),
        st.tuples(st.just("turn"), st.integers(4, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("break"), st.integers(-9, 2)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    min_size=6,
    max_size=30,
)


@examples(
    few=50,
    many=100,
    config=configs,
    stages=st.integers(1, 3),
    blocks=st.integers(4, 20),
    sees=st.sampled_from([(None,), (None,), (1,), (4,), (9,), (None, 4), (4, None, 4), (3, 9, None)]),
    ahead=st.booleans(),
    script=events,
)
def test_every_job_gets_its_own_tokens_and_one_end_whatever_happens_around_it(
    config: EngineConfig, stages: int, blocks: int, sees: Windows, ahead: bool, script: list[tuple[object, ...]]
) -> None:
    world = World(config, stages, blocks, sees, ahead=ahead and stages == 1)
    for event, *details in script:
        getattr(world, event)(*details)
    world.finish()


def test_a_steady_step_that_fails_keeps_no_block() -> None:
    """Another job has its turn before those that took part in the failed step."""
    world = World(EngineConfig(chunk=1, max_sequences=1, block_size=1, prefix_cache=False), stages=1, blocks=4, sees=(None,))
    for length in (1, 2):
        world.submit([1], SamplingParams(temperature=0, max_tokens=length), 0, None, 0)
    world.turn(4)
    world.embed([1], priority=1)
    world.turn(6)
    world._break(0)
    world.finish()


class World:
    """An engine under observation: each turn is followed by a look at all invariants.

    sees: how many positions a token sees in each group of layers; None for all before it.
    ahead: steps begin before the tokens of those before are known.
    """

    def __init__(self, config: EngineConfig, stages: int, blocks: int, sees: Windows, *, ahead: bool = False) -> None:
        self.engine = make_engine(config, stages=stages, blocks=blocks, windows=sees, decodes=ahead)
        self.config, self.stages, self.passes, self.sees = config, stages, stages * len(sees), sees
        self.window = config.window or stages
        self.room = blocks * config.block_size
        self.jobs: list[tuple[Job, list[JobUpdate]]] = []
        self.disturbed: set[Job] = set()
        self.broke = False
        self.before: dict[int, tuple[int, int, int, int, int]] = {}
        self._watch_the_scheduler()

    # ---- what happens ----

    def submit(self, prompt: list[int], sampling: SamplingParams, priority: int, deadline: float | None, known: int) -> None:
        """`known` tokens of its answer were generated before, somewhere else."""
        prompt = prompt[: self.room - 1]  # longer ones are refused before they reach the engine
        room = self.room - len(prompt)
        job, updates = make_job(
            prompt,
            sampling,
            seed=len(self.jobs),
            arrival=float(len(self.jobs)),
            priority=priority,
            deadline=deadline,
            room=room,
        )
        if sampling.n == 1:
            right = oracle(prompt, sampling, stages=self.passes, seed=job.seed, room=job.max_tokens, windows=self.sees)
            job.request = replace(job.request, resume=right[:known])
        self._enter(job, updates)

    def embed(self, prompt: list[int], priority: int) -> None:
        """It may fill the memory to its last token."""
        arrival = float(len(self.jobs))
        self._enter(*make_job(prompt[: self.room], SamplingParams(), arrival=arrival, priority=priority, embed=True))

    def _enter(self, job: Job, updates: list[JobUpdate]) -> None:
        self.jobs.append((job, updates))
        self.engine.submit(job)
        self.engine.take_commands(wait=False)

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()
            self.check()

    def cancel(self, which: int) -> None:
        if which < len(self.jobs):
            self.disturbed.add(self.jobs[which][0])
            self.engine.cancel(self.jobs[which][0])
            self.engine.take_commands(wait=False)
            self.check()

    def leave(self, which: int) -> None:
        """The client goes away: its sink fails from now on."""
        if which < len(self.jobs):
            job = self.jobs[which][0]
            self.disturbed.add(job)

            def gone(update: JobUpdate) -> None:
                raise ConnectionError

            job.sink = gone

    def _break(self, which: int) -> None:
        if not 0 <= which < self.stages:
            return  # mostly nothing breaks
        self.broke = True
        segment = self.engine.pipe.segments[which]
        assert isinstance(segment, FakeSegment)
        segment.break_next = RuntimeError("out of memory")

    def finish(self) -> None:
        for _ in range(5000):
            if not self.engine.turn():
                break
            self.check()
        assert not self.engine.turn()
        assert not self.engine.sequences.queued
        assert not self.engine.sequences.holders
        assert len(self.engine._processor.visits) == 0
        assert self.engine.sequences.pool.held == 0
        for stage in self.engine.stages.values():
            assert own(stage).replicas == {}
            assert own(stage).pool.held == 0
        for job, updates in self.jobs:
            self.check_outcome(job, updates)

    # ---- what must hold ----

    def _watch_the_scheduler(self) -> None:
        assert isinstance(self.engine.origin, Origin)
        scheduler = self.engine.origin._scheduler
        schedule = scheduler.schedule

        def watched(*args: Any, **options: Any) -> SchedulerOutput:
            out = schedule(*args, **options)
            scheduled = [grant.seq for grant in out.grants]
            assert len(set(scheduled)) == len(scheduled), "a sequence once per batch"
            groups = [set(scheduled), set(out.preempted), set(out.ignored)]
            assert sum(map(len, groups)) == len(set().union(*groups)), "scheduled, preempted and ignored are disjoint"
            prefill = sum(grant.n for grant in out.grants if not grant.seq.decoding)
            if self.config.step_target is None:
                stalls = any(seq.decoding for seq in self.engine.sequences.holders.values()) or self.window > 1
                assert prefill <= (self.config.chunk if stalls else self.config.idle_chunk or 4 * self.config.chunk)
            return out

        scheduler.schedule = watched  # type: ignore[method-assign]

    def check(self) -> None:
        manager = self.engine.sequences
        for seq in manager.queued.values():
            assert seq.state in QUEUED
            assert not seq.table
        for seq in manager.holders.values():
            assert seq.state in HOLDS_KV
            self.check_cursors(seq)
            check_unseen(manager.pool, seq.table, seq.committed)
        check_pool(manager.pool, [seq.table for seq in manager.holders.values()])
        for stage in self.engine.stages.values():
            replicas = own(stage).replicas.values()
            check_pool(own(stage).pool, [replica.table for replica in replicas])
            for replica in replicas:
                assert self.is_length(own(stage).pool, replica.table, replica.kv_len)
                assert replica.kv_len >= replica.stage_processed >= replica.step_processed
                assert replica.state not in TERMINAL
        self.check_ledger()
        assert len(self.engine._processor.visits) <= self.window
        assert sum(job.promoted for job, _ in self.jobs if job.open) <= 1, "one at a time"
        for job, updates in self.jobs:
            assert job.priority < 0 or not job.promoted, "only background jobs are lifted"
            finals = [u for u in updates if isinstance(u, JobDone | JobFailed)]
            assert len(finals) <= 1
            if finals:
                assert updates[-1] is finals[0], "nothing comes after the end"
                assert all(seq.state in TERMINAL for seq in job.sequences)

    def check_ledger(self) -> None:
        """When the stages have heard of everything, they hold what the origin has counted."""
        manager = self.engine.sequences
        if manager.notices or self.engine.origin.in_flight or self.engine._processor.visits or self.broke:
            return
        for lease in map(own, self.engine.stages.values()):
            assert lease.pool.available == manager.pool.available
            for seq in manager.holders.values():
                table = lease.replicas[seq.seq_id].table
                assert [block == NULL_BLOCK for block in table] == [block == NULL_BLOCK for block in seq.table]

    def is_length(self, pool: BlockPool, table: MutableSequence[int], tokens: int) -> bool:
        """Whether a table has as many rows as it should; one token more may be on its way in a step that was begun ahead."""
        ahead = self.engine._processor._steady._early_step is not None
        return pool.rows_for(tokens) <= pool.rows_of(table) <= pool.rows_for(tokens + ahead)

    def check_cursors(self, seq: Sequence) -> None:
        stages = list(self.engine.stages.values())
        pool = self.engine.sequences.pool
        assert self.is_length(pool, seq.table, seq.scheduled)
        replicas = [own(stage).replicas.get(seq.seq_id) for stage in stages]
        here = [r if r is not None and r.incarnation == seq.incarnation and r.kv_len else None for r in replicas]
        done = [seq.base if r is None else r.stage_processed for r in here]  # the prefix counts before its Span arrives
        cursors = [seq.scheduled, seq.stage_processed, *done[1:], seq.step_processed]
        assert all(a >= b for a, b in zip(done, seq.stages_processed, strict=True)), (
            "the origin knows of nothing that was not done"
        )
        assert cursors == sorted(cursors, reverse=True), cursors
        assert seq.step_processed >= seq.base
        if seq.generated and seq.decoding:
            assert seq.in_flight <= 1, "one decode span in flight"
        anew = seq.incarnation == 0 and not seq.job.request.resume
        assert not (seq.generated and seq.step_processed < seq.prompt_len and anew), "no token before its prompt"
        now = (seq.incarnation, seq.attempt, seq.scheduled, seq.stage_processed, seq.step_processed)
        old = self.before.get(seq.seq_id)
        if old is not None and old[:2] == now[:2]:
            assert all(a <= b for a, b in zip(old, now, strict=True)), "cursors never go back within an attempt"
        self.before[seq.seq_id] = now

    def check_outcome(self, job: Job, updates: list[JobUpdate]) -> None:
        if not job.reachable:
            return
        final = updates[-1]
        assert isinstance(final, JobDone | JobFailed), "every accepted job ends"
        for seq in job.sequences:
            said = [token for u in updates if isinstance(u, TokensOut) and u.index == seq.index for token in u.token_ids]
            ends = [u for u in updates if isinstance(u, OutputFinished) and u.index == seq.index]
            assert len(ends) <= 1
            done = bool(ends) and ends[0].reason is not FinishReason.CANCELLED
            right: list[int] = []
            if job.request.embed:
                check_embedding(job, updates, self.passes, self.sees, done=done)
            else:
                room = job.max_tokens
                alone = {"stages": self.passes, "seed": job.seed, "output": seq.index, "room": room}
                right = oracle(job.prompt_ids, job.sampling, **alone, windows=self.sees)
            if done:
                assert said == right
            else:
                assert self.broke if isinstance(final, JobFailed) else job in self.disturbed
                assert said == right[: len(said)], "what was said before the end was right"


setattr(World, "break", World._break)


def check_embedding(job: Job, updates: list[JobUpdate], passes: int, windows: Windows, *, done: bool) -> None:
    """Every row of the prompt was counted once."""
    found = [update.vector for update in updates if isinstance(update, Embedded)]
    assert found == ([pytest.approx((embedding(job.prompt_ids, passes, windows),))] if done else [])


def check_unseen(pool: BlockPool, table: list[int], full: int) -> None:
    """What no token sees any more is held no longer, and everything else is."""
    for group in range(pool.groups):
        own, unseen = table[group :: pool.groups], pool.first_seen(full, group)
        assert [block == NULL_BLOCK for block in own] == [True] * unseen + [False] * (len(own) - unseen)


def check_pool(pool: BlockPool, tables: list[list[int]]) -> None:
    blocks = [block for table in tables for block in table if block != NULL_BLOCK]
    held = Counter(blocks)
    assert list(map(pool.refs, held)) == list(held.values())
    assert pool.available + len(held) == pool.capacity * pool.groups
    if len(held) < len(blocks):
        assert pool.prefix_cache, "no block in two tables without a cache"
        assert sum(len(set(table) - {NULL_BLOCK}) for table in tables) == len(blocks), "nor twice in one"


def test_the_oracle_notices_a_wrong_block() -> None:
    """The check itself can fail: a stage that reads one wrong block gives other tokens."""
    config = EngineConfig(block_size=2, prefix_cache=False)
    engine = make_engine(config, blocks=16)
    segment = engine.pipe.segments[0]
    assert isinstance(segment, FakeSegment)
    slot = segment._slot
    segment._slot = lambda table, position: slot(table, 0) if position == 3 else slot(table, position)  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    job, updates = make_job([5, 6, 7, 8, 9], sampling)
    engine.submit(job)
    finish(engine)
    said = [token for u in updates if isinstance(u, TokensOut) for token in u.token_ids]
    assert said != oracle([5, 6, 7, 8, 9], sampling, stages=1, seed=1)
