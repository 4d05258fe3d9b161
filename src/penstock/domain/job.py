"""Job: one accepted request on its origin. Sequence: one of its outputs, with its tokens and progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from penstock.domain.blocks import KeyChain
from penstock.domain.constraint import Constraint
from penstock.domain.part_times import PartTimes
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate


class SequenceState(Enum):
    WAITING = auto()
    RUNNING = auto()  # a Span is in flight and the next one depends on it
    PAUSED = auto()  # holds KV and may be granted a Span now
    WAITING_PREEMPT = auto()  # lost its KV, here or on a server that died; will be computed again
    FINISHED = auto()
    IGNORED = auto()  # can never fit


WAITING, RUNNING, PAUSED, WAITING_PREEMPT, FINISHED, IGNORED = SequenceState  # faster than attributes of the Enum

STALE_AFTER_S = 30.0  # a started job counts as stale when no part of it was computed for this long
HOLDS_KV = (RUNNING, PAUSED)
QUEUED = (WAITING, WAITING_PREEMPT)
TERMINAL = (FINISHED, IGNORED)

_ALLOWED = {
    WAITING: (RUNNING, IGNORED, FINISHED),
    RUNNING: (PAUSED, WAITING_PREEMPT, FINISHED),
    PAUSED: (RUNNING, WAITING_PREEMPT, FINISHED),
    WAITING_PREEMPT: (RUNNING, FINISHED),
    FINISHED: (),
    IGNORED: (),
}


@dataclass(slots=True, eq=False)
class Job:
    """An accepted request. Only its origin has all of it."""

    job_id: str
    request: JobRequest
    prompt_ids: list[int]
    max_tokens: int  # as requested, but no more than context and memory allow
    seed: int
    arrival: float
    sink: Callable[[JobUpdate], None]
    chain: KeyChain | None = None  # the keys of its prompt's blocks, if they are known already
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    prefilled: int = 0  # prompt tokens reported to the client as read
    rows_returned: int = 0  # prompt tokens whose rows were used, if all of them are wanted
    row_sum: Any = None  # ... and their sum for an embedding, a numpy array in fp64
    preemptions: int = 0
    deadline: float = math.inf  # seconds from arrival
    first_grant: float | None = None
    first_token: float | None = None
    last_update: float | None = None  # when a part of it was last computed; None before the first
    part_times: PartTimes = field(default_factory=PartTimes)
    open: bool = True  # no final update was emitted yet
    on_end: Callable[[Job, JobDone | JobFailed], None] | None = None
    reachable: bool = True  # the client takes updates
    promoted: bool = False  # it was stalled for so long that it ranks like priority 0

    def emit(self, update: JobUpdate) -> None:
        """Send an update to the client. After a failure nothing more is sent."""
        if self.on_end is not None and isinstance(update, JobDone | JobFailed):
            self.on_end(self, update)
        if self.reachable:
            try:
                self.sink(update)
            except Exception:
                self.reachable = False

    def is_stale(self, now: float) -> bool:
        """Whether it was started, but no part of it was computed for STALE_AFTER_S. A job that waits to start is not stale."""
        return self.last_update is not None and now - self.last_update > STALE_AFTER_S

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def effective_priority(self) -> int:
        """The priority it is ranked by: 0 for a promoted background job."""
        return 0 if self.promoted else self.priority


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a job.

    Its cursors count tokens: scheduled >= stage_processed >= step_processed. Tokens below `stage_processed` have passed the first
    stage of the route, wherever it is, below `step_processed` all stages; only the latter counts for stops and text.
    `stages_processed` has a cursor for each stage, the first one first.
    """

    seq_id: int
    job: Job
    index: int
    tokens: list[int]
    chain: KeyChain
    state: SequenceState = WAITING
    incarnation: int = 0
    attempt: int = 0
    base: int = 0
    scheduled: int = 0
    stages_processed: list[int] = field(default_factory=lambda: [0])
    step_processed: int = 0
    prefix: int = 0  # tokens of this incarnation that were found in the prefix cache
    furthest: int = 0  # tokens that ever passed all stages, in any incarnation
    refused: int = 0  # how often stages refused its Spans since it got that far
    committed: int = 0  # blocks below step_processed whose keys the stages know
    in_flight: int = 0
    table: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    prefix_trusted: bool = True  # False once a stage lacked a prefix that we expected there
    constraint: Constraint | None = None  # has seen all generated tokens
    pending_end: tuple[FinishReason, str | int | None] | None = None  # of a resumed output, until its constraint allows it
    last_token: float = 0.0  # when it was generated
    sample_row: Any = None  # what the sampler keeps of it between steps
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def stage_processed(self) -> int:
        return self.stages_processed[0]

    @property
    def prompt_stage_processing_finished(self) -> bool:
        """Whether the whole prompt has passed the first stage."""
        return self.stage_processed >= self.prompt_len

    @property
    def is_step_processing_complete(self) -> bool:
        """Whether the whole prompt has passed all stages."""
        return self.step_processed >= self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens without a granted Span: the rest of a prompt, or the one token to decode from."""
        return len(self.tokens) - self.scheduled

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether all but the newest token passed all stages, so that the next Span is one decode token."""
        length = len(self.tokens)
        return self.step_processed == length - 1 and length > self.prompt_len

    @property
    def display_state(self) -> SequenceState:
        """The state to display: a sequence that generates is RUNNING between two tokens, too."""
        return RUNNING if self.state is PAUSED and self.decoding else self.state

    @property
    def wants_rows(self) -> bool:
        """Whether prompt logprobs or an embedding are still missing, so that every row of the prompt is needed."""
        if self.job.request.embed:
            return self.job.rows_returned < self.prompt_len
        wanted = self.index == 0 and self.job.sampling.prompt_logprobs is not None
        return wanted and self.job.rows_returned < self.prompt_len - 1  # the last row predicts no token of the prompt

    @property
    def min_length(self) -> int:
        """Tokens that need memory: those it has, and one more unless it is an embedding or has all its tokens."""
        grows = not self.job.request.embed and self.pending_end is None and self.generated < self.job.max_tokens
        return len(self.tokens) + grows

    def move(self, state: SequenceState) -> None:
        assert state in _ALLOWED[self.state], f"sequence {self.seq_id}: {self.state.name} -> {state.name}"
        self.state = state
