"""The jobs that lines of a batch become: finding them again, and journaling how they ended."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.errors import BadJob, Cancelled, EngineError, RequestError, UnknownJob
from penstock.workspace.batch.results import Cancellation
from penstock.workspace.flow import Flow
from penstock.workspace.store.files import footprint
from penstock.workspace.store.outcomes import error_record
from penstock.workspace.store.request import WorkRequest, read_request
from penstock.workspace.store.workspace import Workspace

REQUEST_BYTES = 1 << 12  # of request.json and the like


class LineJob(NamedTuple):
    """A line that is a job now. bytes: those of its folder, and of its answer."""

    job_id: str
    model: str | None
    bytes: int


def job_bytes(line: int) -> int:
    """Bytes on disk of the job of a line this long, before it has an answer."""
    return footprint(line, REQUEST_BYTES)


def request_of(workspace: Workspace, job: str, batch_id: str) -> WorkRequest | None:
    """Read a job's request; None if it is not of this batch, since users may choose any key."""
    with suppress(BadJob, RequestError, UnknownJob), workspace.reading_job(job) as (_, folder):
        request = read_request(folder)
        return request if request.batch == batch_id else None
    return None


def outcome_of(flow: Flow, job: str, cancellation: Cancellation | None) -> dict[str, Any]:
    """Return the journal's record of how a job ended."""
    try:
        result = flow.get(job)
        if result.done:
            return {"body": json.loads(result.data)}
    except BadJob as error:
        return {"refused": error_record(error)}
    except (ValueError, RecursionError):
        return {"refused": error_record(EngineError("The job's result is not JSON."))}
    why = result.usage.get("error")
    if cancellation is not None and isinstance(why, dict) and why.get("code") == Cancelled.code:
        return {"off": cancellation.fact()}
    return {"refused": why if isinstance(why, dict) else error_record(EngineError(result.text.strip()))}
