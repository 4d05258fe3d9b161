"""VisitQueue: the NetworkJobs that wait on this node for their next state, and which of them are run together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.domain.fsm import DONE, MISSING, SEND, Facts, JobState, next_state
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, NoticeKind
from penstock.engine.routing.host.route_host import RoutePart
from penstock.engine.visit.answer_times import JobPhases
from penstock.engine.visit.job_context import JobContext

FREEING = (NoticeKind.PREEMPTED, NoticeKind.FREED)


@dataclass(slots=True, eq=False)
class Visit:
    """A NetworkJob on this node, the state it waits in, and the compute time spent on it."""

    job: NetworkJob
    state: JobState
    tokens: int = 0
    context: int = 0
    seconds: float = 0.0
    phases: JobPhases = frozenset()  # the jobs of our own NetworkJob
    arrived: bool = False  # from another node
    pending_bytes: int = 0  # of a NetworkJob from another node that no pass has taken yet
    measured: bool = True  # its seconds count as a measurement: none of its passes failed


class VisitQueue(deque[Visit]):
    """Visits in the order in which they entered their present state."""

    def __init__(self, context: JobContext) -> None:
        super().__init__()
        self._context = context

    def count_pending(self, by_sender: dict[str, int]) -> None:
        """Add the bytes of NetworkJobs from other nodes that wait for a pass."""
        for visit in self:
            if visit.pending_bytes:
                by_sender[visit.job.sender] = by_sender.get(visit.job.sender, 0) + visit.pending_bytes

    def take_batch(self) -> list[Visit]:
        """Take the oldest visit and those that wait for the same work: one of each route, then more, while there is room, so that
        a busy origin holds up no other. Within a route the order is kept: its part of the batch ends before a second Span of one
        sequence, and before a notice that frees the memory of a sequence in the batch."""
        known = self._drop_closed()
        if len(known) < 2:
            self.clear()
            return known
        # what is done here leaves before the next pass: other nodes wait for it
        first = next((visit for visit in known if visit.state is SEND), known[0])
        lines: dict[RouteId, list[Visit]] = {}
        key = self._batch_key(first)
        for visit in known:
            if self._batch_key(visit) == key:
                lines.setdefault(visit.job.route, []).append(visit)
        batch: list[Visit] = []
        room = 2 * self._context.config.busy_chunk + self._context.config.max_sequences  # two with a chunk and decodes fit
        for line in lines.values():  # those that find no room are the oldest in a later pass
            if not batch or line[0].tokens <= room:
                batch.append(line[0])
                room -= line[0].tokens
        for line in [lines[visit.job.route] for visit in batch]:
            seen = {span.seq_id for span in line[0].job.spans}
            for visit in line[1:]:
                ids = {span.seq_id for span in visit.job.spans}
                freed = {notice.seq_id for notice in visit.job.notices if notice.kind in FREEING}
                if (ids | freed) & seen or visit.tokens > room:
                    break
                seen |= ids
                room -= visit.tokens
                batch.append(visit)
        for visit in batch:
            self.remove(visit)
        return batch

    def _drop_closed(self) -> list[Visit]:
        """Return all visits but those whose route was closed. These end in whatever state they are."""
        known: list[Visit] = []
        for visit in self:
            if self._context.next_layer(visit.job) is not MISSING:
                known.append(visit)
                continue
            visit.state = next_state(visit.state, Facts(step=visit.job.step, pipe_complete=False, next_layer=MISSING))
            assert visit.state is DONE
            if visit.arrived:
                self._context.count_refused("closed_route", visit.job.route.origin, f"on the route {visit.job.route}")
        if len(known) < len(self):
            self.clear()
            self.extend(known)
        return known

    def _batch_key(self, visit: Visit) -> tuple[JobState, int, RoutePart | None]:
        """Visits with equal keys can be run together. Routes may enter a stage at one layer and leave it at different ones."""
        return visit.state, visit.job.current_layer, self._context.part(visit.job)
