"""/jobs: the jobs of the workspace, without any text of them, and what can be done with one: cancel it, run it again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.access.keys import Caller, Keys
from penstock.doors.dispatch.dispatcher import caller_of
from penstock.doors.http.paging import LIMIT, limit_param, refuse_unknown_params
from penstock.doors.http.replies import json_reply
from penstock.doors.http.route import Route, in_dialect
from penstock.doors.http.threads import run_in_thread
from penstock.doors.jobs.backlog import Backlog
from penstock.doors.openai.errors import PENSTOCK
from penstock.engine.hosted_model import HostedModel
from penstock.errors import KeyLimit, UnknownJob
from penstock.workspace.flow import STATUS, Flow, JobView
from penstock.workspace.store.job_id import is_job_id
from penstock.workspace.store.kept_jobs import KeptJobs, job_footprint
from penstock.workspace.work import Work

DEFAULT_LIMIT, MAX_LIMIT = 100, 500
MAX_READ = 2000  # jobs searched for those of one key
RETRY_AFTER_S = 60
FIGURES = ("prompt_tokens", "completion_tokens", "seconds")  # of usage.json

JobStatusName = Literal["queued", "running", "done", "failed", "missing"]


class DiskJob(TypedDict, total=False):
    """A job of the workspace. submitted: Unix time. after: its parents, by the names under which it uses their results.

    waits_for: its parents that have not ended. will_fail: why it will not run. error: code of the error with which it failed.
    key: the name of its key, for the owner. tokens and seconds: of a job that has ended."""

    id: str
    status: JobStatusName
    submitted: float
    model: str
    tags: list[str]
    after: dict[str, str]
    waits_for: list[str]
    will_fail: str
    batch: str
    retry_of: str
    key: str
    error: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class DiskJobs(TypedDict):
    """Newest first."""

    jobs: list[DiskJob]


class JobChanged(TypedDict):
    """status: the current one; a running job is cancelled a moment later."""

    id: str
    status: JobStatusName


class JobEndpoints:
    """served: models whose open jobs can be cancelled. backlog: None without a workspace."""

    def __init__(self, served: Sequence[HostedModel], backlog: Backlog | None, keys: Keys) -> None:
        self._served = served
        self._workspace = None if backlog is None else backlog.workspace
        self._keys = keys
        self._retrying = threading.Lock()  # one retry at a time, so that each counts the jobs of those before it

    def routes(self) -> list[Route]:
        return in_dialect(
            PENSTOCK,
            [
                Route("GET", "/jobs", self.all, "List the jobs of the workspace", response=DiskJobs, parameters=(LIMIT,)),
                Route("POST", "/jobs/{job}/cancel", self.cancel, "Cancel a job of any kind", response=JobChanged),
                Route(
                    "POST",
                    "/jobs/{job}/retry",
                    self.retry,
                    "Run a job of the workspace again that has ended",
                    response=JobChanged,
                    errors=(400, 429),
                ),
            ],
        )

    async def all(self, request: Request) -> Response:
        refuse_unknown_params(request, "limit")
        limit, caller = limit_param(request, default=DEFAULT_LIMIT, maximum=MAX_LIMIT), caller_of(request)
        names = self._keys.names() if caller.owner is None else {}
        found = await run_in_thread(lambda: [_out(view, names) for view in islice(self._seen_by(caller), limit)])
        return json_reply(DiskJobs(jobs=found))

    async def cancel(self, request: Request) -> Response:
        job_id, caller = request.path_params["job"], caller_of(request)
        for model in self._served:
            for job in model.jobs.open_jobs:
                if job.job_id == job_id and _may_touch(caller, job.request.submitter) and not self._is_on_disk(job_id):
                    model.jobs.cancel(job)
                    return json_reply(JobChanged(id=job_id, status="running"))
        work = await run_in_thread(lambda: self._work(job_id, caller))
        place = await run_in_thread(lambda: work.cancel(job_id))
        return json_reply(JobChanged(id=job_id, status=STATUS[place].value))

    async def retry(self, request: Request) -> Response:
        job_id, caller = request.path_params["job"], caller_of(request)
        work = await run_in_thread(lambda: self._work(job_id, caller))
        return json_reply(JobChanged(id=await run_in_thread(lambda: self._retry(work, job_id, caller)), status="queued"))

    def _retry(self, work: Work, job_id: str, caller: Caller) -> str:
        if caller.owner is None or self._workspace is None:
            return work.retry(job_id)
        with self._retrying:
            key = KeptJobs(self._workspace).free_key(caller.owner)
            if key is None:
                raise KeyLimit(
                    "This key has reached its limit of retried jobs.",
                    retry_after=RETRY_AFTER_S,
                    hint="The operator removes those that have ended: penstock flow --gc --older-than 1d.",
                )
            with self._workspace.usage.reserve(caller.owner, job_footprint(self._workspace, job_id)):
                again = work.retry(job_id, key=key)
                self._workspace.usage.recount_jobs(caller.owner)
                return again

    def _seen_by(self, caller: Caller) -> Iterable[JobView]:
        if self._workspace is None:
            return ()
        views = Flow(self._workspace).jobs()
        if caller.owner is None:
            return views
        return (view for view in islice(views, MAX_READ) if view.request is not None and view.request.owner == caller.owner)

    def _is_on_disk(self, job_id: str) -> bool:
        return self._workspace is not None and is_job_id(job_id) and self._workspace.find(job_id) is not None

    def _work(self, job_id: str, caller: Caller) -> Work:
        """The workspace, if the caller may access this job in it. A job of another key is reported as unknown."""
        unknown = UnknownJob(f"There is no job {job_id[:80]}.", hint="GET /jobs and GET /events list the jobs.")
        if self._workspace is None or not self._is_on_disk(job_id):
            raise unknown
        request = Flow(self._workspace).describe(job_id).request
        if caller.owner is not None and (request is None or request.owner != caller.owner):
            raise unknown
        return Work(self._workspace)


def _may_touch(caller: Caller, submitter: str) -> bool:
    return caller.owner is None or submitter == caller.owner


def _out(view: JobView, names: Mapping[str, str]) -> DiskJob:
    found: dict[str, Any] = {"id": view.job_id, "status": view.status.value, "submitted": view.submitted}
    request = view.request
    if request is not None:
        found |= {
            "model": request.model,
            "tags": [*request.tags],
            "after": dict(request.after),
            "batch": request.batch,
            "retry_of": request.retry_of,
            "key": names.get(request.owner or ""),
        }
    error = view.usage.get("error")
    found |= {"waits_for": [*view.waits_for], "will_fail": view.will_fail}
    found |= {"error": error.get("code") if isinstance(error, dict) else None}
    found |= {name: view.usage.get(name) for name in FIGURES}
    return {name: value for name, value in found.items() if value not in (None, "", [], {})}  # type: ignore[return-value]
