"""The response bodies of Ollama's API."""

from __future__ import annotations

from typing import Any, Literal

from penstock.doors.generation.logprobs import ContentLogprob
from penstock.doors.http.framing import WireStruct

# ---- answers ----


class OllamaChunk(WireStruct, kw_only=True):
    """A part of an answer, or all of it. The last one has the reason for its end and the timings, in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ContentLogprob] | None = None


class OllamaGenerateChunk(OllamaChunk, kw_only=True):
    response: str


class OllamaCallOut(WireStruct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCallOut(WireStruct, kw_only=True):
    id: str
    function: OllamaCallOut


class OllamaMessageOut(WireStruct, kw_only=True):
    role: Literal["assistant"]
    content: str
    tool_calls: list[OllamaToolCallOut] | None = None


class OllamaChatChunk(OllamaChunk, kw_only=True):
    message: OllamaMessageOut


class EmbedOut(WireStruct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsOut(WireStruct, kw_only=True):
    embedding: list[float]


# ---- models ----


class Details(WireStruct, kw_only=True):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Listed(WireStruct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(WireStruct, kw_only=True):
    models: list[Listed]


class Loaded(WireStruct, kw_only=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Processes(WireStruct, kw_only=True):
    models: list[Loaded]


class Shown(WireStruct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Version(WireStruct, kw_only=True):
    version: str
