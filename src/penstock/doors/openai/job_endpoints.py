"""The operations of OpenAI's API that can be jobs or lines of a batch."""

from __future__ import annotations

from penstock.doors.jobs.endpoints import JobApi, JobEndpoint
from penstock.doors.openai import chat, completions, embeddings
from penstock.doors.openai.errors import recorded_error
from penstock.doors.openai.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest
from penstock.doors.openai.responses.create import CreateResponse
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.doors.openai.responses.store import ResponseStore

NOT_STORED_HINT = "A job has its answer as its result, and starts a new conversation: leave it out."

OPENAI_JOBS = JobApi(
    endpoints={
        "/v1/chat/completions": JobEndpoint(ChatCompletionRequest, chat.exchange),
        "/v1/completions": JobEndpoint(CompletionRequest, completions.exchange),
        "/v1/embeddings": JobEndpoint(EmbeddingRequest, embeddings.exchange),
        "/v1/responses": JobEndpoint(ResponseRequest, CreateResponse(ResponseStore(None, hint=NOT_STORED_HINT)).exchange),
    },
    refusal=recorded_error,
)
