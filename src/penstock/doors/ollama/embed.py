"""POST /api/embed, and the older /api/embeddings: what texts mean to the model, as vectors."""

from __future__ import annotations

from penstock.doors.generation.embedding import check_dimensions, embedding_jobs
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.ollama.answers import OllamaEmbedAnswer, OllamaEmbeddingAnswer
from penstock.doors.ollama.requests import EmbeddingsRequest, EmbedRequest


def embed(asked: EmbedRequest, context: Context) -> Exchange:
    """A text that is too long is cut, unless the client says otherwise: that is Ollama's rule."""
    asked.options.check_context(context.served.hosted.context)
    check_dimensions(asked.dimensions, context.served)
    jobs = embedding_jobs(asked.texts, context.served, "input", truncate=asked.truncate is not False)
    return Exchange(jobs, lambda job_id, prompts: OllamaEmbedAnswer(asked.model, len(jobs)))


def embeddings(asked: EmbeddingsRequest, context: Context) -> Exchange:
    asked.options.check_context(context.served.hosted.context)
    jobs = embedding_jobs([asked.prompt] if asked.prompt else [], context.served, "prompt", truncate=True)
    return Exchange(jobs, lambda job_id, prompts: OllamaEmbeddingAnswer(asked.model, len(jobs)))
