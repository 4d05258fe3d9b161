"""What clients send: bytes on a connection, and the bodies and forms of requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from hypothesis import strategies as st
from starlette.requests import Request
from uvicorn.server import ServerState

from penstock.config.node import LimitsConfig
from penstock.doors.access.gate import AccessLog, Gate
from penstock.doors.access.keys import Keys
from penstock.doors.access.refusal_pace import RefusalPace
from penstock.doors.anthropic.requests import MessageBatchRequest, MessagesRequest
from penstock.doors.connections.admission import Admission
from penstock.doors.connections.connection import Connection
from penstock.doors.http.errors import send_error
from penstock.doors.http.fields import ignored_headers, parse, whole_body
from penstock.doors.ollama.requests import ChatRequest as OllamaChatRequest
from penstock.doors.ollama.requests import EmbedRequest, GenerateRequest
from penstock.doors.openai.batches.files import _fields, _form
from penstock.doors.openai.batches.requests import BatchCreation, FileFields
from penstock.doors.openai.errors import OPENAI
from penstock.doors.openai.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, TokenizeRequest
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.errors import PenstockError, RequestError
from tests.fuzz.target import Target, TargetMaker, damaged

MAX_BODY = 4096
REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b'POST /v1/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\n{"a": [1,2]}',
    b'POST /v1/chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n3\r\n 1}\r\n0\r\nX: y\r\n\r\n',
    b"POST /v1/chat HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"GET /%2e%2e/x?y=%00 HTTP/1.0\r\nAuthorization: Bearer key\r\nOrigin: http://[x\r\n\r\n" * 2,
]


class _Transport(asyncio.Transport):
    """Keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Refusal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


@contextmanager
def no_logged_errors() -> Iterator[None]:
    """The server answers an unexpected error with 500 and logs where it was: here that is a failure."""
    refusal = _Refusal(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("penstock.http", "uvicorn.error")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(refusal)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(refusal)
            logger.propagate = propagate


def connections() -> Target:
    """A stream of bytes, cut anywhere. Every answer is HTTP, no error is unexpected, and no task is left behind."""
    loop = asyncio.new_event_loop()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            try:
                body = await whole_body(Request(scope, receive))
            except PenstockError as error:
                await send_error(scope, send, error)
                return
            assert len(body) <= MAX_BODY
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    async def with_dialect(scope: Any, receive: Any, send: Any) -> None:
        scope["dialect"] = OPENAI
        await logged(scope, receive, send)

    gate = Gate(
        answer,
        Keys(None, None),
        {"localhost"},
        (),
        MAX_BODY,
        {},
        send_error,
        set(),
        RefusalPace(itertools.count(0.0, 10.0).__next__),
    )
    logged = AccessLog(gate, send_error)
    config = uvicorn.Config(with_dialect, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none")
    config.load()

    async def serve(pieces: list[bytes]) -> None:
        failures: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        state = ServerState()
        admission: Admission[Connection] = Admission(8, 8)
        connection = Connection(config, state, {}, loop, admission=admission, limits=LimitsConfig())
        assert admission.admit(connection, "127.0.0.1").admitted
        transport = _Transport()
        connection.connection_made(transport)
        for piece in pieces:
            if transport.closing:
                break
            connection.data_received(piece)
            await asyncio.sleep(0)
        if not transport.closing and not connection.eof_received():
            transport.close()
        for _ in range(8):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=5)
        assert not state.tasks, "a task is left"
        assert not failures, failures
        assert not len(admission)
        assert not transport.written or transport.written.startswith(b"HTTP/1.1 "), bytes(transport.written[:100])

    def check(case: tuple[bytes, list[int]]) -> None:
        data, cuts = case
        places = sorted({0, *(cut % (len(data) + 1) for cut in cuts), len(data)})
        with no_logged_errors():
            loop.run_until_complete(serve([data[start:end] for start, end in itertools.pairwise(places)]))

    return Target(st.tuples(damaged([*REQUESTS, b"".join(REQUESTS)]), st.lists(st.integers(0, 4095), max_size=4)), check)


CHAT = {
    "model": "m",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "temperature": 0.5,
    "stop": ["a", "b"],
    "logit_bias": {"5": -100},
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 2**63,
}
BODIES: dict[type[Any], list[dict[str, Any]]] = {
    ChatCompletionRequest: [CHAT],
    CompletionRequest: [{"model": "m", "prompt": ["a", "b"], "max_tokens": 5, "echo": True, "logprobs": 2}],
    EmbeddingRequest: [{"model": "m", "input": [[1, 2], [3]], "encoding_format": "base64", "dimensions": 4}],
    TokenizeRequest: [{"model": "m", "prompt": "text"}],
    ResponseRequest: [
        {"model": "m", "input": [{"type": "message", "role": "user", "content": "Hi"}], "tools": [], "store": False}
    ],
    MessagesRequest: [
        {"model": "m", "max_tokens": 5, "system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
    ],
    MessageBatchRequest: [{"requests": [{"custom_id": "a", "params": {"model": "m", "max_tokens": 5}}]}],
    OllamaChatRequest: [
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 3}, "format": "json"}
    ],
    GenerateRequest: [{"model": "m", "prompt": "x", "context": [1, 2], "keep_alive": "5m"}],
    EmbedRequest: [{"model": "m", "input": "x"}],
    BatchCreation: [
        {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"a": "b"}}
    ],
    FileFields: [{"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 3600}}],
}


def bodies() -> Target:
    """Damaged JSON for every kind of request."""
    kinds = list(BODIES)
    seeds = [json.dumps(body).encode() for bodies in BODIES.values() for body in bodies]

    def check(case: tuple[type[Any], bytes]) -> None:
        kind, body = case
        try:
            headers = ignored_headers(parse(kind, body, max_messages=100))
            assert all(value.isascii() and value.isprintable() for value in headers.values()), headers
        except RequestError as error:
            str(error).encode()  # it is sent to the client

    return Target(st.tuples(st.sampled_from(kinds), damaged(seeds)), check)


def forms() -> Target:
    """Uploads."""
    loop = asyncio.new_event_loop()
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n{}\n\r\n'
        b"--b--\r\n"
    )
    types = [b"multipart/form-data; boundary=b", b"application/x-www-form-urlencoded"]

    async def read(content_type: bytes, body: bytes) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": [(b"content-type", content_type)], "app": None}
        try:
            async with _form(Request(scope, receive)) as found:
                parse(FileFields, json.dumps(_fields(found)))
        except RequestError as error:
            str(error).encode()

    def check(case: tuple[bytes, bytes]) -> None:
        loop.run_until_complete(read(*case))

    return Target(
        st.tuples(damaged(types, max_edits=2) | st.sampled_from(types), damaged([form, b"purpose=batch&file=x"])), check
    )


TARGETS: dict[str, TargetMaker] = {
    "http: connections": connections,
    "http: bodies": bodies,
    "http: forms": forms,
}
