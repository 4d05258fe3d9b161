"""The operations of OpenAI's API that can be jobs or lines of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.jobs.job_api import JobApi, JobEndpoint
from penstock.doors.openai import chat, completions, embeddings
from penstock.doors.openai.errors import recorded_error
from penstock.doors.openai.job_requests import CHAT, COMPLETIONS, EMBEDDINGS, JOB_REQUESTS, RESPONSES
from penstock.doors.openai.responses.create import CreateResponse
from penstock.doors.openai.responses.store import ResponseStore

NOT_STORED_HINT = "A job has its answer as its result, and starts a new conversation: leave it out."
EXCHANGES: Mapping[str, Callable[[Any, Context], Exchange]] = {
    CHAT: chat.exchange,
    COMPLETIONS: completions.exchange,
    EMBEDDINGS: embeddings.exchange,
    RESPONSES: CreateResponse(ResponseStore(None, hint=NOT_STORED_HINT)).exchange,
}

OPENAI_JOBS = JobApi(
    endpoints={path: JobEndpoint(request, EXCHANGES[path]) for path, request in JOB_REQUESTS.items()},
    refusal=recorded_error,
)
