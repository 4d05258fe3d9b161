"""WorkerSequenceManager: one route's sequences at a stage, as replicas without tokens, and their KV blocks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.domain.blocks import BlockPool
from penstock.domain.job import FINISHED, PAUSED, RUNNING, WAITING, WAITING_PREEMPT, SequenceState
from penstock.domain.messages import MAX_POSITIONS
from penstock.domain.span import APPEND, NetworkJob, Notice, NoticeKind, Position, Span, Verdict, verdict_on
from penstock.engine.sequences.sequence_manager import SequenceManager, SequenceRef

MAX_REPLICAS = 1 << 16  # of one route, whatever its origin sends


@dataclass(slots=True, eq=False)
class Replica:
    """What a stage knows of a sequence: its state, the length of its KV, and its blocks.

    RUNNING while its Span is computed here, PAUSED between Spans, WAITING until the first one is accepted. Tokens below
    `stage_processed` have passed this stage. Tokens below `step_processed` have passed all, as far as the origin has said:
    notices count whole blocks.
    """

    incarnation: int
    state: SequenceState = WAITING
    attempt: int = 0
    kv_len: int = 0
    stage_processed: int = 0
    step_processed: int = 0
    table: array[int] = field(default_factory=lambda: array("q"))


class WorkerSequenceManager(SequenceManager[NetworkJob, Verdict, Notice]):
    """Follows the sequences of one route by its notices and Spans.

    pool: of this route alone, so that no origin can touch another's memory.
    spare: blocks granted to the origin that it does not use yet, for whole rows.
    give_back: takes the blocks that the origin gave up.
    context: how many tokens a sequence can have; None for any number.
    """

    def __init__(
        self, pool: BlockPool, give_back: Callable[[list[int]], None] = lambda blocks: None, context: int | None = None
    ) -> None:
        self.pool = pool
        self.spare = list[int]()
        self._give_back = give_back
        self._context = context
        self.replicas: dict[int, Replica] = {}
        self._last_notice = self._newest_job = -1
        self._unreported: dict[int, Position] = {}  # by sequence: prompts that passed this stage since the last report

    @property
    def granted(self) -> int:
        """Rows of blocks that the origin may use."""
        return self.pool.capacity + self.pool.rows_of(self.spare)

    def on_schedule(self, job: NetworkJob) -> list[Verdict]:
        """Apply the notices of a NetworkJob, then its Spans. Returns a verdict for each Span."""
        self.on_notices(job.notices)
        late = job.number < self._newest_job
        self._newest_job = max(job.number, self._newest_job)
        # hold all prefixes before allocating anything, so that one Span cannot evict another's hits
        found = [self._open(span, late=late) for span in job.spans]
        return [self._write(span) if v is APPEND else v for span, v in zip(job.spans, found, strict=True)]

    def on_notices(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            if notice.number <= self._last_notice:
                continue  # a duplicate
            self._last_notice = notice.number
            match notice.kind:
                case NoticeKind.STEP_COMPLETED:
                    self.on_step_completed([notice])
                case NoticeKind.PREEMPTED:
                    self.preempt_seq(notice)
                case NoticeKind.FREED:
                    self.free_seq(notice)
                case NoticeKind.RESIZED:
                    self.resize(notice.blocks)

    def on_stage_completed(self, passed: Iterable[Span | Position]) -> None:
        for span in passed:
            replica = self.replicas.get(span.seq_id)
            if replica is None or replica.incarnation != span.incarnation:
                continue
            end = span.end
            if end > replica.stage_processed + 1:  # one token is a decode, which returns to its origin at once
                self._unreported[span.seq_id] = Position(span.seq_id, span.incarnation, span.attempt, end)
            replica.stage_processed = end
            replica.state = PAUSED

    def take_progress(self) -> tuple[Position, ...]:
        """Return how far this stage is with each prompt that has advanced since the last call."""
        taken = tuple(self._unreported.values())[:MAX_POSITIONS]
        for position in taken:
            del self._unreported[position.seq_id]
        return taken

    def on_step_completed(self, steps: Iterable[Notice]) -> None:
        for notice in steps:
            replica = self._current(notice)
            if replica is None:
                continue
            size, groups = self.pool.block_size, self.pool.groups
            full = replica.kv_len // size
            self.pool.commit(replica.table[notice.first_block * groups : full * groups], notice.keys)
            done = min((notice.first_block + len(notice.keys)) * size, replica.stage_processed)
            replica.step_processed = max(replica.step_processed, done)
            self.pool.release_outside_window(replica.table, done // size)

    def on_decode_step(self, replicas: Iterable[Replica]) -> None:
        """Record that one more token of each of these passed this stage, like `on_schedule` and `on_stage_completed` for Spans of
        decodes. Those that need another block have it already."""
        for replica in replicas:
            replica.kv_len += 1
            replica.stage_processed = replica.kv_len

    def trim(self, replicas: Iterable[Replica]) -> None:
        """Take back blocks of these replicas for tokens that did not come."""
        for replica in replicas:
            self.pool.truncate(replica.table, self.pool.rows_for(replica.kv_len))

    def preempt_seq(self, ref: SequenceRef) -> None:
        """Drop the KV. The empty replica stays, so that Spans still on their way are recognised as stale."""
        replica = self._current(ref)
        if replica is not None:
            self._restart(replica, ref.incarnation + 1)
            self._unreported.pop(ref.seq_id, None)

    def free_seq(self, ref: SequenceRef) -> None:
        replica = self._current(ref)
        if replica is not None:
            self._truncate(replica, 0)
            replica.state = FINISHED
            del self.replicas[ref.seq_id]
            self._unreported.pop(ref.seq_id, None)

    def resize(self, blocks: int) -> None:
        """Set the rows of blocks that the origin uses, and give the rest back."""
        pool = self.pool
        if blocks < pool.capacity:
            self.spare += pool.shrink(min(pool.capacity - blocks, pool.available // pool.groups))
        else:
            more = min(blocks - pool.capacity, pool.rows_of(self.spare)) * pool.groups
            pool.grow(self.spare[:more])
            del self.spare[:more]
        self._give_back(self.spare)
        self.spare = []

    def undo(self, span: Span) -> None:
        """Cut the KV back to before a Span that failed, so that whatever follows it is a gap."""
        replica = self.replicas.get(span.seq_id)
        if replica is not None and (replica.incarnation, replica.attempt) == (span.incarnation, span.attempt):
            self._truncate(replica, min(replica.kv_len, span.start_pos))
            replica.state = PAUSED

    def all_blocks(self) -> list[int]:
        """All blocks of the route, held or not."""
        return [*self.pool.blocks, *self.spare]

    def kv_len(self, span: Span) -> int:
        replica = self.replicas.get(span.seq_id)
        return 0 if replica is None or replica.incarnation != span.incarnation else replica.kv_len

    def _current(self, ref: SequenceRef) -> Replica | None:
        replica = self.replicas.get(ref.seq_id)
        return replica if replica is not None and replica.incarnation <= ref.incarnation else None

    def _restart(self, replica: Replica, incarnation: int) -> None:
        self._truncate(replica, 0)
        replica.incarnation = incarnation
        replica.attempt = 0
        replica.state = WAITING_PREEMPT

    def _open(self, span: Span, *, late: bool) -> Verdict:
        """Find or create the replica of a Span, and bring it to the Span's incarnation and attempt."""
        replica = self.replicas.get(span.seq_id)
        if replica is not None and self._continues(replica, span):
            return APPEND
        if not self._is_possible(span):
            return Verdict.MALFORMED
        if replica is None:
            if late:
                return Verdict.GAP  # its sequence may have been freed already: a new replica would leak
            if len(self.replicas) >= MAX_REPLICAS:
                return Verdict.MALFORMED
            replica = self.replicas[span.seq_id] = Replica(span.incarnation)
        if span.incarnation < replica.incarnation:
            return Verdict.STALE
        if span.incarnation > replica.incarnation:
            self._restart(replica, span.incarnation)
        if span.attempt < replica.attempt:
            return Verdict.STALE
        if span.attempt > replica.attempt:
            replica.attempt = span.attempt
            self._truncate(replica, min(replica.kv_len, span.base))
            replica.step_processed = replica.stage_processed  # an attempt begins where the last step ended
        if span.keys and replica.kv_len == 0:
            self._take_prefix(replica, span)
        return verdict_on(replica.kv_len, span)

    def _continues(self, replica: Replica, span: Span) -> bool:
        """Whether a Span simply continues its sequence, as nearly all do."""
        _, incarnation, attempt, _, start, n, _, keys = span
        return (
            replica.kv_len == start
            and replica.attempt == attempt
            and replica.incarnation == incarnation
            and not keys
            and (self._context is None or start + n <= self._context)
        )

    def _is_possible(self, span: Span) -> bool:
        """Whether a Span is valid: the model has its positions, its prefix lies before it, and no key of the prefix is repeated
        (by repeating one block, a text could be far longer than what its origin has leased)."""
        if self._context is not None and span.end > self._context:
            return False
        keys = span.keys
        return not keys or (len(keys) * self.pool.block_size <= span.start_pos and len(set(keys)) == len(keys))

    def _take_prefix(self, replica: Replica, span: Span) -> None:
        found = self.pool.lookup(span.keys)
        self.pool.hold(found)
        replica.table.extend(found)
        length = self.pool.rows_of(replica.table) * self.pool.block_size
        replica.kv_len = replica.stage_processed = replica.step_processed = length

    def _write(self, span: Span) -> Verdict:
        replica, pool = self.replicas[span.seq_id], self.pool
        if replica.kv_len != span.start_pos:
            return verdict_on(replica.kv_len, span)  # the NetworkJob holds another Span of this sequence
        end = span.start_pos + span.n
        rows = pool.rows_for(end)
        if (more := rows * pool.groups - len(replica.table)) > 0:
            if more > pool.available:
                return Verdict.NO_ROOM
            pool.extend(replica.table, rows)
        replica.kv_len = end
        replica.state = RUNNING
        return APPEND

    def _truncate(self, replica: Replica, length: int) -> None:
        self.pool.truncate(replica.table, self.pool.rows_for(length))
        replica.kv_len = length
        replica.stage_processed = min(replica.stage_processed, length)
        replica.step_processed = min(replica.step_processed, length)
