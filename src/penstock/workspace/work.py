"""Work: the writing side of a workspace. Submits, cancels and retries jobs; needs neither a server nor a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import BadJob, EmptyPrompt, KeyTaken, NotFinished, RequestError, UnknownJob
from penstock.workspace.store.files import FINISHED, MAX_PROMPT_BYTES, PROMPT, REQUEST, Place, key_file
from penstock.workspace.store.parents import check_placeholders
from penstock.workspace.store.recovery import cancel_unowned
from penstock.workspace.store.request import DEFAULT_PRIORITY, WorkRequest, read_job
from penstock.workspace.store.root import wrap_os_errors
from penstock.workspace.store.workspace import Workspace


class Submission(NamedTuple):
    """A submitted job; `new` is False if its key was used for it before."""

    job_id: str
    new: bool


class Work:
    """A workspace to submit jobs to; the folder is created if it does not exist.

    job = Work("nightly").submit("Summarise: ...", max_tokens=200)
    """

    def __init__(self, workspace: str | Path | Workspace) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace, create=True)

    def submit(
        self,
        prompt: str,
        *,
        model: str | None = None,
        endpoint: str | None = None,
        system: str | None = None,
        raw: bool = False,
        schema: Any = None,
        grammar: str | None = None,
        regex: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        deadline: float | None = None,
        tags: Sequence[str] = (),
        after: Sequence[str] | Mapping[str, str] = (),
        key: str | None = None,
        **sampling: Any,
    ) -> str:
        """Submit a job and return its id. When this returns, the job survives a power cut.

        endpoint: a path of the API, such as /v1/embeddings; then the prompt is the JSON body of a request to it, and the result
            that of the answer.
        key: a name of your own for the request; if it was used for the same request before, the id of that job is returned.
        after: jobs to wait for; `{{name}}` in the prompt becomes the result of the job with that name or id.
        sampling: fields of SamplingParams, such as max_tokens."""
        for name, value, what in (("tags", tags, "words"), ("after", after, "ids")):
            if isinstance(value, str):
                raise RequestError(f"{name} = {value!r} is a string.", field=name, hint=f"Give a list of {what}.")
        request = WorkRequest(
            model=model,
            endpoint=endpoint,
            system=system,
            raw=raw,
            sampling=sampling,
            schema=schema,
            grammar=grammar,
            regex=regex,
            priority=priority,
            deadline=deadline,
            tags=tuple(tags),
            after=after if isinstance(after, Mapping) else {job_id: job_id for job_id in after},
            key=key,
            submitted=round(time.time(), 3),
        )
        return self.submit_request(request, prompt).job_id

    def submit_request(self, request: WorkRequest, prompt: str) -> Submission:
        data = _checked_prompt(prompt)
        check_placeholders(prompt, request.after)
        files = {PROMPT: data, REQUEST: request.to_json()}
        if request.key is None:
            return Submission(self._new_job(files, request), new=True)
        name = key_file(request.key)
        with wrap_os_errors(self._workspace.path), self._workspace.keys_locked():
            known = self._workspace.job_of_key(name)
            if known is None or not self._is_repeat(request, data, known):
                return Submission(self._new_job(files, request, key=name), new=True)
            self._workspace.sync_submits()  # its client may have died before its own sync
            return Submission(known, new=False)

    def _new_job(self, files: Mapping[str, bytes], request: WorkRequest, *, key: str | None = None) -> str:
        parents = [*request.after.values()]
        with self._workspace.gc_blocked() if parents else nullcontext():
            for parent in parents:
                if self._workspace.find(parent) is None:
                    raise self._workspace.unknown_job(parent)
            return self._workspace.submit(files, key=key, after=parents)

    def cancel(self, job_id: str) -> Place:
        """Cancel a job, and return where it is now. A waiting job moves to `failed` at once; a running one does when its server
        sees the request; a finished one stays as it is."""
        workspace = self._workspace
        with wrap_os_errors(workspace.path):
            place = workspace.find(job_id)
            if place is None:
                raise UnknownJob(f"There is no job {job_id} in {workspace.path}.", hint="`penstock flow` lists the jobs.")
            if place in FINISHED:
                return place
            workspace.request_cancel(job_id)
            ended = cancel_unowned(workspace, job_id)
            after = ended or workspace.find(job_id)
            if after is None or after in FINISHED:
                workspace.forget_cancel(job_id)  # it ended before a server saw the request
            return after or place

    def retry(self, job_id: str, *, key: str | None = None) -> str:
        """Submit the request of a finished job again, and return the new id. The old job stays as it is. key: of the new job."""
        with self._workspace.reading_job(job_id) as (place, folder):
            if place not in FINISHED:
                raise NotFinished(f"The job {job_id} has not ended yet.", hint="Cancel it first, or wait for it.")
            try:
                request, prompt = read_job(folder)
            except BadJob:
                if self._workspace.find(job_id) is None:
                    raise self._workspace.unknown_job(job_id) from None  # it is being removed
                raise
        again = replace(request, key=key, retry_of=job_id, batch=None, submitted=round(time.time(), 3))
        return self.submit_request(again, prompt).job_id

    def _is_repeat(self, request: WorkRequest, prompt: bytes, known: str) -> bool:
        """Whether a key's job has the same request. False if that job is being removed; raises KeyTaken if it differs."""
        try:
            with self._workspace.reading_job(known) as (_, folder):
                before, known_prompt = read_job(folder)
            if before.digest(known_prompt.encode()) == request.digest(prompt):
                return True
        except UnknownJob:
            return False
        except (BadJob, RequestError):
            if self._workspace.find(known) is None:
                return False
        raise KeyTaken(f"The key {request.key!r} belongs to another request: job {known}.", hint="Use a new key for it.")


def _checked_prompt(prompt: str) -> bytes:
    if not isinstance(prompt, str):
        raise RequestError("The prompt is not a string.", field="prompt")
    try:
        data = prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("The prompt is not valid Unicode.", field="prompt", hint="Remove lone surrogates.") from None
    if not data:
        raise EmptyPrompt("The prompt is empty.", field="prompt", hint="Give at least one character.")
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"The prompt has {len(data)} bytes; the limit is {MAX_PROMPT_BYTES}.", field="prompt", hint="Make it shorter."
        )
    return data
