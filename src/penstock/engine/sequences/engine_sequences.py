"""EngineSequenceManager: owns the sequences of this origin. All changes to sequences happen here.

It counts the blocks that sequences hold at the stages in a pool of its own, which takes the same steps in the same
order as theirs. Stages learn of changes from numbered notices that travel with the next NetworkJob, clients from its Answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from penstock.domain.blocks import BlockPool, KeyChain
from penstock.domain.constraint import Constraint
from penstock.domain.job import (
    FINISHED,
    HOLDS_KV,
    IGNORED,
    PAUSED,
    RUNNING,
    TERMINAL,
    WAITING_PREEMPT,
    Job,
    Sequence,
    SequenceState,
)
from penstock.domain.span import Notice, NoticeKind, Position, Span
from penstock.domain.updates import (
    FinishReason,
    PrefillProgress,
    PromptLogprobs,
    TokenLogprob,
)
from penstock.engine.scheduling.scheduler import SchedulerOutput
from penstock.engine.scheduling.waiting_queue import WaitingQueue
from penstock.engine.sequences.answers import Answers
from penstock.engine.sequences.output_text import AcceptedToken, TextStreams, check_end, mask_of_end
from penstock.engine.sequences.sequence_manager import SequenceManager, SequenceRef
from penstock.errors import ComputeFailed, NotReady, PenstockError, PromptTooLong
from penstock.model.sampling.sampler import Sample
from penstock.stats import EngineStats


class Step(NamedTuple):
    """A Span that passed all stages, with what was computed from its rows.

    token_id, logprob: the sampled token, if the Span reached the end of its sequence.
    prompt_logprobs: of the prompt's own tokens, if requested.
    row_sum: the sum of its rows in fp64, for an embedding.
    """

    span: Span
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: PromptLogprobs | None = None
    row_sum: np.ndarray | None = None


class EngineSequenceManager(SequenceManager[SchedulerOutput, Span, Step]):
    def __init__(
        self,
        pool: BlockPool,
        *,
        eos_ids: frozenset[int],
        text_stream: TextStreams,
        secret: bytes,
        stats: EngineStats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self._stats = stats or EngineStats()
        self.answers = Answers(eos_ids, text_stream, self._stats, clock)
        self._next_block = pool.capacity * pool.groups + 1
        self._stages = 1  # of the route
        self.queued = WaitingQueue()  # WAITING, WAITING_PREEMPT
        self.holders: dict[int, Sequence] = {}  # RUNNING, PAUSED
        self.notices: list[Notice] = []  # that stages may not have received yet
        self.preemptions = 0
        self.changes = 0  # counts changes of which sequences there are and what they hold, other than new tokens
        self._secret = secret
        self._clock = clock
        self._next_seq = 0
        self._next_notice = 0
        self._sent_notice = -1

    def add(self, job: Job) -> None:
        """Queue a job: a WAITING sequence for each of its `n` outputs, or a WAITING_PREEMPT one for an answer that is resumed."""
        self.changes += 1
        sampling, make_constraint = job.sampling, job.request.constraint
        for index in range(sampling.n):
            chain = self._new_chain(job) if job.chain is None else job.chain.fork()
            seq = Sequence(self._next_seq, job, index, list(job.prompt_ids), chain)
            seq.constraint = None if make_constraint is None else make_constraint()
            self._next_seq += 1
            self.answers.open(seq)
            self.queued[seq.seq_id] = seq
            job.sequences.append(seq)
            if job.request.resume:
                seq.state = WAITING_PREEMPT  # its KV was lost with the server that generated them
                self._resume(seq)

    def hash_prompt(self, job: Job) -> None:
        """Compute the keys of a prompt's blocks before the job is added; on any thread, since a long prompt has thousands."""
        if self.pool.prefix_cache:
            job.chain = self._new_chain(job)
            job.chain.up_to(job.prompt_ids, len(job.prompt_ids) // self.pool.block_size)

    def _new_chain(self, job: Job) -> KeyChain:
        return KeyChain(self._secret, self.pool.block_size, job.request.owner)

    def get(self, span: Span | Position) -> Sequence | None:
        """The sequence of a Span. None if it has ended, or the Span is of an older incarnation or attempt."""
        seq = self.holders.get(span.seq_id)
        current = seq is not None and seq.incarnation == span.incarnation and seq.attempt == span.attempt
        return seq if current else None

    def use(self, pool: BlockPool, stages: int = 1) -> None:
        """Switch to the pool of a new route, whose stages know nothing yet."""
        self.changes += 1
        assert not self.holders
        self.pool, self._next_block, self._stages = pool, pool.capacity * pool.groups + 1, stages
        self.notices, self._next_notice, self._sent_notice = [], 0, -1
        self._notify(NoticeKind.RESIZED, blocks=pool.capacity)

    def resize(self, blocks: int) -> None:
        """Use this many rows of blocks from now on, here and at the stages. Those that are given up must be free."""
        self.changes += 1
        pool = self.pool
        if blocks < pool.capacity:
            pool.shrink(pool.capacity - blocks)
        else:
            more = (blocks - pool.capacity) * pool.groups
            pool.grow(range(self._next_block, self._next_block + more))
            self._next_block += more
        self._notify(NoticeKind.RESIZED, blocks=blocks)

    # ---- the events ----

    def on_schedule(self, output: SchedulerOutput) -> list[Span]:
        """Apply a decision: promote, preempt and ignore, then turn the grants into Spans."""
        if output.promoted is not None:
            output.promoted.promoted = True
            self.queued.refile(output.promoted)
        for seq in output.preempted:
            self.preempt_seq(seq)
        for seq in output.ignored:
            if not seq.job.open:
                continue  # it failed with another of its outputs
            limit = output.longest
            if seq.state is WAITING_PREEMPT:  # it was admitted when there was more memory
                self.fail(
                    seq.job,
                    NotReady(
                        f"Prompt and answer have {len(seq.tokens)} tokens so far, but the remaining KV memory holds {limit}.",
                        hint="Restart the nodes that left, or give the others more KV memory (kv_memory).",
                    ),
                )
                continue
            self._end(seq, IGNORED)
            self.fail(
                seq.job,
                PromptTooLong(
                    f"The prompt has {seq.prompt_len} tokens, but the KV memory holds {limit}.",
                    tokens=seq.prompt_len,
                    limit=limit,
                    field="prompt",
                    hint="Shorten it, or give the node more KV memory (kv_memory).",
                ),
            )
        admitted = [grant for grant in output.grants if grant.seq.state not in HOLDS_KV]
        for grant in admitted:
            self._take_prefix(grant.seq, grant.hits)
        return [self._span(grant.seq, grant.n) for grant in output.grants]

    def on_stage_completed(self, passed: Iterable[Span | Position], stage: int = 0) -> None:
        """Record that Spans passed a stage of the route, and so all before it."""
        for span in passed:
            seq = self.get(span)
            if seq is None:
                continue
            cursors, end = seq.stages_processed, span.end
            if cursors[stage] >= end:
                continue
            for passed_stage in range(stage, -1, -1):
                if cursors[passed_stage] < end:
                    cursors[passed_stage] = end
            # a preempted sequence computes its generated tokens again too
            done = seq.prompt_len if seq.prompt_stage_processing_finished else seq.stage_processed
            if seq.index == 0 and seq.job.prefilled < done:
                seq.job.prefilled = done
                seq.job.last_update = self._clock()
                seq.job.emit(PrefillProgress(done, seq.prompt_len))

    def on_step_completed(self, steps: Iterable[Step]) -> None:
        """Record that Spans passed all stages. Only here are tokens appended, stops detected and text produced."""
        now = self._clock()
        for step in steps:
            seq, end = self.get(step.span), step.span.end
            if seq is None:
                continue  # cancelled or preempted since
            seq.job.last_update = now
            seq.in_flight -= 1
            if end <= seq.step_processed:
                continue  # a later chunk of its prompt returned first
            if seq.wants_rows and end - step.span.rows > seq.job.rows_returned:
                self.rewind_seq(seq)  # rows must be used in order, and an earlier chunk is missing
                continue
            seq.step_processed = end
            if end > seq.furthest:
                seq.furthest, seq.refused = end, 0
            self._commit(seq)
            if step.prompt_logprobs is not None:
                seq.job.rows_returned = end
                seq.job.emit(step.prompt_logprobs)
            if step.row_sum is not None and self.answers.add_rows(seq, step.span, step.row_sum):
                self.free_seq(seq, FinishReason.STOP)
            if step.token_id is None:
                continue
            seq.move(PAUSED)
            self._generate(seq, step.token_id, step.logprob, now)

    def take_blocks(self, seqs: Iterable[Sequence]) -> None:
        """Give each of these sequences one more row of blocks."""
        for seq in seqs:
            self.pool.extend(seq.table, self.pool.rows_of(seq.table) + 1)

    def trim(self, seqs: Iterable[Sequence]) -> None:
        """Take back blocks of these sequences for tokens that were not granted."""
        for seq in seqs:
            self.pool.truncate(seq.table, self.pool.rows_for(seq.scheduled))

    def on_decode_step(self, seqs: Iterable[Sequence], samples: Iterable[Sample]) -> bool:
        """Record the next token of each of these sequences, which are decoding: what `on_schedule`, `on_stage_completed` and
        `on_step_completed` do for Spans that pass all stages without an event in between.

        Returns whether all of them go on: none has ended, and all clients have taken their updates.
        """
        now, stages, block_size = self._clock(), self._stages, self.pool.block_size
        changes, reachable = self.changes, True
        for seq, (token_id, logprob) in zip(seqs, samples, strict=True):
            if seq.state is not PAUSED:
                continue  # its job has failed with another of its outputs
            end = len(seq.tokens)
            seq.scheduled = seq.step_processed = end
            seq.stages_processed = [end] * stages
            if end > seq.furthest:
                seq.furthest, seq.refused = end, 0
            seq.job.last_update = now
            if end % block_size == 0:
                self._commit(seq)
            self._generate(seq, token_id, logprob, now)
            reachable = reachable and seq.job.reachable
        return reachable and changes == self.changes

    def preempt_seq(self, ref: SequenceRef) -> None:
        """Drop the KV. Prompt and generated tokens are computed again later; no update is repeated."""
        seq = self.holders.get(ref.seq_id)
        if seq is None or seq.incarnation > ref.incarnation:
            return
        self._notify(NoticeKind.PREEMPTED, seq)
        seq.move(WAITING_PREEMPT)
        self._drop_kv(seq)
        seq.incarnation += 1
        seq.attempt = seq.base = 0
        seq.job.preemptions += 1
        self.preemptions += 1
        del self.holders[seq.seq_id]
        self.queued[seq.seq_id] = seq

    def rewind_seq(self, seq: Sequence) -> None:
        """Go back to the last token that passed all stages, because Spans were lost or a grammar is late. The rest is granted
        again. The table keeps its blocks, since they are needed at once."""
        assert seq.state in HOLDS_KV
        self.changes += 1
        seq.attempt += 1
        seq.base = seq.scheduled = seq.step_processed
        seq.stages_processed = [seq.step_processed] * self._stages
        seq.in_flight = 0
        if seq.state is RUNNING:
            seq.move(PAUSED)

    def free_seq(
        self, ref: SequenceRef, reason: FinishReason = FinishReason.CANCELLED, stop_reason: str | int | None = None
    ) -> None:
        """End a sequence: free its memory and tell the client."""
        seq = self.holders.get(ref.seq_id) or self.queued.get(ref.seq_id)
        if seq is None or seq.incarnation > ref.incarnation:
            return
        job = seq.job
        if reason is FinishReason.CANCELLED:
            self.answers.send_rest(seq)
        seq.finish = reason
        self._end(seq, FINISHED)
        self.answers.send_end(seq, reason, stop_reason)
        if job.open and all(s.state in TERMINAL for s in job.sequences):
            self.answers.send_done(job)

    def end_if_complete(self, seq: Sequence, constraint: Constraint, mask: np.ndarray) -> bool:
        """End an output whose constraint was late: its text is complete, or it is not but max_tokens is used up, or a resumed
        output may end as it did. Raises if that one may not."""
        if seq.pending_end is not None:
            check_end(seq, constraint, mask)
            self.free_seq(seq, *seq.pending_end)
            return True
        if not constraint.complete and seq.generated < seq.job.max_tokens:
            return False
        reason = FinishReason.STOP if constraint.complete else FinishReason.LENGTH
        stop = self.answers.send_rest(seq)
        self.free_seq(seq, reason if stop is None else FinishReason.STOP, stop)
        return True

    # ---- whole jobs ----

    def fail(self, job: Job, error: PenstockError) -> None:
        """Fail a job, whatever its sequences are doing."""
        if not job.open:
            return
        job.open = False
        for seq in job.sequences:
            if seq.state not in TERMINAL:
                seq.finish = FinishReason.CANCELLED
                self._end(seq, FINISHED)
        self.answers.send_failed(job, error)

    def cancel(self, job: Job) -> None:
        for seq in list(job.sequences):
            self.free_seq(seq, FinishReason.CANCELLED)

    @property
    def newest_notice(self) -> int:
        return self._next_notice - 1

    @property
    def has_new_notices(self) -> bool:
        """Whether there are notices that no NetworkJob has carried yet."""
        return self._sent_notice < self._next_notice - 1

    def take_notices(self) -> list[Notice]:
        """All notices not acknowledged yet: repeating them is cheap, and none can be lost."""
        self._sent_notice = self._next_notice - 1
        return list(self.notices)

    def acknowledge(self, number: int) -> None:
        """Forget the notices up to this number: every stage has them."""
        self.notices = [notice for notice in self.notices if notice.number > number]

    def resend_notices(self) -> None:
        """Send the unacknowledged notices again, because a NetworkJob was lost."""
        self._sent_notice = self.notices[0].number - 1 if self.notices else self._next_notice - 1

    # ---- inside ----

    def _take_prefix(self, seq: Sequence, hits: Iterable[int]) -> None:
        self.changes += 1
        found = list(hits)
        self.pool.hold(found)
        seq.table += found
        seq.committed = self.pool.rows_of(seq.table)
        length = seq.committed * self.pool.block_size
        seq.scheduled = seq.step_processed = seq.base = seq.prefix = length
        seq.stages_processed = [length] * self._stages
        job = seq.job
        if seq.incarnation == 0 and seq.index == 0:
            job.cached_tokens = min(length, seq.prompt_len)
        self._stats.cached_tokens += length
        if job.first_grant is None:
            job.first_grant = self._clock()
            self._stats.queue_time.observe(job.first_grant - job.arrival)
        del self.queued[seq.seq_id]
        self.holders[seq.seq_id] = seq

    def _span(self, seq: Sequence, n: int) -> Span:
        start = seq.scheduled
        # until a Span has returned, a stage may have missed the first one, so each Span names the prefix
        first = seq.step_processed == start == seq.prefix
        keys = tuple(seq.chain.up_to(seq.tokens, seq.prefix // self.pool.block_size)) if first else ()
        last = seq.remaining == n
        rows = max(0, min(n, start + n - seq.job.rows_returned)) if seq.wants_rows else int(last)
        self.pool.extend(seq.table, self.pool.rows_for(start + n))
        seq.scheduled += n
        seq.in_flight += 1
        seq.move(RUNNING)
        if not last:
            seq.move(PAUSED)  # the next chunk of a prompt does not wait for this one
        return Span(seq.seq_id, seq.incarnation, seq.attempt, seq.base, start, n, rows, keys)

    def _commit(self, seq: Sequence) -> None:
        """Tell the stages which full blocks passed all of them. With a prefix cache, these are shared from now on; those behind
        the window of their layers are released."""
        pool = self.pool
        full = seq.step_processed // pool.block_size
        if full <= seq.committed:
            return
        keys = seq.chain.up_to(seq.tokens, full)[seq.committed :] if pool.prefix_cache else []
        pool.commit(seq.table[seq.committed * pool.groups : full * pool.groups], keys)
        pool.release_outside_window(seq.table, full)
        self._notify(NoticeKind.STEP_COMPLETED, seq, *keys, first=full - len(keys))
        seq.committed = full

    def _generate(self, seq: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> None:
        try:
            seq.tokens.append(token_id)
            self._go_on(seq, self.answers.send_token(seq, logprob, now))
        except PenstockError as error:
            self.fail(seq.job, error)
        except Exception as error:  # one broken answer must not affect the others
            self.fail(seq.job, ComputeFailed(f"The answer could not be decoded into text: {error}."))

    def _resume(self, seq: Sequence) -> None:
        """Append the tokens generated before, up to one that ends the output."""
        pieces, accepted = list[str](), None
        for token_id in seq.job.request.resume:
            seq.tokens.append(token_id)
            accepted = self.answers.replay(seq)
            pieces.append(accepted.text)
            if accepted.reason is not None or seq.generated >= seq.job.max_tokens:
                break  # max_tokens without a reason: its constraint was late
        if accepted is not None and accepted.reason is not None and accepted.unseen and seq.constraint is not None:
            mask = mask_of_end(seq, seq.constraint)
            if mask is None:
                seq.pending_end, accepted = (accepted.reason, accepted.stop_reason), None
            else:
                check_end(seq, seq.constraint, mask)
        self.answers.send_replayed(seq, "".join(pieces))
        self._go_on(seq, accepted)

    def _go_on(self, seq: Sequence, accepted: AcceptedToken | None) -> None:
        """End the output if it is complete; otherwise let its grammar prepare the next token."""
        if accepted is not None and accepted.reason is not None:
            self.free_seq(seq, accepted.reason, accepted.stop_reason)
        elif seq.constraint is not None:
            seq.constraint.prefetch()  # while the layers run

    def _end(self, seq: Sequence, state: SequenceState) -> None:
        if seq.state in HOLDS_KV:
            self._notify(NoticeKind.FREED, seq)
            self._drop_kv(seq)
            del self.holders[seq.seq_id]
        else:
            if seq.incarnation:
                self._notify(NoticeKind.FREED, seq)
            del self.queued[seq.seq_id]
        seq.move(state)
        self.answers.close(seq)

    def _drop_kv(self, seq: Sequence) -> None:
        self.changes += 1
        self.pool.release(seq.table)
        seq.table = []
        seq.scheduled = seq.step_processed = seq.committed = seq.in_flight = 0
        seq.stages_processed = [0]

    def _notify(self, kind: NoticeKind, seq: Sequence | None = None, *block_keys: bytes, first: int = 0, blocks: int = 0) -> None:
        seq_id, incarnation = (0, 0) if seq is None else (seq.seq_id, seq.incarnation)
        self.notices.append(Notice(self._next_notice, kind, seq_id, incarnation, first, block_keys, blocks))
        self._next_notice += 1
