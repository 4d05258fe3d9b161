"""Every error that a user or a peer can cause, in one tree.

Each says what was wrong, with which value, and (in `hint`) what to do. The doors turn `code` into an HTTP status or an
exit code in one place; nothing else looks at it.
"""

from __future__ import annotations

from typing import Any


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""

    code = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class ConfigError(PenstockError):
    """A setting that cannot be used: unknown name, wrong type, impossible value."""

    code = "config"


# ---- the request ----


class RequestError(PenstockError):
    """A request that cannot be served as it stands; `field` names the offending part."""

    code = "invalid_request"

    def __init__(self, message: str, *, field: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field


class EmptyPrompt(RequestError):
    code = "empty_prompt"


class PromptTooLong(RequestError):
    """The prompt exceeds the model's context, or the KV memory of the smallest stage (the seed's IGNORED)."""

    code = "prompt_too_long"


class NoPreviousResponse(RequestError):
    """A conversation that is to go on from a response that is not kept."""

    code = "previous_response_not_found"


class InvalidSampling(RequestError):
    code = "invalid_sampling"


class QueueFull(RequestError):
    """More jobs are open than the node accepts at once."""

    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after  # seconds


class RequestTooLarge(RequestError):
    code = "request_too_large"


class RequestTimeout(RequestError):
    """A client that began a request and did not finish it."""

    code = "request_timeout"


# ---- the door ----


class InvalidKey(PenstockError):
    code = "invalid_api_key"


class KeyRevoked(InvalidKey):
    """A key that was good once. Its open answers end with this, too."""

    code = "key_revoked"


class KeyForbids(PenstockError):
    """A good key that is not for this model, this priority or this path."""

    code = "key_forbids"


class KeyLimit(PenstockError):
    """A good key that has used up what it may, for now."""

    code = "key_limit"

    def __init__(self, message: str, *, retry_after: int, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after  # seconds


class ForbiddenOrigin(PenstockError):
    """A web page of another site, or a name that is not this server's, speaks to it."""

    code = "forbidden_origin"


class NoSuchPath(PenstockError):
    """An address, or a method at one, that the API does not have."""

    code = "not_found"

    def __init__(self, message: str, *, hint: str = "", wrong_method: bool = False) -> None:
        super().__init__(message, hint=hint)
        if wrong_method:
            self.code = "method_not_allowed"


class NotReady(PenstockError):
    """The node lives but cannot answer now: layers are missing, or it is shutting down."""

    code = "not_ready"


# ---- the model ----


class ModelError(PenstockError):
    code = "model"


class UnknownModel(ModelError):
    code = "unknown_model"


class UnsupportedModel(ModelError):
    """An architecture, rope scaling, tokenizer or tensor type that Penstock does not know."""

    code = "unsupported_model"


class CorruptWeights(ModelError):
    """A weights file that is truncated, tampered with, or lacks a tensor."""

    code = "corrupt_weights"


class DownloadFailed(ModelError):
    code = "download_failed"


class WeightsUnavailable(ModelError):
    """Weights that no other node could, or would, hand over."""

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
    """A forward pass failed; the jobs in it end with this error and the engine goes on."""

    code = "compute_failed"


class EngineStopped(EngineError):
    code = "engine_stopped"


# ---- the workspace ----


class WorkspaceError(PenstockError):
    """A folder of jobs that cannot be used, or a disk that does not do what it was asked for."""

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
    """A job whose result was asked for before there was one."""

    code = "not_finished"


class KeyTaken(WorkspaceError):
    """An idempotency key that belongs to another request."""

    code = "key_taken"


class BadJob(WorkspaceError):
    """A job's folder that does not hold what a job needs."""

    code = "bad_job"


class Cancelled(WorkspaceError):
    code = "cancelled"


class ParentFailed(WorkspaceError):
    """A job that comes after one that failed or is gone: it is not run."""

    code = "parent_failed"


class DiedTooOften(WorkspaceError):
    """A job during which its server died again and again, with nothing else running."""

    code = "died_too_often"


# ---- the network ----


class Unreachable(PenstockError):
    """A message for a node that is not live, or not any more."""

    code = "unreachable"


class Untrusted(PenstockError):
    """A certificate, an invitation or a list of revocations that the network's authority does not stand behind."""

    code = "untrusted"


class BadMessage(PenstockError):
    """Bytes from another node that are no message. `route` (a RouteId) and `number` tell which NetworkJob it was, as far as that
    could still be read: a hint, since they may be damaged too."""

    code = "bad_message"

    def __init__(self, message: str, *, route: Any = None, number: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.route = route
        self.number = number


class WrongVersion(BadMessage):
    """A message of another version of the protocol."""

    code = "wrong_version"


class DamagedMessage(BadMessage):
    """The checksum does not fit."""

    code = "damaged_message"


class MalformedMessage(BadMessage):
    """Cut off, too large, of an unknown kind, or with a value that cannot be."""

    code = "malformed_message"
