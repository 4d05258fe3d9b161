"""JobUpdate: what a job sends to its client while it runs. The last one is always a JobDone or a JobFailed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.domain.part_times import PartTime
from penstock.errors import PenstockError


class FinishReason(StrEnum):
    STOP = "stop"  # end of text, a stop string or a stop token
    LENGTH = "length"  # max_tokens, the context or the KV memory
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache

    def __add__(self, more: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + more.prompt_tokens,
            self.completion_tokens + more.completion_tokens,
            self.cached_tokens + more.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from arrival: `queued` until the first Span was granted, `first_token` until the first token.

    parts: seconds at each node, layer range and hop.
    """

    queued: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    preemptions: int = 0
    parts: tuple[PartTime, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """`done` of `total` prompt tokens have passed the first stage."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from position `start` on. The first token of a prompt has none."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The prompt's embedding: the mean of the last hidden states of all its tokens, after the final norm, in fp32.

    Sent once, before the one output finishes with the reason `stop`. Not sent if the job was cancelled.
    """

    vector: tuple[float, ...]


@dataclass(slots=True)  # a frozen one takes three times as long to make, and there is one for every token
class TokensOut:
    """New tokens of output `index`. `text` may be empty while an incomplete character or a possible stop string is held back."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputFinished:
    """Output `index` is complete. `stop_reason` is the stop string or stop token id that ended it, if one did."""

    index: int
    reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class JobDone:
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class JobFailed:
    error: PenstockError


JobUpdate = PrefillProgress | PromptLogprobs | Embedded | TokensOut | OutputFinished | JobDone | JobFailed
