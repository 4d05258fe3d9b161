"""What travels through the layers: Spans of sequences, packed into NetworkJobs. No text and no token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from penstock.domain.fsm import ComputeStep
from penstock.domain.route import RouteId


class Span(NamedTuple):
    """`n` tokens of a sequence from `start_pos` on: a write into its KV log at an offset.

    `incarnation` counts how often the KV was dropped, `attempt` how often it was cut back to `base`; whatever is older
    than a stage has seen is dropped silently. `rows` is how many of the last rows must come home as hidden states.
    `keys` name the prefix blocks before `start_pos` that the stage should hold already (on an incarnation's first Span).
    """

    seq_id: int
    incarnation: int
    attempt: int
    base: int
    start_pos: int
    n: int
    rows: int
    keys: tuple[bytes, ...] = ()

    @property
    def end(self) -> int:
        return self.start_pos + self.n


class NoticeKind(Enum):
    STEP_COMPLETED = auto()  # the blocks with these keys passed all stages: they may be shared from now on
    PREEMPTED = auto()  # drop the KV; the sequence comes back as a new incarnation
    FREED = auto()  # drop the KV; the sequence is over
    RESIZED = auto()  # the origin counts on `blocks` blocks at each segment from now on


class Notice(NamedTuple):
    """News about a sequence for every stage, numbered by the origin so that a repetition changes nothing."""

    number: int
    kind: NoticeKind
    seq_id: int
    incarnation: int
    first_block: int = 0
    keys: tuple[bytes, ...] = ()
    blocks: int = 0


class Verdict(Enum):
    """What a stage does with a Span that reached it."""

    APPEND = auto()
    DUPLICATE = auto()  # already written: dropped silently
    STALE = auto()  # of an older incarnation or attempt: dropped silently
    GAP = auto()  # tokens before it are missing: the origin must rewind
    MALFORMED = auto()  # overlaps what is written without being a repetition
    NO_ROOM = auto()  # the stage is out of blocks: the origin must preempt
    FAILED = auto()  # the computation failed there


class Refusal(NamedTuple):
    """A Span that a stage could not take, and why; it travels home with its NetworkJob, and the origin acts."""

    seq_id: int
    incarnation: int
    attempt: int
    verdict: Verdict
    kv_len: int  # what the stage holds of the sequence
    node: str


@dataclass(slots=True)
class NetworkJob:
    """What hops from segment to segment: a header, Spans, and one packed hidden-state tensor.

    On the way through the layers it has a row for every token, [sum of n, hidden]; on the way home (step HEAD) only those that
    were asked for, [sum of rows, hidden].
    """

    route: RouteId
    number: int  # in the order in which the origin sent them, from 0 on
    spans: list[Span]
    notices: list[Notice] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    services: list[float] = field(default_factory=list)  # seconds of compute at each segment passed so far
    step: ComputeStep = ComputeStep.EMBED
    current_layer: int = 0
    hidden: Any = None  # a tensor, or PackedHidden off the wire


class PackedHidden(NamedTuple):
    """Hidden states as bytes: `rows` rows of `width` numbers."""

    dtype: str  # "float32" or "bfloat16"
    rows: int
    width: int
    data: bytes | bytearray | memoryview


def verdict_on(kv_len: int, span: Span) -> Verdict:
    """The KV log's rule within one attempt."""
    if span.start_pos == kv_len:
        return Verdict.APPEND
    if span.end <= kv_len:
        return Verdict.DUPLICATE
    return Verdict.GAP if span.start_pos > kv_len else Verdict.MALFORMED
