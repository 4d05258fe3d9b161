"""The tree of errors that a user or a peer can cause.

The message says what was wrong and with which value; `hint` says what to do. `code` is turned into an HTTP status or an
exit code in one place.
"""

from __future__ import annotations

from typing import Any


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose. `hint` says what the user can do about it."""

    code = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class ConfigError(PenstockError):
    """A setting with an unknown name, a wrong type or an impossible value."""

    code = "config"


# ---- the request ----


class RequestError(PenstockError):
    """A request that cannot be served as it is; `field` names the offending part."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class EmptyPrompt(RequestError):
    code = "empty_prompt"


class PromptTooLong(RequestError):
    """A prompt that exceeds the model's context or the KV memory of the smallest stage (IGNORED in the specification)."""

    code = "prompt_too_long"
    tokens = 0  # the prompt has at least this many; 0 if unknown
    limit = 0  # the most that fit; 0 if unknown

    def __init__(self, message: str, *, tokens: int = 0, limit: int = 0, field: str = "", hint: str = "") -> None:
        super().__init__(message, field=field, hint=hint)
        self.tokens = tokens
        self.limit = limit


class NoPreviousResponse(RequestError):
    """A request that continues a response that is not stored."""

    code = "previous_response_not_found"


class InvalidSampling(RequestError):
    code = "invalid_sampling"


class QueueFull(RequestError):
    """The node already has as many open jobs as it accepts."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after  # seconds


class RequestTooLarge(RequestError):
    code = "request_too_large"


class StorageLimit(RequestError):
    """A key that would store more on the disk than it may."""

    code = "storage_limit"


class RequestTimeout(RequestError):
    """A client that started a request and did not finish it in time."""

    code = "request_timeout"


# ---- the door ----


class InvalidKey(PenstockError):
    code = "invalid_api_key"


class KeyRevoked(InvalidKey):
    """A key that was valid until it was revoked. Its open answers end with this error, too."""

    code = "key_revoked"


class UnknownKey(PenstockError):
    """The name of a key that this server does not have."""

    code = "unknown_key"


class KeyForbids(PenstockError):
    """A valid key that may not use this model, priority or path."""

    code = "key_forbids"


class KeyLimit(PenstockError):
    """A valid key that has reached one of its limits."""

    code = "key_limit"

    def __init__(self, message: str, *, retry_after: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after  # seconds


class ForbiddenOrigin(PenstockError):
    """A request from another site's web page, or to a host name that is not this server's."""

    code = "forbidden_origin"


class NoSuchPath(PenstockError):
    """A path, or a method of a path, that the API does not have."""

    code = "not_found"

    def __init__(self, message: str, *, hint: str = "", wrong_method: bool = False) -> None:
        super().__init__(message, hint=hint)
        if wrong_method:
            self.code = "method_not_allowed"


class NotReady(PenstockError):
    """The node is up but cannot answer now: layers are missing, or it is shutting down."""

    code = "not_ready"


# ---- the model ----


class ModelError(PenstockError):
    code = "model"


class UnknownModel(ModelError):
    code = "unknown_model"


class UnsupportedModel(ModelError):
    """An architecture, rope scaling, tokenizer or tensor type that Penstock does not support."""

    code = "unsupported_model"


class CorruptWeights(ModelError):
    """A weights file that is truncated, tampered with, or lacks a tensor."""

    code = "corrupt_weights"


class DownloadFailed(ModelError):
    code = "download_failed"


class UntrustedWeights(ModelError):
    """Weights that other nodes offer, but that no trusted party vouches for."""

    code = "untrusted_weights"


class WeightsUnavailable(ModelError):
    """Weights that no other node could or would send."""

    code = "weights_unavailable"


# ---- the machine ----


class NotEnoughMemory(PenstockError):
    code = "not_enough_memory"


class DeviceUnavailable(PenstockError):
    code = "device_unavailable"


# ---- the engine ----


class EngineError(PenstockError):
    code = "engine"


class ComputeFailed(EngineError):
    """A forward pass failed for a job alone. The job ends with this error; the engine continues."""

    code = "compute_failed"


class EngineStopped(EngineError):
    code = "engine_stopped"


# ---- the workspace ----


class WorkspaceError(PenstockError):
    """A workspace folder that cannot be used, or a disk operation that failed."""

    code = "workspace"


class UnknownJob(WorkspaceError):
    code = "unknown_job"


class UnknownResponse(WorkspaceError):
    code = "unknown_response"


class UnknownFile(WorkspaceError):
    code = "unknown_file"


class UnknownBatch(WorkspaceError):
    code = "unknown_batch"


class NotFinished(WorkspaceError):
    """The result of a job was requested before the job finished."""

    code = "not_finished"


class KeyTaken(WorkspaceError):
    """An idempotency key that was already used for a different request."""

    code = "key_taken"


class BadJob(WorkspaceError):
    """A job folder with missing or invalid files."""

    code = "bad_job"


class Cancelled(WorkspaceError):
    code = "cancelled"


class ParentFailed(WorkspaceError):
    """A job that is not run because one it depends on failed or is gone."""

    code = "parent_failed"


class DiedTooOften(WorkspaceError):
    """A job during which the server died too many times while nothing else was running."""

    code = "died_too_often"


# ---- the network ----


class Unreachable(PenstockError):
    """A message to a node that is not alive, or no longer alive."""

    code = "unreachable"


class Untrusted(PenstockError):
    """A certificate, invitation or revocation list that the network's authority did not sign."""

    code = "untrusted"


class BadMessage(PenstockError):
    """Bytes from another node that are not a valid message.

    route, number: the RouteId and number of the NetworkJob, where they could be read; they may be damaged too.
    """

    code = "bad_message"

    def __init__(self, message: str, *, route: Any = None, number: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.route = route
        self.number = number


class WrongVersion(BadMessage):
    """A message of a different protocol version."""

    code = "wrong_version"


class DamagedMessage(BadMessage):
    """A message whose checksum does not match."""

    code = "damaged_message"


class MalformedMessage(BadMessage):
    """A message that is cut off, too large, of an unknown kind, or has an impossible value."""

    code = "malformed_message"
