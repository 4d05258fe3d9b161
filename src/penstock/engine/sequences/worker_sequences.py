"""WorkerSequenceManager: one route's sequences at a stage, as replicas without tokens, and their KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.domain.blocks import BlockPool
from penstock.domain.span import NetworkJob, Notice, NoticeKind, Span, Verdict, verdict_on

MAX_REPLICAS = 1 << 16  # of one route, whatever its origin sends


@dataclass(slots=True, eq=False)
class Replica:
    """What a stage knows of a sequence: the length of its KV, and its blocks."""

    incarnation: int
    attempt: int = 0
    kv_len: int = 0
    stage_processed: int = 0
    table: list[int] = field(default_factory=list)


class WorkerSequenceManager:
    """Follows the sequences of one route by its notices and Spans.

    pool: of this route alone, so that no origin can touch another's memory.
    spare: blocks granted to the origin that it does not use yet.
    give_back: takes the blocks that the origin gave up.
    """

    def __init__(self, pool: BlockPool, give_back: Callable[[list[int]], None] = lambda blocks: None) -> None:
        self.pool = pool
        self.spare = list[int]()
        self._give_back = give_back
        self.replicas: dict[int, Replica] = {}
        self._last_notice = self._newest_job = -1

    @property
    def granted(self) -> int:
        """Blocks that the origin may use."""
        return self.pool.capacity + len(self.spare)

    def on_schedule(self, job: NetworkJob) -> list[Verdict]:
        """Apply the notices of a NetworkJob, then its Spans. Returns a verdict for each Span."""
        self.on_notices(job.notices)
        late = job.number < self._newest_job
        self._newest_job = max(job.number, self._newest_job)
        # hold all prefixes before allocating anything, so that one Span cannot evict another's hits
        found = [self._open(span, late=late) for span in job.spans]
        return [self._write(span) if v is Verdict.APPEND else v for span, v in zip(job.spans, found, strict=True)]

    def on_notices(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            if notice.number <= self._last_notice:
                continue  # a duplicate
            self._last_notice = notice.number
            match notice.kind:
                case NoticeKind.STEP_COMPLETED:
                    self.on_step_completed(notice)
                case NoticeKind.PREEMPTED:
                    self.preempt_seq(notice)
                case NoticeKind.FREED:
                    self.free_seq(notice)
                case NoticeKind.RESIZED:
                    self.resize(notice.blocks)

    def on_stage_completed(self, spans: Iterable[Span]) -> None:
        for span in spans:
            replica = self.replicas.get(span.seq_id)
            if replica is not None and replica.incarnation == span.incarnation:
                replica.stage_processed = span.end

    def on_step_completed(self, notice: Notice) -> None:
        replica = self._current(notice)
        if replica is not None:
            full = replica.kv_len // self.pool.block_size
            for block, key in zip(replica.table[notice.first_block : full], notice.keys, strict=False):
                self.pool.commit(block, key)

    def preempt_seq(self, notice: Notice) -> None:
        """Drop the KV. The empty replica stays, so that Spans still on their way are recognised as stale."""
        replica = self._current(notice)
        if replica is not None:
            self._truncate(replica, 0)
            replica.incarnation = notice.incarnation + 1
            replica.attempt = 0

    def free_seq(self, notice: Notice) -> None:
        replica = self._current(notice)
        if replica is not None:
            self._truncate(replica, 0)
            del self.replicas[notice.seq_id]

    def resize(self, blocks: int) -> None:
        """Set the blocks that the origin uses, and give the rest back."""
        pool = self.pool
        if blocks < pool.capacity:
            self.spare += pool.shrink(min(pool.capacity - blocks, pool.available))
        else:
            more = min(blocks - pool.capacity, len(self.spare))
            pool.grow(self.spare[:more])
            del self.spare[:more]
        self._give_back(self.spare)
        self.spare = []

    def undo(self, span: Span) -> None:
        """Cut the KV back to before a Span that failed, so that whatever follows it is a gap."""
        replica = self.replicas.get(span.seq_id)
        if replica is not None and (replica.incarnation, replica.attempt) == (span.incarnation, span.attempt):
            self._truncate(replica, min(replica.kv_len, span.start_pos))

    def all_blocks(self) -> list[int]:
        """All blocks of the route, held or not."""
        return [*self.pool.blocks, *self.spare]

    def kv_len(self, span: Span) -> int:
        replica = self.replicas.get(span.seq_id)
        return 0 if replica is None or replica.incarnation != span.incarnation else replica.kv_len

    def table(self, span: Span) -> list[int]:
        return self.replicas[span.seq_id].table

    def _current(self, notice: Notice) -> Replica | None:
        replica = self.replicas.get(notice.seq_id)
        return replica if replica is not None and replica.incarnation <= notice.incarnation else None

    def _open(self, span: Span, *, late: bool) -> Verdict:
        """Find or create the replica of a Span, and bring it to the Span's incarnation and attempt."""
        replica = self.replicas.get(span.seq_id)
        if replica is None:
            if late:
                return Verdict.GAP  # its sequence may have been freed already: a new replica would leak
            if len(self.replicas) >= MAX_REPLICAS:
                return Verdict.MALFORMED
            replica = self.replicas[span.seq_id] = Replica(span.incarnation)
        if span.incarnation < replica.incarnation:
            return Verdict.STALE
        if span.incarnation > replica.incarnation:
            self._truncate(replica, 0)
            replica.incarnation, replica.attempt = span.incarnation, 0
        if span.attempt < replica.attempt:
            return Verdict.STALE
        if span.attempt > replica.attempt:
            replica.attempt = span.attempt
            self._truncate(replica, min(replica.kv_len, span.base))
        if span.keys and replica.kv_len == 0:
            self._take_prefix(replica, span)
        return verdict_on(replica.kv_len, span)

    def _take_prefix(self, replica: Replica, span: Span) -> None:
        for block in self.pool.lookup(span.keys):
            self.pool.share(block)
            replica.table.append(block)
        replica.kv_len = replica.stage_processed = len(replica.table) * self.pool.block_size

    def _write(self, span: Span) -> Verdict:
        replica, pool = self.replicas[span.seq_id], self.pool
        if replica.kv_len != span.start_pos:
            return verdict_on(replica.kv_len, span)  # the NetworkJob holds another Span of this sequence
        need = pool.blocks_for(span.end) - len(replica.table)
        if need > pool.available:
            return Verdict.NO_ROOM
        for _ in range(need):
            replica.table.append(pool.allocate())
        replica.kv_len = span.end
        return Verdict.APPEND

    def _truncate(self, replica: Replica, length: int) -> None:
        keep = self.pool.blocks_for(length)
        self.pool.release(replica.table[keep:])
        del replica.table[keep:]
        replica.kv_len = length
        replica.stage_processed = min(replica.stage_processed, length)
