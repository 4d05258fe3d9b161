"""Ollama's operations: what each is asked, and by what it is answered."""

from __future__ import annotations

from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.ollama import chat, embed, wire
from penstock.doors.ollama.errors import OLLAMA
from penstock.doors.ollama.models import ModelEndpoints
from penstock.doors.ollama.requests import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest

LINES = "application/x-ndjson"
MODEL_MANAGEMENT = (("POST", "pull"), ("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"))


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
                response_type=wire.OllamaChatChunk,
                stream_type=LINES,
            ),
            dispatcher.route(
                "/api/generate",
                GenerateRequest,
                chat.generate,
                "Answer a prompt (Ollama)",
                response_type=wire.OllamaGenerateChunk,
                stream_type=LINES,
            ),
            dispatcher.route(
                "/api/embed",
                EmbedRequest,
                embed.embed,
                "The embeddings of texts (Ollama)",
                response_type=wire.EmbedOut,
            ),
            dispatcher.route(
                "/api/embeddings",
                EmbeddingsRequest,
                embed.embeddings,
                "The embedding of a text (Ollama's older form)",
                response_type=wire.EmbeddingsOut,
            ),
            Route("GET", "/api/tags", models.tags, "The models and their aliases (Ollama)", response_type=wire.Tags),
            Route("POST", "/api/show", models.show, "One model (Ollama)", request_type=ShowRequest, response_type=wire.Shown),
            Route("GET", "/api/ps", models.processes, "The models that are loaded (Ollama)", response_type=wire.Processes),
            Route("GET", "/api/version", models.version, "Which Ollama this speaks like", response_type=wire.Version),
            *(
                Route(method, f"/api/{name}", models.manage, "Not here (Ollama)", refused=True)
                for method, name in MODEL_MANAGEMENT
            ),
        ],
    )
