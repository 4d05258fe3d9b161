"""SteadyDecode: steps in which every running sequence gets its next token on this node, and nothing else happens.

Most steps are like that where the whole model is local. They need no decision of the scheduler, no Spans and no NetworkJob: the
batch of the step before is one token further. What is kept between steps are columns: where each sequence is, and its blocks.

The general path, through Origin, JobProcessor and Stage, is the reference. This one takes the same steps with the same results,
and leaves any step that is special in some way to the general path: another sequence, an event, a lack of memory, a grammar, a
pass that fails.

Where the device can compute a whole step, from token to token, the next step starts before the host has read the tokens of this
one: the device takes them from its own memory, and the host does its part meanwhile. If a sequence turns out to have ended, its
row of that step is dropped; if anything else has happened, the whole step is dropped and repeated. What it has written lies
where the same tokens, or later owners of the blocks, write before they read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.domain.job import PAUSED, Job, Sequence
from penstock.engine.routing.host.route_host import HostedRoute, RoutePart
from penstock.engine.sequences.worker_sequences import Replica, WorkerSequenceManager
from penstock.engine.visit.answer_times import AnswerTimes
from penstock.engine.visit.head import Head
from penstock.engine.visit.job_context import JobContext
from penstock.model.batch import Batch, padded
from penstock.model.ends import StepDecoder
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import PendingSamples, Sample, sample

MAX_STEPS = 16  # in a row while others wait: then the scheduler looks at them again
SPARE_ROWS = 32  # of every table, so that columns need not be copied for every new block


class _StageColumns(NamedTuple):
    """The members at one stage.

    name: of its layers, for statistics.
    batch: the starts of all stages are one array.
    """

    name: str
    part: RoutePart
    lease: WorkerSequenceManager
    replicas: list[Replica]
    batch: Batch


class _EarlyStep(NamedTuple):
    """A step that was started before its turn. members: its rows that are left; None for all."""

    pending: PendingSamples
    members: list[int] | None = None


class SteadyDecode:
    """after_head: called with every job that got a token."""

    def __init__(self, context: JobContext, head: Head, times: AnswerTimes, after_head: Callable[[Job], None]) -> None:
        self._context = context
        self._head = head
        self._times = times
        self._after_head = after_head
        self._seqs: list[Sequence] = []
        self._rows: list[SampleRow] = []
        self._starts = np.empty(0, dtype=np.int64)  # the position of each member's newest token, which is computed next
        self._stages: list[_StageColumns] = []
        self._hosted: HostedRoute | None = None
        self._changes = -1  # `sequences.changes` for which the columns are valid
        self._steps = -1  # ... and `stats.steps`
        self._since_scheduled = 0
        self._early_step: _EarlyStep | None = None
        self._ended = 0.0  # when the last step did

    def step(self) -> bool:
        """Take a step for all running sequences. Returns False if this is not such a step; then nothing was done."""
        if not (self._is_current() or self._collect()):
            return False
        self._pass_on_notices()
        samples = None
        grown = self._growing(self._starts) if self._early_step is None else []  # a step that has begun has its blocks
        if self._take_blocks(grown, self._starts):
            with contextlib.suppress(Exception):  # the general path repeats it, and finds the cause
                samples = self._compute()
        if samples is None:
            self.forget()
            return False
        self._advance(samples)
        return True

    # ---- whether it is a steady step ----

    def _is_current(self) -> bool:
        """Whether the columns are still true, and the scheduler would decide as before."""
        context, sequences = self._context, self._context.sequences
        if self._changes != sequences.changes or self._steps != context.stats.steps:
            return False
        if sequences.queued:
            self._since_scheduled += 1
            if self._since_scheduled > MAX_STEPS:
                return False
        route = self._hosted
        if route is None or context.host.routes.get(route.id) is not route:
            return False
        return all(columns.part.stage.leases.get(route.id) is columns.lease for columns in self._stages)

    def _collect(self) -> bool:
        """Make the columns of all running sequences, if each of them can take a steady step."""
        context, origin, sequences = self._context, self._context.own_origin, self._context.sequences
        self.forget()
        route = origin.route
        if route is None or not route.is_local or origin.in_flight or origin.returned:
            return False
        if not sequences.holders or (sequences.queued and origin.steady_since != sequences.changes):
            return False
        if not all(map(_is_steady, sequences.holders.values())):
            return False
        hosted = context.host.routes.get(route.id)
        if hosted is None:
            return False
        if sequences.queued and self._since_scheduled > MAX_STEPS and self._steps == context.stats.steps:
            return False  # it is the scheduler's turn
        seqs = list(sequences.holders.values())
        rows = [row for row in map(self._head.sample_row, seqs) if row is not None]
        if len(rows) < len(seqs):
            return False
        starts = np.array([seq.step_processed for seq in seqs], dtype=np.int64)
        self._hosted = hosted
        self._pass_on_notices([part.stage.leases[route.id] for part in hosted.parts.values()])
        stages = []
        spare = SPARE_ROWS * sequences.pool.groups
        for _, part in sorted(hosted.parts.items()):
            lease = part.stage.leases[route.id]
            replicas = [lease.replicas.get(seq.seq_id) for seq in seqs]
            if not all(replica is not None and _agree(seq, replica) for seq, replica in zip(seqs, replicas, strict=True)):
                return False
            found = [replica for replica in replicas if replica is not None]
            batch = Batch(starts, np.ones(len(seqs), dtype=np.int64), padded([one.table for one in found], spare))
            stages.append(_StageColumns(part.stage.name, part, lease, found, batch))
        self._seqs, self._rows, self._starts, self._stages = seqs, rows, starts, stages
        self._changes, self._steps, self._since_scheduled = sequences.changes, context.stats.steps, 0
        return True

    def forget(self) -> None:
        """Let go of the sequences, which may have ended, and of blocks for steps that failed or are no longer wanted: it may be
        long until the sequences that took them run again."""
        if self._seqs:  # on a node without the model's ends there are none
            self._context.sequences.trim(self._seqs)
        for columns in self._stages:
            columns.lease.trim(columns.replicas)
        self._seqs, self._rows, self._stages, self._hosted, self._changes, self._early_step = [], [], [], None, -1, None

    # ---- the step ----

    def _pass_on_notices(self, leases: list[WorkerSequenceManager] | None = None) -> None:
        """Do at once what a NetworkJob does with the notices it carries."""
        sequences = self._context.sequences
        if sequences.has_new_notices:
            notices = sequences.take_notices()
            for lease in leases or [columns.lease for columns in self._stages]:
                lease.on_notices(notices)
            self._context.own_origin.acknowledge(notices[-1].number)

    def _growing(self, starts: np.ndarray) -> list[int]:
        """The members whose token at these positions begins a block."""
        found: list[int] = np.flatnonzero(starts % self._context.config.block_size == 0).tolist()
        return found

    def _take_blocks(self, grown: list[int], starts: np.ndarray) -> bool:
        """Give a block to each of these members for the token at its start, unless it still has one from a step that could not
        be started early. Returns False if there are not enough."""
        sequences, size = self._context.sequences, self._context.config.block_size
        grown = [i for i in grown if sequences.pool.rows_of(self._seqs[i].table) <= starts[i] // size]
        if not grown:
            return True
        pools = [sequences.pool, *(columns.lease.pool for columns in self._stages)]
        if any(pool.available < len(grown) * pool.groups for pool in pools):
            return False
        entries = (int(starts[grown].max()) // size + 1) * sequences.pool.groups
        if any(entries > columns.batch.tables.shape[1] for columns in self._stages):
            return False  # the tables are full: they are made anew
        sequences.take_blocks([self._seqs[i] for i in grown])
        for columns in self._stages:
            pool = columns.lease.pool
            for i in grown:
                table = columns.replicas[i].table
                old = len(table)
                pool.extend(table, pool.rows_of(table) + 1)
                columns.batch.tables[i, old : len(table)] = table[old:]
        return True

    def _compute(self) -> list[Sample] | None:
        """Sample the next token of every member. None if some hidden state is not finite."""
        context, ends, clock = self._context, self._context.own_end_model, self._context.clock
        decoder = ends.decoder([columns.part.stage.segment for columns in self._stages])
        if decoder is not None and decoder.fits(self._stages[0].batch):
            return self._compute_whole(decoder)
        began = clock()
        hidden: Tensor = ends.compute_embed([seq.tokens[-1] for seq in self._seqs])
        embedded = at = clock()
        services = []
        for columns in self._stages:
            stage, layers = columns.part
            with context.heartbeat.in_pass(stage.expected_decode_seconds(columns.batch)):
                computed = stage.decode(hidden, columns.batch, layers)
            if computed is None:
                return None
            hidden, before, at = computed, at, clock()
            services.append(at - before)
        with context.heartbeat.in_pass(self._head.expected_seconds(len(self._seqs))):
            samples = sample(ends.compute_head(ends.compute_norm(hidden)), self._rows, ends.picker)
        done = clock()
        self._observe(embedded - began, services, done - at)
        return samples

    def _compute_whole(self, decoder: StepDecoder) -> list[Sample] | None:
        """`_compute` with a decoder that takes whole steps through all segments, from token to token."""
        context, clock, stages = self._context, self._context.clock, self._stages
        ahead, self._early_step = self._early_step, None
        began = clock() if ahead is None else self._ended
        if ahead is None:
            batches = [columns.batch for columns in stages]
            ahead = _EarlyStep(decoder.launch(batches, [seq.tokens[-1] for seq in self._seqs], self._rows))
        if ahead.members is None:
            self._early_step = self._launch_next_early(decoder)
        with context.heartbeat.in_pass(sum(columns.part.stage.expected_decode_seconds(columns.batch) for columns in stages)):
            samples = ahead.pending.wait()
        if ahead.members is not None:
            samples = [samples[i] for i in ahead.members]
        if any(one.token_id < 0 for one in samples):
            return None
        self._ended = clock()
        each = (self._ended - began) / sum(columns.part.layers.size for columns in stages)  # of a layer
        services = [each * columns.part.layers.size for columns in stages]
        for columns, took in zip(stages, services, strict=True):
            columns.part.stage.observe_decode(columns.batch, columns.part.layers, took)
        self._observe(0.0, services, 0.0)
        return samples

    def _launch_next_early(self, decoder: StepDecoder) -> _EarlyStep | None:
        """Start the step after this one, with the tokens that this one chooses. None if the host must know these first."""
        if self._context.sequences.queued and self._since_scheduled >= MAX_STEPS:
            return None  # it is the scheduler's turn
        if not decoder.can_launch_early(self._rows) or any(seq.generated + 1 >= seq.job.max_tokens for seq in self._seqs):
            return None
        starts = self._starts + 1
        batches = [Batch(starts, columns.batch.counts, columns.batch.tables) for columns in self._stages]
        if not decoder.fits(batches[0]) or not self._take_blocks(self._growing(starts), starts):
            return None
        with contextlib.suppress(Exception):  # an error shows up again when it is this step's turn
            return _EarlyStep(decoder.launch(batches, None, self._rows))
        return None

    def _advance(self, samples: list[Sample]) -> None:
        """Record the new tokens, here and at the stages."""
        context, sequences = self._context, self._context.sequences
        for columns in self._stages:
            columns.lease.on_decode_step(columns.replicas)
        self._starts += 1
        context.stats.generated_tokens += len(samples)  # before clients know of them
        all_go_on = sequences.on_decode_step(self._seqs, samples)
        context.own_origin.on_progress(self._seqs)
        if not all_go_on:
            for job in {seq.job for seq in self._seqs}:
                self._after_head(job)
            self._drop_ended()

    def _drop_ended(self) -> None:
        """Continue with the members that are left, unless others wait for the memory that the ended ones held."""
        sequences = self._context.sequences
        keep = [i for i, seq in enumerate(self._seqs) if seq.state is PAUSED]
        if sequences.queued or not keep or len(keep) != len(sequences.holders):
            self.forget()
            return
        if self._early_step is not None:
            self._early_step = self._early_step._replace(members=keep)
        self._seqs, self._rows = [self._seqs[i] for i in keep], [self._rows[i] for i in keep]
        self._starts = self._starts[keep]
        self._stages = [
            columns._replace(
                replicas=[columns.replicas[i] for i in keep],
                batch=Batch(self._starts, columns.batch.counts[: len(keep)], columns.batch.tables[keep]),
            )
            for columns in self._stages
        ]
        self._changes = sequences.changes

    def _observe(self, embedding: float, services: list[float], head: float) -> None:
        context, rows = self._context, len(self._seqs)
        stats, took = context.stats, embedding + sum(services) + head
        for columns, seconds in zip(self._stages, services, strict=True):
            stats.stages[columns.name] = stats.stages.get(columns.name, 0.0) + seconds
        stats.compute += took
        stats.steps += 1
        self._steps = stats.steps
        context.predictor.observe(rows, int(self._starts.sum()) + rows, took, 0.0)
        self._head.observe(rows, head)
        self._times.record_decode_step(self._seqs, embedding, services, head)


def _is_steady(seq: Sequence) -> bool:
    return (
        seq.state is PAUSED
        and seq.decoding
        and seq.constraint is None
        and not seq.in_flight
        and seq.generated >= seq.job.sampling.min_tokens
        and seq.job.reachable
    )


def _agree(seq: Sequence, replica: Replica) -> bool:
    """Whether a stage is as far as the origin thinks: its next Span would be appended."""
    return (
        (replica.incarnation, replica.attempt) == (seq.incarnation, seq.attempt)
        and replica.kv_len == seq.step_processed
        and len(replica.table) == len(seq.table)
    )
