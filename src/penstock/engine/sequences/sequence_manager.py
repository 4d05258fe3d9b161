"""SequenceManager: the five events through which all state of sequences changes, at their origin and at every stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from penstock.domain.span import Position, Span

ScheduleT = TypeVar("ScheduleT", contravariant=True)
OutcomeT = TypeVar("OutcomeT")
StepT = TypeVar("StepT", contravariant=True)


class SequenceRef(Protocol):
    """Names a sequence and one of its incarnations, as a Sequence, a Span, a Position and a Notice do."""

    @property
    def seq_id(self) -> int: ...

    @property
    def incarnation(self) -> int: ...


class SequenceManager(Protocol[ScheduleT, OutcomeT, StepT]):
    """Keeps the sequences of one route. Events of an older incarnation are ignored.

    The EngineSequenceManager is authoritative and gets its events from the scheduler, the stages and the head. A
    WorkerSequenceManager has replicas and gets its events from the Spans and notices of NetworkJobs.
    """

    def on_schedule(self, schedule: ScheduleT, /) -> list[OutcomeT]:
        """Apply a decision of the scheduler. Each sequence that is granted tokens is RUNNING."""
        ...

    def on_stage_completed(self, passed: Iterable[Span | Position], /) -> None:
        """Record that tokens passed a stage: the first one at the origin, its own at a worker."""
        ...

    def on_step_completed(self, steps: Iterable[StepT], /) -> None:
        """Record that tokens passed all stages."""
        ...

    def preempt_seq(self, seq: SequenceRef, /) -> None:
        """Drop the KV. The sequence is WAITING_PREEMPT and comes back as a new incarnation."""
        ...

    def free_seq(self, seq: SequenceRef, /) -> None:
        """End the sequence and free its memory."""
        ...
