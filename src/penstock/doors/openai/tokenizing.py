"""POST /tokenize and /detokenize: text or messages to token ids, and back."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.http.desk import Desk
from penstock.doors.http.reading import read
from penstock.doors.http.replies import json_reply
from penstock.doors.openai import wire
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import DetokenizeRequest, TokenizeRequest
from penstock.errors import RequestError


class Tokenizing:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def tokenize(self, request: Request) -> Response:
        asked = await read(TokenizeRequest, request)
        served = self._desk.find(asked.model, request)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("Give either a prompt or messages.", field="prompt")
        tokenizer = served.hosted.tokenizer
        if asked.messages is not None:
            plan = served.tools.plan(plain_messages(asked.messages))
            tokens = await asyncio.to_thread(tokenizer.encode_chat, plan.messages)
        else:
            special = asked.add_special_tokens is not False
            tokens = await asyncio.to_thread(tokenizer.encode, asked.prompt or "", special=special)
        return json_reply(wire.Tokenized(tokens=tokens, count=len(tokens), max_model_len=served.hosted.context))

    async def detokenize(self, request: Request) -> Response:
        asked = await read(DetokenizeRequest, request)
        served = self._desk.find(asked.model, request)
        if not all(0 <= token < served.hosted.spec.vocab for token in asked.tokens):
            raise RequestError(
                "tokens holds ids that are no tokens.", field="tokens", hint=f"Ids go from 0 to {served.hosted.spec.vocab - 1}."
            )
        text = await asyncio.to_thread(served.hosted.tokenizer.decode, asked.tokens, skip_special=False)
        return json_reply(wire.Detokenized(prompt=text))
