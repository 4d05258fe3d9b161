"""POST /api/embed and the older /api/embeddings."""

from __future__ import annotations

from penstock.doors.generation.embedding import check_dimensions, embedding_jobs
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.ollama.answers import OllamaEmbedAnswer, OllamaEmbeddingAnswer
from penstock.doors.ollama.requests import EmbeddingsRequest, EmbedRequest


def embed(params: EmbedRequest, context: Context) -> Exchange:
    """Texts that are too long are cut unless `truncate` is false, as in Ollama."""
    params.options.check_context(context.served.hosted.context)
    check_dimensions(params.dimensions, context.served)
    jobs = embedding_jobs(params.texts, context.served, "input", truncate=params.truncate is not False)
    return Exchange(jobs, lambda job_id, prompts: OllamaEmbedAnswer(params.model, len(jobs)))


def embeddings(params: EmbeddingsRequest, context: Context) -> Exchange:
    params.options.check_context(context.served.hosted.context)
    jobs = embedding_jobs([params.prompt] if params.prompt else [], context.served, "prompt", truncate=True)
    return Exchange(jobs, lambda job_id, prompts: OllamaEmbeddingAnswer(params.model, len(jobs)))
