"""Ollama's operations: what each is asked, and by what it is answered."""

from __future__ import annotations

from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.ollama import chat, embed, wire
from penstock.doors.ollama.errors import OLLAMA
from penstock.doors.ollama.models import ModelEndpoints
from penstock.doors.ollama.requests import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest

LINES = "application/x-ndjson"
MANAGING = (("POST", "pull"), ("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"))


def ollama_routes(dispatcher: RequestDispatcher) -> list[Route]:
    models = ModelEndpoints(dispatcher)
    return in_dialect(
        OLLAMA,
        [
            dispatcher.route(
                "/api/chat",
                ChatRequest,
                chat.chat,
                "Answer a conversation (Ollama)",
                gives=wire.OllamaChatChunk,
                streams=LINES,
            ),
            dispatcher.route(
                "/api/generate",
                GenerateRequest,
                chat.generate,
                "Answer a prompt (Ollama)",
                gives=wire.OllamaGenerateChunk,
                streams=LINES,
            ),
            dispatcher.route(
                "/api/embed",
                EmbedRequest,
                embed.embed,
                "The embeddings of texts (Ollama)",
                gives=wire.EmbedOut,
            ),
            dispatcher.route(
                "/api/embeddings",
                EmbeddingsRequest,
                embed.embeddings,
                "The embedding of a text (Ollama's older form)",
                gives=wire.EmbeddingsOut,
            ),
            Route("GET", "/api/tags", models.tags, "The models and their aliases (Ollama)", gives=wire.Tags),
            Route("POST", "/api/show", models.show, "One model (Ollama)", asks=ShowRequest, gives=wire.Shown),
            Route("GET", "/api/ps", models.processes, "The models that are loaded (Ollama)", gives=wire.Processes),
            Route("GET", "/api/version", models.version, "Which Ollama this speaks like", gives=wire.Version),
            *(Route(method, f"/api/{name}", models.manage, "Not here (Ollama)", refuses=True) for method, name in MANAGING),
        ],
    )
