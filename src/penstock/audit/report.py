"""The figures that an audit found, without any of the text."""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 64  # of a text; shares of fewer mean nothing
MAX_CANDIDATES = 1024  # that the search tries for one token; a real attacker would try the whole vocabulary
PROMPT_TOKENS = 1000  # of the prompt whose cost is reported


@dataclass(frozen=True, slots=True)
class SearchCost:
    """The cost of the exact attack. All but `tokens` and `recovered` are per token; a try is one candidate."""

    tokens: int  # searched for
    recovered: float  # share of them
    tries: float
    passes: float
    flops: float
    seconds: float

    @property
    def prompt_seconds(self) -> float:
        return PROMPT_TOKENS * self.seconds


@dataclass(frozen=True, slots=True)
class PromptLeak:
    """Shares of the prompt's tokens recovered from the states after the first `kept` layers."""

    kept: int
    nearest: float  # the nearest embedding is the token
    nearest_10: float  # it is one of the ten nearest
    mapped: float  # the same after a linear map fitted to a public text
    mapped_10: float
    search: SearchCost

    @property
    def prompt(self) -> float:
        """By the stronger of the two."""
        return max(self.nearest, self.mapped)


@dataclass(frozen=True, slots=True)
class AnswerLeak:
    """Shares of tokens recovered from the states before the last `kept` layers."""

    kept: int
    head_text: float  # norm and head name the next token of the text
    head_answer: float  # and the token that the model chooses
    mapped_text: float  # the same after a linear map to the last layer's states
    mapped_answer: float

    @property
    def answer(self) -> float:
        """By the stronger of the two."""
        return max(self.head_answer, self.mapped_answer)


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    layers: int
    dtype: str
    device: str
    tokens: int  # of the audited text
    answer_tokens: int
    public_tokens: int  # that the maps were fitted to
    front: tuple[PromptLeak, ...]
    back: tuple[AnswerLeak, ...]
