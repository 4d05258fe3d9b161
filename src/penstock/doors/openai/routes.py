"""OpenAI's operations, and two of its servers' customs: what each is asked, and by what it is answered."""

from __future__ import annotations

from functools import partial

from penstock.doors.anthropic import wire as anthropic
from penstock.doors.anthropic.models import PAGING, SPOKEN
from penstock.doors.http.desk import Desk
from penstock.doors.http.routes import Route
from penstock.doors.openai import chat, completions, embeddings, wire
from penstock.doors.openai.models import Models
from penstock.doors.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from penstock.doors.openai.tokenizing import Tokenizing

EVENTS = "text/event-stream"


def openai_routes(desk: Desk) -> list[Route]:
    models, tokenizing = Models(desk), Tokenizing(desk)
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            partial(desk.answer, ChatCompletionRequest, chat.exchange),
            "Answer a conversation",
            asks=ChatCompletionRequest,
            gives=wire.ChatCompletion,
            streams=EVENTS,
            events=(wire.ChatChunk,),
        ),
        Route(
            "POST",
            "/v1/completions",
            partial(desk.answer, CompletionRequest, completions.exchange),
            "Continue a text, or several",
            asks=CompletionRequest,
            gives=wire.TextCompletion,
            streams=EVENTS,
            events=(wire.TextCompletion,),
        ),
        Route(
            "POST",
            "/v1/embeddings",
            partial(desk.answer, EmbeddingRequest, embeddings.exchange),
            "The embedding of a text, or of several",
            asks=EmbeddingRequest,
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
