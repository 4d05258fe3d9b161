"""What travels through the layers: Spans of sequences, packed into NetworkJobs, without text or token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from penstock.domain.fsm import EMBED_STEP, ComputeStep
from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.route import RouteId


class Span(NamedTuple):
    """`n` tokens of a sequence from `start_pos` on: a write into its KV log at an offset.

    incarnation, attempt: how often the KV was dropped, and how often it was cut back to `base`. Stages ignore Spans that are
        older than what they have seen.
    rows: how many of the last rows must return as hidden states.
    keys: the prefix blocks before `start_pos` that a stage should hold already (on an incarnation's first Spans).
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


class Position(NamedTuple):
    """How far a stage is with a sequence: it has processed the tokens below `end`."""

    seq_id: int
    incarnation: int
    attempt: int
    end: int


class NoticeKind(Enum):
    STEP_COMPLETED = auto()  # the blocks with these keys passed all stages and may be shared
    PREEMPTED = auto()  # drop the KV; the sequence comes back as a new incarnation
    FREED = auto()  # drop the KV; the sequence has ended
    RESIZED = auto()  # the origin uses `blocks` blocks at each segment from now on


class Notice(NamedTuple):
    """A change of a sequence for every stage, numbered by the origin so that duplicates have no effect."""

    number: int
    kind: NoticeKind
    seq_id: int
    incarnation: int
    first_block: int = 0
    keys: tuple[bytes, ...] = ()
    blocks: int = 0


class Verdict(Enum):
    """What a stage does with a Span."""

    APPEND = auto()
    DUPLICATE = auto()  # already written: ignored
    STALE = auto()  # of an older incarnation or attempt: ignored
    GAP = auto()  # tokens before it are missing: the origin must rewind
    MALFORMED = auto()  # overlaps what is written without being a duplicate
    NO_ROOM = auto()  # the stage is out of blocks: the origin must preempt
    FAILED = auto()  # the computation failed there


APPEND = Verdict.APPEND  # faster than the attribute: nearly every Span uses it


class Refusal(NamedTuple):
    """A Span that a stage refused, and why. It returns to the origin with its NetworkJob."""

    seq_id: int
    incarnation: int
    attempt: int
    verdict: Verdict
    kv_len: int  # tokens of the sequence that the stage holds
    node: str


LOCAL = {"local": True}  # marks a field that never travels


@dataclass(slots=True)
class NetworkJob:
    """What moves from segment to segment: a header, Spans, and one packed hidden-state tensor.

    On its way through the layers the tensor has a row for every token, [sum of n, hidden]; on the way back (step HEAD) only the
    wanted ones, [sum of rows, hidden].
    """

    route: RouteId
    number: int  # in the order of sending, from 0 on
    spans: list[Span]
    notices: list[Notice] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    services: list[float] = field(default_factory=list)  # seconds of compute at each segment passed so far
    transfers: list[float] = field(default_factory=list)  # seconds on the links between nodes that it has crossed so far
    step: ComputeStep = EMBED_STEP
    current_layer: int = 0
    hidden: Any = None  # a tensor, or PackedHidden off the wire
    sent: float = field(default=0.0, compare=False)  # the clock of the node that sent it last
    # not sent, but set where it arrives:
    sender: str = field(default="", compare=False, metadata=LOCAL)  # the node that it came from
    format: HiddenFormat | None = field(
        default=None, compare=False, metadata=LOCAL
    )  # of its hidden states, if it came off the wire
    memory: int = field(default=0, compare=False, metadata=LOCAL)  # bytes that it is counted with while it waits for a pass

    @property
    def packed_bytes(self) -> int:
        """Bytes of its hidden states as they came off the wire; 0 once they are a tensor."""
        return getattr(self.hidden, "packed_bytes", 0)


class PackedHidden(NamedTuple):
    """Hidden states as bytes: `rows` rows of `width` numbers.

    wait: returns when `data`, which is still being copied from a device, has arrived; None if it is there.
    """

    dtype: HiddenFormat
    rows: int
    width: int
    data: bytes | bytearray | memoryview
    wait: Callable[[], object] | None = None

    def read(self) -> bytes | bytearray | memoryview:
        """The bytes, once they are there."""
        if self.wait is not None:
            self.wait()
        return self.data

    @property
    def packed_bytes(self) -> int:
        return len(self.data)


def verdict_on(kv_len: int, span: Span) -> Verdict:
    """What to do with a Span of the current attempt, given the length of its KV log."""
    if span.start_pos == kv_len:
        return APPEND
    if span.end <= kv_len:
        return Verdict.DUPLICATE
    return Verdict.GAP if span.start_pos > kv_len else Verdict.MALFORMED
