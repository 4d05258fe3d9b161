"""The routes of Ollama's API."""

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
                "/api/chat", ChatRequest, chat.chat, "Answer a conversation (Ollama)", response=wire.OllamaChatChunk, stream=LINES
            ),
            dispatcher.route(
                "/api/generate",
                GenerateRequest,
                chat.generate,
                "Answer a prompt (Ollama)",
                response=wire.OllamaGenerateChunk,
                stream=LINES,
            ),
            dispatcher.route("/api/embed", EmbedRequest, embed.embed, "Embed texts (Ollama)", response=wire.EmbedOut),
            dispatcher.route(
                "/api/embeddings",
                EmbeddingsRequest,
                embed.embeddings,
                "Embed a text (Ollama's older format)",
                response=wire.EmbeddingsOut,
            ),
            Route("GET", "/api/tags", models.tags, "List the models and their aliases (Ollama)", response=wire.Tags),
            Route("POST", "/api/show", models.show, "Describe a model (Ollama)", request=ShowRequest, response=wire.Shown),
            Route("GET", "/api/ps", models.processes, "List the loaded models (Ollama)", response=wire.Processes),
            Route("GET", "/api/version", models.version, "The version of Ollama's API", response=wire.Version),
            *(
                Route(method, f"/api/{name}", models.manage, "Not supported (Ollama)", refused=True)
                for method, name in MODEL_MANAGEMENT
            ),
        ],
    )
