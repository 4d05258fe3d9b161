"""The one place where errors become an HTTP status and a body in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from penstock.errors import (
    EngineStopped,
    ForbiddenOrigin,
    InvalidKey,
    NotReady,
    PenstockError,
    PromptTooLong,
    QueueFull,
    RequestError,
    RequestTimeout,
    RequestTooLarge,
    UnknownModel,
)

INVALID = "invalid_request_error"
SERVER = "server_error"

# the most particular first
STATUS: tuple[tuple[type[PenstockError], int, str], ...] = (
    (QueueFull, 429, "rate_limit_error"),
    (RequestTooLarge, 413, INVALID),
    (RequestTimeout, 408, INVALID),
    (RequestError, 400, INVALID),
    (UnknownModel, 404, INVALID),
    (InvalidKey, 401, "authentication_error"),
    (ForbiddenOrigin, 403, "permission_error"),
    (NotReady, 503, SERVER),
    (EngineStopped, 503, SERVER),
)
CODES: dict[type[PenstockError], str] = {PromptTooLong: "context_length_exceeded", UnknownModel: "model_not_found"}
RETRY_LATER = 5  # seconds


def status_of(error: PenstockError) -> int:
    return next((status for kind, status, _ in STATUS if isinstance(error, kind)), 500)


def body_of(error: PenstockError) -> dict[str, Any]:
    kind = next((name for cls, _, name in STATUS if isinstance(error, cls)), SERVER)
    field = error.field or None if isinstance(error, RequestError) else "model" if isinstance(error, UnknownModel) else None
    return {"error": {"message": str(error), "type": kind, "param": field, "code": CODES.get(type(error), error.code)}}


def headers_of(error: PenstockError) -> dict[str, str]:
    if isinstance(error, QueueFull):
        return {"retry-after": str(error.retry_after)}
    if isinstance(error, InvalidKey):
        return {"www-authenticate": "Bearer"}
    return {"retry-after": str(RETRY_LATER)} if status_of(error) == 503 else {}
