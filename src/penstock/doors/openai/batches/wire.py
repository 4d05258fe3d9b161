"""The response bodies of OpenAI's files and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from penstock.doors.http.framing import WireStruct
from penstock.workspace.batch.batches import BatchStatus, BatchView
from penstock.workspace.store.job_id import BATCH_PREFIX, FILE_PREFIX
from penstock.workspace.store.uploads import StoredFile


class FileOut(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(WireStruct, kw_only=True, omit_defaults=False):
    object: Literal["list"] = "list"
    data: list[FileOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchDeleted(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["batch"] = "batch"
    deleted: Literal[True] = True


class BatchMistake(WireStruct, kw_only=True, omit_defaults=False):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchMistakes(WireStruct, kw_only=True, omit_defaults=False):
    object: Literal["list"] = "list"
    data: list[BatchMistake]


class RequestCounts(WireStruct, kw_only=True, omit_defaults=False):
    total: int
    completed: int
    failed: int


class BatchOut(WireStruct, kw_only=True, omit_defaults=False):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchMistakes | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    missing_models: Sequence[str]  # our own field: lines wait for these models
    waiting: str | None  # our own field: which limit of its key it waits for
    metadata: Mapping[str, str] | None


class BatchList(WireStruct, kw_only=True, omit_defaults=False):
    object: Literal["list"] = "list"
    data: list[BatchOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_out(file: StoredFile) -> FileOut:
    return FileOut(
        id=f"{FILE_PREFIX}{file.file_id}",
        bytes=file.bytes,
        created_at=int(file.created),
        filename=file.name,
        purpose=file.purpose,
        expires_at=_whole(file.expires),
    )


def batch_out(view: BatchView, accepts: Callable[[str | None], bool], waiting: str | None) -> BatchOut:
    """accepts: tells whether a model is served here. waiting: which limit of its key the batch waits for."""
    batch, end = view.request, view.end
    mistakes = [BatchMistake(**one) for one in end.mistakes] if end is not None else []

    def ended_as(status: BatchStatus) -> int | None:
        return int(end.ended) if end is not None and end.status is status else None

    return BatchOut(
        id=f"{BATCH_PREFIX}{view.batch_id}",
        endpoint=batch.endpoint,
        errors=BatchMistakes(data=mistakes) if mistakes else None,
        input_file_id=f"{FILE_PREFIX}{batch.input_file}",
        completion_window=batch.completion_window,
        status=view.status,
        output_file_id=f"{FILE_PREFIX}{end.output_file}" if end is not None and end.output_file else None,
        error_file_id=f"{FILE_PREFIX}{end.error_file}" if end is not None and end.error_file else None,
        created_at=int(batch.created),
        in_progress_at=_whole(view.begun),
        expires_at=int(batch.due),
        finalizing_at=_whole(end.finalizing) if end is not None else None,
        completed_at=ended_as(BatchStatus.COMPLETED),
        failed_at=ended_as(BatchStatus.FAILED),
        expired_at=ended_as(BatchStatus.EXPIRED),
        cancelling_at=_whole(view.cancelling),
        cancelled_at=ended_as(BatchStatus.CANCELLED),
        request_counts=RequestCounts(total=view.counts.total, completed=view.counts.completed, failed=view.counts.failed),
        missing_models=view.missing_models(accepts),
        waiting=waiting,
        metadata=batch.metadata,
    )


def _whole(time: float | None) -> int | None:
    return None if time is None else int(time)
