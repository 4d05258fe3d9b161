"""/tokenize, /detokenize and /tokenizer_info: convert text or messages to token ids, and back, as vLLM does."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.http.replies import json_reply
from penstock.doors.http.route import Parameter
from penstock.doors.openai import wire
from penstock.doors.openai.messages import plain_messages
from penstock.doors.openai.requests import DetokenizeRequest, TokenizeRequest
from penstock.errors import RequestError

MODEL = Parameter("model", str, "Which model; needed where there are several.")


class TokenizeEndpoints:
    def __init__(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher

    async def tokenize(self, request: Request) -> Response:
        async with self._dispatcher.metered(request) as work:
            params = await work.read(TokenizeRequest, request)
            served = self._dispatcher.find(params.model, request)
            if (params.prompt is None) == (params.messages is None):
                raise RequestError("Give either a prompt or messages.", field="prompt")
            tokenizer = served.hosted.tokenizer
            if params.messages is not None:
                messages = params.messages
                tokens = await work.run(lambda: tokenizer.encode_chat(served.tools.plan(plain_messages(messages)).messages))
            else:
                special = params.add_special_tokens is not False
                tokens = await work.run(lambda: tokenizer.encode(params.prompt or "", special=special))
            work.count(len(tokens))
            return json_reply(wire.Tokenized(tokens=tokens, count=len(tokens), max_model_len=served.hosted.context))

    async def detokenize(self, request: Request) -> Response:
        async with self._dispatcher.metered(request) as work:
            params = await work.read(DetokenizeRequest, request)
            served = self._dispatcher.find(params.model, request)
            vocab, tokens = served.hosted.spec.vocab, params.tokens
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
                hint = f"Token ids go from 0 to {vocab - 1}."
                raise RequestError("tokens has token ids that do not exist.", field="tokens", hint=hint)
            text = await work.run(lambda: served.hosted.tokenizer.decode(tokens, skip_special=False))
            work.count(len(tokens))
            return json_reply(wire.Detokenized(prompt=text))

    async def info(self, request: Request) -> Response:
        served = self._dispatcher.find(request.query_params.get(MODEL.name), request)
        tokenizer = served.hosted.tokenizer
        length = served.hosted.context
        return json_reply(
            wire.TokenizerInfo(**tokenizer.special_tokens, chat_template=tokenizer.chat_template, model_max_length=length)
        )
