"""OpenAI's errors, and the same made from the record of a job that failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from penstock.doors.http.errors import Dialect, status_of
from penstock.errors import PenstockError, PromptTooLong, RequestError, UnknownModel

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES: dict[type[PenstockError], str] = {PromptTooLong: "context_length_exceeded", UnknownModel: "model_not_found"}


class OpenAIError(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIBody(TypedDict):
    error: OpenAIError


def openai_body(error: PenstockError) -> OpenAIBody:
    field = error.field or None if isinstance(error, RequestError) else "model" if isinstance(error, UnknownModel) else None
    status = status_of(error)
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = str(error)
    if isinstance(error, PromptTooLong) and error.limit:  # in the words that clients look for
        message = f"This model's maximum context length is {error.limit} tokens. {message}"
    return {"error": {"message": message, "type": kind, "param": field, "code": CODES.get(type(error), error.code)}}


def recorded_error(record: Mapping[str, str]) -> tuple[int, OpenAIBody]:
    """Status and body of an error, made from its record in usage.json."""
    kinds = [PenstockError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next((kind for kind in kinds if kind.code == record.get("code")), PenstockError)
    error = kind.__new__(kind)
    PenstockError.__init__(error, str(record.get("message", "")), hint=str(record.get("hint", "")))
    if isinstance(error, RequestError):
        error.field = str(record.get("field", ""))
    return status_of(error), openai_body(error)


OPENAI = Dialect("OpenAI", lambda error, scope: openai_body(error), (OpenAIBody,))
PENSTOCK = Dialect("Penstock", OPENAI.error_body, OPENAI.error_types)  # its own operations
