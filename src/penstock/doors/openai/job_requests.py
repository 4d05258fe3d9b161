"""The bodies of requests that can be jobs or lines of a batch, by path. Importing this loads no model code."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.doors.http.fields import Fields
from penstock.doors.openai.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from penstock.doors.openai.responses.requests import ResponseRequest

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"

JOB_REQUESTS: Mapping[str, type[Fields]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    EMBEDDINGS: EmbeddingRequest,
    RESPONSES: ResponseRequest,
}
