"""The response bodies of OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.doors.generation.logprobs import ContentLogprob
from penstock.doors.http.framing import WireStruct


class PromptDetails(WireStruct, kw_only=True, omit_defaults=False):
    cached_tokens: int = 0


class UsageOut(WireStruct, kw_only=True, omit_defaults=False):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


# ---- chat ----


class ChatLogprobs(WireStruct, kw_only=True, omit_defaults=False):
    content: list[ContentLogprob]
    refusal: None = None


class ToolCallDelta(WireStruct, kw_only=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str]


class ChatDelta(WireStruct, kw_only=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(WireStruct, kw_only=True, omit_defaults=False):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(WireStruct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChunkChoice]
    usage: UsageOut | None = None


class ChatMessageOut(WireStruct, kw_only=True, omit_defaults=False):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(WireStruct, kw_only=True, omit_defaults=False):
    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(WireStruct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: UsageOut


# ---- completions ----


class TextLogprobs(WireStruct, kw_only=True, omit_defaults=False):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(WireStruct, kw_only=True, omit_defaults=False):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(WireStruct, kw_only=True):
    """A whole completion, or a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageOut | None = None


# ---- embeddings ----


class EmbeddingOut(WireStruct, kw_only=True, omit_defaults=False):
    """embedding: numbers, or base64 of little-endian fp32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(WireStruct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(WireStruct, kw_only=True, omit_defaults=False):
    object: Literal["list"] = "list"
    data: list[EmbeddingOut]
    model: str
    usage: EmbeddingUsage


# ---- models, tokens ----


class ModelOut(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    max_model_len: int


class ModelList(WireStruct, kw_only=True, omit_defaults=False):
    object: Literal["list"] = "list"
    data: list[ModelOut]


class Tokenized(WireStruct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(WireStruct, kw_only=True):
    prompt: str


class TokenizerInfo(WireStruct, kw_only=True, omit_defaults=False):
    """The fields of a tokenizer_config.json that clients look for."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None
    model_max_length: int
