"""Parents: the jobs that a job comes after. It waits for them, and their results replace `{{name}}` in its prompt."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import BadJob, NotReady, ParentFailed, RequestError, UnknownJob
from penstock.workspace.store.files import (
    ERROR,
    FINISHED,
    MAX_PROMPT_BYTES,
    MAX_RESULT_BYTES,
    RESULT,
    USAGE,
    Place,
    read_file,
    read_record,
)
from penstock.workspace.store.job_id import order
from penstock.workspace.store.request import NAME_PATTERN, WorkRequest

if TYPE_CHECKING:
    from penstock.workspace.store.workspace import Workspace

MAX_REASON_CHARS = 600  # of a parent's error, in the error of its child
MAX_NAMES_SHOWN = 10

_PLACEHOLDER = re.compile(rf"\{{\{{ *({NAME_PATTERN}) *\}}\}}")


# ---- names in a prompt ----


def check_placeholders(prompt: str, names: Collection[str]) -> None:
    """Raise RequestError for a `{{name}}` that no parent has. Without parents, braces are plain text."""
    unknown = next((name for name in _PLACEHOLDER.findall(prompt) if name not in names), None) if names else None
    if unknown is None:
        return
    known = [*names]
    more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
    raise RequestError(
        f"The prompt has {{{{{unknown}}}}}, but none of its parent jobs has that name.",
        field="prompt",
        hint=f"The names are {', '.join(known[:MAX_NAMES_SHOWN])}{more}: write {{{{{known[0]}}}}}, or name a parent {unknown}.",
    )


def fill_prompt(prompt: str, results: Mapping[str, str]) -> str:
    """Replace each name by its result, in one pass: braces inside a result stay as they are."""
    return _PLACEHOLDER.sub(lambda mark: results[mark[1]], prompt)


# ---- waiting for parents ----


def open_parents(workspace: Workspace, job_id: str, after: Mapping[str, str]) -> frozenset[str]:
    """Return the parents that have not ended. Raises ParentFailed or BadJob if waiting is useless.

    A parent's id must sort before its child's, so that even jobs made by hand cannot wait in a circle."""
    for parent in after.values():
        if order(parent) >= order(job_id):
            raise BadJob(
                f"Its parent {parent} does not have an earlier id than the job itself.",
                hint="Give the job an id with a later time.",
            )
    places = {parent: workspace.find(parent) for parent in after.values()}
    for parent, place in places.items():
        if place is None:
            raise _gone(parent)
        if place is Place.FAILED:
            raise _failed(workspace, parent)
    return frozenset(parent for parent, place in places.items() if place not in FINISHED)


def resolve_prompt(workspace: Workspace, job_id: str, request: WorkRequest, prompt: str) -> str:
    """Return the prompt with the parents' results filled in. Raises ParentFailed, BadJob or RequestError if it cannot run."""
    if not request.after:
        return prompt
    if waits_for := open_parents(workspace, job_id, request.after):
        raise NotReady(f"Its parent {min(waits_for, key=order)} has not ended.")  # it was put back into the queue by hand
    check_placeholders(prompt, request.after)
    results: dict[str, str] = {}
    size = len(_PLACEHOLDER.sub("", prompt).encode())
    for name, count in Counter(_PLACEHOLDER.findall(prompt)).items():
        result = _result_of(workspace, request.after[name])
        size += count * len(result)
        if size > MAX_PROMPT_BYTES:
            raise BadJob(
                f"With its parents' results the prompt has {size} bytes or more; the limit is {MAX_PROMPT_BYTES}.",
                hint="Ask for shorter results.",
            )
        results[name] = _text(result, request.after[name])
    if not size:
        raise BadJob("With its parents' results the prompt is empty.", hint="Add some text to the prompt.")
    return fill_prompt(prompt, results)


# ---- results of parents ----


def _result_of(workspace: Workspace, parent: str) -> bytes:
    try:
        with workspace.reading_job(parent) as (_, folder):
            proof = (read_record(folder, USAGE) or {}).get("sha256")
            result = read_file(folder, RESULT, MAX_RESULT_BYTES)
    except UnknownJob:
        raise _gone(parent) from None
    if result is None and workspace.find(parent) is None:
        raise _gone(parent)  # it is being removed
    if result is None or proof not in (None, hashlib.sha256(result).hexdigest()):
        what = "is missing" if result is None else "was changed after that job ended"
        raise BadJob(f"{RESULT} of its parent {parent} {what}.", hint="Retry that job, and submit this one after the new one.")
    return result


def _text(result: bytes, parent: str) -> str:
    try:
        return result.decode("utf-8")
    except UnicodeDecodeError:
        raise BadJob(f"{RESULT} of its parent {parent} is not UTF-8 text.", hint="It was changed after that job ended.") from None


def _gone(parent: str) -> ParentFailed:
    return ParentFailed(f"The job {parent} was removed.", hint="This job comes after it, and was not run.")


def _failed(workspace: Workspace, parent: str) -> ParentFailed:
    """The first failure in a chain is passed on: a job that was not run because of its parent has the parent's message."""
    error = _error_of(workspace, parent)
    message = str(error.get("message") or "no reason is recorded.")
    if error.get("code") == ParentFailed.code:
        return ParentFailed(_short(message), hint=f"This job comes after {parent}, which was not run either.")
    return ParentFailed(
        _short(f"The job {parent} failed: {message}"),
        hint="This job comes after it, and was not run. Retry that one, and submit this one after the new job.",
    )


def _error_of(workspace: Workspace, parent: str) -> Mapping[str, Any]:
    with suppress(BadJob, UnknownJob, OSError), workspace.reading_job(parent) as (_, folder):
        error = (read_record(folder, USAGE) or {}).get("error")
        if isinstance(error, Mapping):
            return error
        return {"message": (read_file(folder, ERROR, MAX_RESULT_BYTES) or b"").decode("utf-8", "replace").strip()}
    return {}


def _short(text: str) -> str:
    return text if len(text) <= MAX_REASON_CHARS else f"{text[: MAX_REASON_CHARS - 1]}…"
