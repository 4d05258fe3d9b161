"""OpenAI's operations, and two of its servers' customs: what each is asked, and by what it is answered."""

from __future__ import annotations

from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.openai import chat, completions, embeddings, wire
from penstock.doors.openai.errors import OPENAI, PENSTOCK
from penstock.doors.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from penstock.doors.openai.tokenize import TokenizeEndpoints

EVENTS = "text/event-stream"


def openai_routes(dispatcher: RequestDispatcher) -> list[Route]:
    tokenizing = TokenizeEndpoints(dispatcher)
    return in_dialect(
        OPENAI,
        [
            dispatcher.route(
                "/v1/chat/completions",
                ChatCompletionRequest,
                chat.exchange,
                "Answer a conversation",
                response_type=wire.ChatCompletion,
                stream_type=EVENTS,
                events=(wire.ChatChunk,),
            ),
            dispatcher.route(
                "/v1/completions",
                CompletionRequest,
                completions.exchange,
                "Continue a text, or several",
                response_type=wire.TextCompletion,
                stream_type=EVENTS,
                events=(wire.TextCompletion,),
            ),
            dispatcher.route(
                "/v1/embeddings",
                EmbeddingRequest,
                embeddings.exchange,
                "The embedding of a text, or of several",
                response_type=wire.EmbeddingList,
            ),
        ],
    ) + in_dialect(
        PENSTOCK,
        [
            Route(
                "POST",
                "/tokenize",
                tokenizing.tokenize,
                "Token ids of a text",
                request_type=TokenizeRequest,
                response_type=wire.Tokenized,
            ),
            Route(
                "POST",
                "/detokenize",
                tokenizing.detokenize,
                "The text of token ids",
                request_type=DetokenizeRequest,
                response_type=wire.Detokenized,
            ),
        ],
    )
