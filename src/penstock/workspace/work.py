"""Work: submitting jobs, cancelling them and trying them again. No server need be running, and none of the model's code is."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import BadJob, EmptyPrompt, KeyTaken, NotFinished, RequestError, UnknownJob
from penstock.workspace.store.files import FINISHED, MAX_PROMPT_BYTES, PROMPT, REQUEST, Place
from penstock.workspace.store.layout import Workspace
from penstock.workspace.store.parents import check_placeholders
from penstock.workspace.store.recovery import cancel_unowned
from penstock.workspace.store.request import DEFAULT_PRIORITY, WorkRequest, read_job
from penstock.workspace.store.root import wrap_os_errors


class Submission(NamedTuple):
    """A job that is in the workspace now; `new` is False if its key had brought it there before."""

    job_id: str
    new: bool


class Work:
    """A workspace to put jobs into; the folder is made if it does not exist.

    job = Work("nightly").submit("Summarise: ...", max_tokens=200)
    """

    def __init__(self, workspace: str | Path | Workspace) -> None:
        self._workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace, create=True)

    def submit(
        self,
        prompt: str,
        *,
        model: str | None = None,
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
        """The id of a new job, which from now on survives a power cut; of the old one, if `key` was used for the same request
        before. `sampling` are fields of SamplingParams, such as max_tokens. The job waits for those in `after`, and `{{name}}` in
        its prompt becomes the result of the one of that name; without a name it is called by its id."""
        for name, value, what in (("tags", tags, "words"), ("after", after, "ids")):
            if isinstance(value, str):
                raise RequestError(f"{name} = {value!r} is one text.", field=name, hint=f"Give a list of {what}.")
        request = WorkRequest(
            model=model,
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
            self._workspace.sync_submits()  # whoever submitted it may have died before it did
            return Submission(known, new=False)

    def _new_job(self, files: Mapping[str, bytes], request: WorkRequest, *, key: str | None = None) -> str:
        parents = [*request.after.values()]
        with self._workspace.gc_blocked() if parents else nullcontext():
            for parent in parents:
                if self._workspace.find(parent) is None:
                    raise self._workspace.unknown_job(parent)
            return self._workspace.submit(files, key=key, after=parents)

    def cancel(self, job_id: str) -> Place:
        """Ask for a job's end, and tell where it is now. One that waits ends here and now, in `failed`; a running one when its
        server sees the request, which takes a moment; a finished one stays as it is."""
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
                workspace.forget_cancel(job_id)  # it was over before anybody read the request
            return after or place

    def retry(self, job_id: str) -> str:
        """A new job with the same request, which names the old one. The old one stays as it is."""
        with self._workspace.reading_job(job_id) as (place, folder):
            if place not in FINISHED:
                raise NotFinished(f"The job {job_id} has not ended yet.", hint="Cancel it first, or wait for it.")
            try:
                request, prompt = read_job(folder)
            except BadJob:
                if self._workspace.find(job_id) is None:
                    raise self._workspace.unknown_job(job_id) from None  # it is being cleaned away
                raise
        again = replace(request, key=None, retry_of=job_id, batch=None, submitted=round(time.time(), 3))
        return self.submit_request(again, prompt).job_id

    def _is_repeat(self, request: WorkRequest, prompt: bytes, known: str) -> bool:
        """Whether a key's job is what is asked now; False if it is being cleaned away, and KeyTaken if it is something else."""
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


def key_file(key: str) -> str:
    """The name of the file that tells a key's job: keys are anybody's text, names are not."""
    return hashlib.sha256(key.encode()).hexdigest()


def _checked_prompt(prompt: str) -> bytes:
    if not isinstance(prompt, str):
        raise RequestError("The prompt is not a text.", field="prompt")
    try:
        data = prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("The prompt is not valid Unicode.", field="prompt", hint="Remove lone surrogates.") from None
    if not data:
        raise EmptyPrompt("The prompt is empty.", field="prompt", hint="Give at least one character.")
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"The prompt has {len(data)} bytes.",
            field="prompt",
            hint=f"At most {MAX_PROMPT_BYTES} are taken; models read far less.",
        )
    return data
