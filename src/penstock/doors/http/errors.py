"""The one place where errors become an HTTP status and a body, in the shape of the dialect that was spoken to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypedDict

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from penstock import errors
from penstock.doors.http.framing import encode
from penstock.errors import PenstockError, RequestError, UnknownModel


class Kind(NamedTuple):
    """`openai` and `anthropic` are what the two call such errors."""

    status: int
    openai: str
    anthropic: str


INVALID, SERVER = "invalid_request_error", "server_error"
BAD = Kind(400, INVALID, INVALID)
FAILED = Kind(500, SERVER, "api_error")
AWAY = Kind(503, SERVER, "overloaded_error")

# the most particular first
KINDS: tuple[tuple[type[PenstockError], Kind], ...] = (
    (errors.QueueFull, Kind(429, "rate_limit_error", "rate_limit_error")),
    (errors.KeyLimit, Kind(429, "rate_limit_error", "rate_limit_error")),
    (errors.RequestTooLarge, Kind(413, INVALID, "request_too_large")),
    (errors.RequestTimeout, Kind(408, INVALID, INVALID)),
    (errors.RequestError, BAD),
    (errors.UnknownModel, Kind(404, INVALID, "not_found_error")),
    (errors.InvalidKey, Kind(401, "authentication_error", "authentication_error")),
    (errors.KeyForbids, Kind(403, "permission_error", "permission_error")),
    (errors.ForbiddenOrigin, Kind(403, "permission_error", "permission_error")),
    (errors.NoSuchPath, Kind(404, INVALID, "not_found_error")),
    (errors.UnknownResponse, Kind(404, INVALID, "not_found_error")),
    (errors.UnknownFile, Kind(404, INVALID, "not_found_error")),
    (errors.UnknownBatch, Kind(404, INVALID, "not_found_error")),
    (errors.NotReady, AWAY),
    (errors.EngineStopped, AWAY),
)
CODES: dict[type[PenstockError], str] = {errors.PromptTooLong: "context_length_exceeded", UnknownModel: "model_not_found"}
RETRY_LATER = 5  # seconds

ANTHROPIC_PATH, OLLAMA_PATH, SHARED_PATH = "/v1/messages", "/api/", "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"  # a header that all of its clients send


def kind_of(error: PenstockError) -> Kind:
    return next((kind for cls, kind in KINDS if isinstance(error, cls)), FAILED)


def status_of(error: PenstockError) -> int:
    return kind_of(error).status


class OpenAIError(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIBody(TypedDict):
    error: OpenAIError


class AnthropicError(TypedDict):
    type: str
    message: str


class AnthropicBody(TypedDict):
    type: Literal["error"]
    error: AnthropicError


class OllamaBody(TypedDict):
    error: str


Body = OpenAIBody | AnthropicBody | OllamaBody


def openai_body(error: PenstockError) -> OpenAIBody:
    field = error.field or None if isinstance(error, RequestError) else "model" if isinstance(error, UnknownModel) else None
    code = CODES.get(type(error), error.code)
    return {"error": {"message": str(error), "type": kind_of(error).openai, "param": field, "code": code}}


def refusal(told: Mapping[str, str]) -> tuple[int, OpenAIBody]:
    """Status and body of an error that only its record is left of, as usage.json has it."""
    kinds = [PenstockError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next((kind for kind in kinds if kind.code == told.get("code")), PenstockError)
    error = kind.__new__(kind)
    PenstockError.__init__(error, str(told.get("message", "")), hint=str(told.get("hint", "")))
    if isinstance(error, RequestError):
        error.field = str(told.get("field", ""))
    return status_of(error), openai_body(error)


def anthropic_body(error: PenstockError) -> AnthropicBody:
    """It has no place for the field but the message."""
    field = error.field if isinstance(error, RequestError) else ""
    message = str(error) if not field or field in error.message else f"{field}: {error}"
    return {"type": "error", "error": {"type": kind_of(error).anthropic, "message": message}}


def ollama_body(error: PenstockError) -> OllamaBody:
    return {"error": str(error)}


def body_for(scope: Scope, error: PenstockError) -> Body:
    """In the dialect of a request: also of one that is refused before anybody has looked for its path."""
    path = scope["path"]
    if path.startswith(ANTHROPIC_PATH) or (path.startswith(SHARED_PATH) and is_anthropic(scope)):
        return anthropic_body(error)
    return ollama_body(error) if path.startswith(OLLAMA_PATH) else openai_body(error)


def body_types(path: str) -> tuple[type[Body], ...]:
    """What that may be there."""
    if path.startswith(ANTHROPIC_PATH):
        return (AnthropicBody,)
    if path.startswith(SHARED_PATH):
        return OpenAIBody, AnthropicBody
    return (OllamaBody,) if path.startswith(OLLAMA_PATH) else (OpenAIBody,)


def is_anthropic(scope: Scope) -> bool:
    """Whether a client of Anthropic's asks: they share paths with OpenAI's, and say who they are."""
    return ANTHROPIC_VERSION in Headers(scope=scope)


def id_headers(request_id: str) -> dict[str, str]:
    """Under the names by which OpenAI's clients know it, and Anthropic's."""
    return {"x-request-id": request_id, "request-id": request_id}


def headers_of(error: PenstockError) -> dict[str, str]:
    if isinstance(error, errors.QueueFull | errors.KeyLimit):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, errors.InvalidKey):
        return {"www-authenticate": "Bearer"}
    return {"retry-after": str(RETRY_LATER)} if status_of(error) == 503 else {}


async def send_error(scope: Scope, send: Send, error: PenstockError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    more = [(name.encode(), value.encode()) for name, value in headers_of(error).items()]
    with contextlib.suppress(OSError):
        await send_json(send, status_of(error), encode(body_for(scope, error)), [*headers, *more])


async def send_json(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
