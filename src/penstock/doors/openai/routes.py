"""OpenAI's operations, and two of its servers' customs: what each is asked, and by what it is answered."""

from __future__ import annotations

from penstock.doors.anthropic import wire as anthropic
from penstock.doors.anthropic.models import PAGING, SPOKEN
from penstock.doors.dispatch.dispatcher import Desk
from penstock.doors.http.route import Route
from penstock.doors.openai import chat, completions, embeddings, wire
from penstock.doors.openai.models import Models
from penstock.doors.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from penstock.doors.openai.tokenize import Tokenizing

EVENTS = "text/event-stream"


def openai_routes(desk: Desk) -> list[Route]:
    models, tokenizing = Models(desk), Tokenizing(desk)
    return [
        desk.route(
            "/v1/chat/completions",
            ChatCompletionRequest,
            chat.exchange,
            "Answer a conversation",
            gives=wire.ChatCompletion,
            streams=EVENTS,
            events=(wire.ChatChunk,),
        ),
        desk.route(
            "/v1/completions",
            CompletionRequest,
            completions.exchange,
            "Continue a text, or several",
            gives=wire.TextCompletion,
            streams=EVENTS,
            events=(wire.TextCompletion,),
        ),
        desk.route(
            "/v1/embeddings",
            EmbeddingRequest,
            embeddings.exchange,
            "The embedding of a text, or of several",
            gives=wire.EmbeddingList,
        ),
        Route(
            "GET",
            "/v1/models",
            models.all,
            "The models and their aliases",
            gives=(wire.ModelList, anthropic.ModelPage),
            parameters=(SPOKEN, *PAGING),
        ),
        Route(
            "GET",
            "/v1/models/{model:path}",
            models.one,
            "One model",
            gives=(wire.ModelOut, anthropic.ModelOut),
            parameters=(SPOKEN,),
        ),
        Route("POST", "/tokenize", tokenizing.tokenize, "Token ids of a text", asks=TokenizeRequest, gives=wire.Tokenized),
        Route(
            "POST", "/detokenize", tokenizing.detokenize, "The text of token ids", asks=DetokenizeRequest, gives=wire.Detokenized
        ),
    ]
