"""Which of OpenAI's operations can wait in a file: as jobs of a workspace, and as the lines of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.http.fields import Fields
from penstock.doors.openai import chat, completions, embeddings
from penstock.doors.openai.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from penstock.doors.openai.responses.create import Creating
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.doors.openai.responses.store import Shelf

KEPT_AS_RESULT = "A job keeps its answer as its own result, and begins a conversation: leave it out."


@dataclass(frozen=True, slots=True)
class Durable:
    asks: type[Fields]
    exchange: Callable[[Any, Context], Exchange]


DURABLE: Mapping[str, Durable] = {
    "/v1/chat/completions": Durable(ChatCompletionRequest, chat.exchange),
    "/v1/completions": Durable(CompletionRequest, completions.exchange),
    "/v1/embeddings": Durable(EmbeddingRequest, embeddings.exchange),
    "/v1/responses": Durable(ResponseRequest, Creating(Shelf(None, why=KEPT_AS_RESULT)).exchange),
}
