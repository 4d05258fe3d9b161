"""The routes of OpenAI's API, and those of tokenizers, which other servers have too."""

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
from penstock.doors.openai.tokenize import MODEL, TokenizeEndpoints

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
                response=wire.ChatCompletion,
                stream=EVENTS,
                events=(wire.ChatChunk,),
            ),
            dispatcher.route(
                "/v1/completions",
                CompletionRequest,
                completions.exchange,
                "Continue one text or several",
                response=wire.TextCompletion,
                stream=EVENTS,
                events=(wire.TextCompletion,),
            ),
            dispatcher.route(
                "/v1/embeddings", EmbeddingRequest, embeddings.exchange, "Embed one text or several", response=wire.EmbeddingList
            ),
        ],
    ) + in_dialect(
        PENSTOCK,
        [
            Route(
                "POST",
                "/tokenize",
                tokenizing.tokenize,
                "Convert text to token ids",
                request=TokenizeRequest,
                response=wire.Tokenized,
            ),
            Route(
                "POST",
                "/detokenize",
                tokenizing.detokenize,
                "Convert token ids to text",
                request=DetokenizeRequest,
                response=wire.Detokenized,
            ),
            Route(
                "GET",
                "/tokenizer_info",
                tokenizing.info,
                "Special tokens and chat template",
                response=wire.TokenizerInfo,
                parameters=(MODEL,),
                errors=(404,),
            ),
        ],
    )
