"""Parents: the jobs that a job comes after. It waits until they are done, and their results replace `{{name}}` in its prompt."""

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
    from penstock.workspace.store.layout import Workspace

MAX_REASON_CHARS = 600  # characters of why a parent failed
MAX_NAMES_SHOWN = 10  # names in an error

_PLACEHOLDER = re.compile(rf"\{{\{{ *({NAME_PATTERN}) *\}}\}}")


# ---- names in a prompt ----


def check_placeholders(prompt: str, names: Collection[str]) -> None:
    """Refuse a `{{name}}` that is no parent's. A job without parents may write braces as it likes."""
    unknown = next((name for name in _PLACEHOLDER.findall(prompt) if name not in names), None) if names else None
    if unknown is None:
        return
    known = [*names]
    more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
    raise RequestError(
        f"The prompt has {{{{{unknown}}}}}, and no job that it comes after has that name.",
        field="prompt",
        hint=f"Known names: {', '.join(known[:MAX_NAMES_SHOWN])}{more}.",
    )


def fill_prompt(prompt: str, results: Mapping[str, str]) -> str:
    """The prompt with a result for each name, in one pass: braces inside a result mean nothing."""
    return _PLACEHOLDER.sub(lambda mark: results[mark[1]], prompt)


# ---- whom a job waits for ----


def open_parents(workspace: Workspace, job_id: str, after: Mapping[str, str]) -> frozenset[str]:
    """Those that have not ended yet. ParentFailed or BadJob if it is of no use to wait for them.

    Parents sort before their children, so whatever people make by hand, nobody waits for itself.
    """
    for parent in after.values():
        if order(parent) >= order(job_id):
            raise BadJob(
                f"It is to come after {parent}, whose id does not sort before its own.",
                hint="Give it an id with a later time: a job comes after older ones.",
            )
    places = {parent: workspace.find(parent) for parent in after.values()}
    for parent, place in places.items():
        if place is None:
            raise _gone(parent)
        if place is Place.FAILED:
            raise _failed(workspace, parent)
    return frozenset(parent for parent, place in places.items() if place not in FINISHED)


def resolve_prompt(workspace: Workspace, job_id: str, request: WorkRequest, prompt: str) -> str:
    """The prompt as the model shall read it. ParentFailed, BadJob or RequestError tell why the job cannot be run."""
    if not request.after:
        return prompt
    if waits_for := open_parents(workspace, job_id, request.after):
        raise NotReady(f"It comes after {min(waits_for, key=order)}, which has not ended.")  # somebody put that back
    check_placeholders(prompt, request.after)
    results: dict[str, str] = {}
    size = len(_PLACEHOLDER.sub("", prompt).encode())
    for name, count in Counter(_PLACEHOLDER.findall(prompt)).items():
        result = _result_of(workspace, request.after[name])
        size += count * len(result)
        if size > MAX_PROMPT_BYTES:
            raise BadJob(
                f"With the results of the jobs that it comes after the prompt has {size} bytes or more.",
                hint=f"At most {MAX_PROMPT_BYTES} are taken: ask for shorter results.",
            )
        results[name] = _text(result, request.after[name])
    if not size:
        raise BadJob("With the results of the jobs that it comes after the prompt is empty.", hint="Ask something beside them.")
    return fill_prompt(prompt, results)


# ---- what parents left ----


def _result_of(workspace: Workspace, parent: str) -> bytes:
    try:
        with workspace.reading_job(parent) as (_, folder):
            proof = (read_record(folder, USAGE) or {}).get("sha256")
            result = read_file(folder, RESULT, MAX_RESULT_BYTES)
    except UnknownJob:
        raise _gone(parent) from None
    if result is None and workspace.find(parent) is None:
        raise _gone(parent)  # it is being cleaned away
    if result is None or proof not in (None, hashlib.sha256(result).hexdigest()):
        what = "is missing" if result is None else "is not what that job left there"
        raise BadJob(f"{RESULT} of {parent}, which it comes after, {what}.", hint="Somebody changed it.")
    return result


def _text(result: bytes, parent: str) -> str:
    try:
        return result.decode("utf-8")
    except UnicodeDecodeError:
        raise BadJob(f"{RESULT} of {parent}, which it comes after, is not UTF-8 text.", hint="Somebody changed it.") from None


def _gone(parent: str) -> ParentFailed:
    return ParentFailed(f"There is no job {parent} any more.", hint="This job comes after it, and was not run.")


def _failed(workspace: Workspace, parent: str) -> ParentFailed:
    """Who failed first is told, however far up it is: a job that was not run for that reason hands on what it was told."""
    error = _error_of(workspace, parent)
    message = str(error.get("message") or "it did not say why.")
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
