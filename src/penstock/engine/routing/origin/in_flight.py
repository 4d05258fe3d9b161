"""InFlightJobs: the NetworkJobs that an origin has sent, and what becomes of their sequences when one is lost or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.domain.job import Sequence
from penstock.domain.span import Refusal, Span, Verdict
from penstock.engine.routing.origin.route_opener import ActiveRoute
from penstock.engine.routing.origin.track_record import REFUSAL_WEIGHT, Consequence, TrackRecord, count_refusal
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.errors import ComputeFailed
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.route")


@dataclass(slots=True)
class InFlight:
    spans: tuple[Span, ...]
    tokens: int
    sent: float
    notice: int  # number of the newest notice it carries
    embedding: float = 0.0  # seconds that its tokens took to embed
    returned: bool = False  # it is back, and waits for the compute thread

    def includes(self, spans: list[Span]) -> bool:
        """Whether all of these Spans were sent with it, and none is listed twice."""
        if tuple(spans) == self.spans:
            return True  # as nearly always
        found = set(spans)
        return len(found) == len(spans) and found <= set(self.spans)


class InFlightJobs:
    """avoid: given a node, gives up the route if it passes that node and there is another path. Returns whether it did.

    sent: by number; returned: those that came back and are not sampled from yet, with their trip's seconds.
    """

    def __init__(
        self,
        sequences: EngineSequenceManager,
        record: TrackRecord,
        stats: EngineStats,
        clock: Callable[[], float],
        avoid: Callable[[str], bool],
    ) -> None:
        self.sent: dict[int, InFlight] = {}
        self.returned: dict[int, float] = {}
        self._sequences = sequences
        self._record = record
        self._stats = stats
        self._clock = clock
        self._avoid = avoid

    def clear(self) -> None:
        self.sent.clear()
        self.returned.clear()

    def lose(self, number: int, route: ActiveRoute | None) -> None:
        """Give a NetworkJob up: its sequences are rewound to what has passed all stages."""
        sent = self.sent.pop(number, None)
        if sent is None:
            return
        if route is not None:
            route.health.on_settled(number)
        self._stats.lost_jobs += 1
        self._sequences.resend_notices()
        self._rewind(sent.spans)

    def blame(self, node: str, number: int) -> bool:
        """Count the loss of a NetworkJob against this node. Returns False if it is not in flight."""
        sent = self.sent.get(number)
        if sent is None:
            return False
        self._record.on_lost(sent.sent, self._clock(), [node])
        for span in sent.spans:
            seq = self._sequences.get(span)
            if seq is not None:
                self.count_refusal(seq, node, "returned something wrong", 1)
        return True

    def on_refusals(self, route: ActiveRoute, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            seq = self._sequences.holders.get(refusal.seq_id)
            if seq is None or (seq.incarnation, seq.attempt) != (refusal.incarnation, refusal.attempt):
                continue
            lost = refusal.verdict is Verdict.GAP and refusal.kv_len >= seq.step_processed
            logger.info("node %s refused a span of sequence %d: %s", refusal.node, seq.seq_id, refusal.verdict.name)
            what = "could not compute it" if refusal.verdict is Verdict.FAILED else "lost track of it"
            node = refusal.node if refusal.node in route.nodes else route.hops[-1].node  # not trusted
            if self.count_refusal(seq, node, what, 1 if lost else REFUSAL_WEIGHT):
                continue
            if lost:
                self._sequences.rewind_seq(seq)
            else:
                seq.prefix_trusted = seq.prefix_trusted and refusal.verdict is not Verdict.GAP
                self._sequences.preempt_seq(seq)

    def on_dropped(self, node: str, spans: Iterable[Span]) -> None:
        """Rewind Spans that did not come back with their NetworkJob, and that no stage refused."""
        for span in spans:
            seq = self._sequences.get(span)
            if seq is not None and not self.count_refusal(seq, node, "lost track of it", REFUSAL_WEIGHT):
                self._rewind([span])

    def count_refusal(self, seq: Sequence, node: str, what: str, weight: int) -> bool:
        """Count a refusal against a sequence. Returns True if that ended the route or the job, so the caller need not rewind."""
        consequence = count_refusal(seq, weight)
        if consequence is Consequence.FAIL:
            self._sequences.fail(seq.job, ComputeFailed(f"Node {node} {what}." if node else what, hint="Try the request again."))
            return True
        return consequence is Consequence.REROUTE and self._avoid(node)

    def _rewind(self, spans: Iterable[Span]) -> None:
        for span in spans:
            seq = self._sequences.get(span)
            if seq is not None and seq.step_processed < span.end:
                self._sequences.rewind_seq(seq)
            elif seq is not None:
                seq.in_flight -= 1  # a later one of its Spans has returned
