"""The shapes of OpenAI's answers. What is left at its default is not sent, unless clients expect to see it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Wire(msgspec.Struct, omit_defaults=True):
    pass


class PromptDetails(Wire, kw_only=True, omit_defaults=False):
    cached_tokens: int = 0


class UsageOut(Wire, kw_only=True, omit_defaults=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


# ---- chat ----


class TopLogprob(Wire, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(Wire, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Wire, kw_only=True, omit_defaults=False):
    content: list[ContentLogprob]
    refusal: None = None


class ToolCallDelta(Wire, kw_only=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str]


class ChatDelta(Wire, kw_only=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Wire, kw_only=True, omit_defaults=False):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Wire, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChunkChoice]
    usage: UsageOut | None = None


class ChatMessageOut(Wire, kw_only=True, omit_defaults=False):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Wire, kw_only=True, omit_defaults=False):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(Wire, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: UsageOut


# ---- completions ----


class TextLogprobs(Wire, kw_only=True, omit_defaults=False):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Wire, kw_only=True, omit_defaults=False):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(Wire, kw_only=True):
    """A whole completion, and a chunk of one: they have the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageOut | None = None


encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip, and that keeps proxies from closing a silent connection."""
    return f": {text}\n\n".encode()
