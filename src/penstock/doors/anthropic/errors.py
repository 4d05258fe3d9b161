"""Anthropic's errors, and how its clients are recognised on a path shared with OpenAI's."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.doors.http.errors import Dialect, status_of
from penstock.errors import PenstockError, PromptTooLong, RequestError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
VERSION_HEADER = "anthropic-version"  # all of its clients send it
THREAD = "thread"  # clients recover from the refusal of this field by sending the whole conversation instead
NO_THREADS: ErrorDetails = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}


class ErrorDetails(TypedDict):
    error_code: str
    unsupported: list[str]


class AnthropicError(TypedDict):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class AnthropicBody(TypedDict):
    type: Literal["error"]
    error: AnthropicError


def anthropic_body(error: PenstockError) -> AnthropicBody:
    """The body of an error. The field goes into the message: the format has no other place for it."""
    field = error.field if isinstance(error, RequestError) else ""
    message = str(error) if not field or field in error.message else f"{field}: {error}"
    if isinstance(error, PromptTooLong) and error.limit:  # in the words that clients look for
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum. {message}"
    body: AnthropicError = {"type": error_type(status_of(error)), "message": message}
    return {"type": "error", "error": {**body, "details": NO_THREADS} if field == THREAD else body}


def error_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error")


def is_anthropic(scope: Scope) -> bool:
    return VERSION_HEADER in Headers(scope=scope)


ANTHROPIC = Dialect("Anthropic", lambda error, scope: anthropic_body(error), (AnthropicBody,))
