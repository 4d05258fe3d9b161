"""SamplingParams: how the tokens of a request are chosen, and when they end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import InvalidSampling

MAX_LOGPROBS = 50
MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
MAX_STOP_TOKENS = 128
MAX_N = 128
MAX_BIASES = 1024  # each costs time at every token of the whole batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options, checked when created: every instance can be run.

    temperature: 0 is greedy.
    top_k, top_p: off at 0 and 1.
    seed: None draws a new one for each request.
    logprobs: None returns none, 0 the chosen token's, k also those of the k most likely tokens.
    prompt_logprobs: the same for the prompt, which is then computed without the prefix cache.
    """

    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # omit the tokenizer's special tokens from the text

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            try:
                object.__setattr__(self, name, tuple(getattr(self, name) or ()))
            except TypeError:
                raise _bad(name, getattr(self, name), "a list") from None
        if not isinstance(self.logit_bias or {}, Mapping):
            raise _bad("logit_bias", self.logit_bias, "a number for each token id")
        object.__setattr__(self, "logit_bias", {_token_id(t): b for t, b in (self.logit_bias or {}).items()})
        for name in ("ignore_eos", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise _bad(name, getattr(self, name), "true or false")
        self._whole("n", 1, MAX_N)
        if self.max_tokens is not None:
            self._whole("max_tokens", 1)
        self._whole("min_tokens", 0)
        self._number("temperature", 0.0, 100.0)
        self._whole("top_k", 0)
        self._number("top_p", 0.0, 1.0, open_below=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, 100.0, open_below=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop):
            raise _bad("stop", self.stop, f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS or not all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids):
            raise _bad("stop_token_ids", self.stop_token_ids, f"up to {MAX_STOP_TOKENS} token ids")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidSampling(
                f"logit_bias has {len(self.logit_bias)} entries.", field="logit_bias", hint=f"Give at most {MAX_BIASES}."
            )
        for token, bias in self.logit_bias.items():
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise _bad("logit_bias", {token: bias}, "a number between -100 and 100 for each token id")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below, logits divided by it overflow

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def _whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            raise _bad(name, value, f"a whole number from {low}" + (f" to {high}" if high is not None else " up"))

    def _number(self, name: str, low: float, high: float, *, open_below: bool = False) -> None:
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
            or (open_below and value == low)
        ):
            raise _bad(name, value, f"a number {'above' if open_below else 'from'} {low:g} to {high:g}")


def _token_id(key: object) -> int:
    """Parse a token id of `logit_bias`. OpenAI's clients send them as strings."""
    try:
        token = int(key)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        token = -1
    if token < 0:
        raise _bad("logit_bias", key, "token ids as keys")
    return int(token)


def _bad(name: str, value: object, expected: str) -> InvalidSampling:
    text = repr(value) if len(repr(value)) <= 200 else f"{repr(value)[:200]}..."
    return InvalidSampling(f"{name} = {text} cannot be used.", field=name, hint=f"Give {expected}.")
