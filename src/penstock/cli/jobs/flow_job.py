"""What `penstock flow` does with one job: show, wait, follow, cancel, retry."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.exits import FAILED, NOT_READY
from penstock.cli.jobs.workspaces import no_server_hint, note
from penstock.cli.ui.output import print_json
from penstock.errors import NotFinished, UnknownJob, WorkspaceError
from penstock.workspace.store.root import wrap_os_errors

if TYPE_CHECKING:
    from penstock.workspace.flow import Flow, JobResult
    from penstock.workspace.store.workspace import Workspace

OPEN = ("queued", "running")


def show(flow: Flow, job: str, as_json: bool, *, lines: bool = False) -> None:
    """Print the result of a job. lines: other results follow, so it ends with a new line."""
    if as_json:
        _print_record(flow, job)
        return
    with wrap_os_errors(flow.path):
        try:
            result = flow.get(job)
        except NotFinished as error:
            state = error.message
            if not flow.is_served():
                note(no_server_hint(flow.path))
                if flow.status(job) == "running":
                    state = f"The job {job} was interrupted: its server is gone."
            how = f"penstock flow {shlex.quote(str(flow.path))} --wait {job}"
            if why := flow.why_it_will_fail(job):
                hint = "Submit it again, after a job that succeeded."
                raise NotFinished(f"{state} It will fail: {why}", hint=hint) from None
            parents = ", ".join(flow.describe(job).waits_for)
            waits = f" It waits for {parents}." if parents else ""
            raise NotFinished(f"{state}{waits}", hint=f"Wait for it: {how}") from None
    _print_result(result, lines)


def show_last(flow: Flow, tag: str | None, as_json: bool) -> None:
    with wrap_os_errors(flow.path):
        job = flow.last(tag=tag)
        if job is None:
            about = "" if tag is None else f" with the tag {tag}"
            if next(flow.jobs(tag=tag, limit=1), None) is None:
                raise UnknownJob(f"There is no job{about} in {flow.path}.", hint="`penstock work` submits one.")
            hint = f"Wait for them: penstock flow {shlex.quote(str(flow.path))} --wait-idle"
            raise NotFinished(f"No job{about} has ended yet.", hint=hint)
    show(flow, job, as_json)


def wait(flow: Flow, job: str, timeout: float | None, as_json: bool, *, lines: bool = False) -> None:
    with suppress(NotFinished, UnknownJob) if as_json else nullcontext(), wrap_os_errors(flow.path):  # the record shows these too
        warn_if_unserved(flow, job)
        flow.wait(job, timeout)
    show(flow, job, as_json, lines=lines)


def follow(flow: Flow, job: str, timeout: float | None, *, lines: bool = False) -> None:
    from penstock.cli.ui.result import ResultWriter

    def pieces() -> Iterator[bytes]:
        with wrap_os_errors(flow.path):
            warn_if_unserved(flow, job)
            yield from flow.follow(job, timeout)

    writer = ResultWriter(lines=lines)
    try:
        for piece in pieces():
            writer.write(piece)
    finally:
        writer.end()
    with wrap_os_errors(flow.path):
        result = flow.get(job)
    if not result.done:
        raise _failure(result)


def cancel(place: Workspace, job: str, as_json: bool) -> None:
    from penstock.workspace.flow import STATUS, Flow, Status
    from penstock.workspace.work import Work

    with wrap_os_errors(place.path):
        before = Flow(place).status(job)
        now = STATUS[Work(place).cancel(job)]
    if as_json:
        print_json({"id": job, "status": now})
    elif now is Status.RUNNING:
        print("It is running; its server will cancel it in a moment.")
    elif now is Status.FAILED and before is not Status.FAILED:
        print("Cancelled.")
    else:
        print(f"Nothing to cancel: the job is {now} already.")


def retry(place: Workspace, job: str, as_json: bool) -> None:
    from penstock.workspace.flow import Flow
    from penstock.workspace.work import Work

    with wrap_os_errors(place.path):
        again = Work(place).retry(job)
        why = Flow(place).why_it_will_fail(again)
    if as_json:
        print_json({"id": again, "retry_of": job})
    else:
        print(again, flush=True)
    if why:
        print(f"It will fail too: {why}", file=sys.stderr, flush=True)
    if not place.is_served():
        note(f"The job is waiting. {no_server_hint(place.path)}")


def _print_result(result: JobResult, lines: bool) -> None:
    from penstock.cli.ui.result import ResultWriter

    if not result.done:
        raise _failure(result)
    writer = ResultWriter(lines=lines)
    writer.write(result.data)
    writer.end()


def _failure(result: JobResult) -> WorkspaceError:
    from penstock.cli.ui.terminal import REPLACE_CONTROL

    reason = result.text.strip().translate(REPLACE_CONTROL)
    return WorkspaceError(reason or f"The job {result.job_id} failed; no reason is recorded.")


def _print_record(flow: Flow, job: str) -> None:
    """Print everything about a job as one JSON object. The exit code is as without --json."""
    from penstock.cli.jobs.flow_page import to_json

    code = 0
    with wrap_os_errors(flow.path):
        try:
            view = flow.describe(job)
            record: dict[str, Any] = {"id": job, "status": view.status}
            if view.status in OPEN:
                code = NOT_READY
            elif (result := flow.get(job)).done:
                record["result"] = result.text
            else:
                record["error"], code = view.usage.get("error") or {"message": result.text.strip()}, FAILED
            record |= to_json(view)
        except UnknownJob as error:
            reason = {"code": error.code, "message": error.message, "hint": error.hint}
            record, code = {"id": job, "status": "missing", "error": reason}, FAILED
    print_json(record)
    if code:
        raise typer.Exit(code)


def warn_if_unserved(flow: Flow, job: str | None = None) -> None:
    """Warn before a wait that may never end; scripts too."""
    if not flow.is_served() and (job is None or flow.status(job) in OPEN):
        print(no_server_hint(flow.path), file=sys.stderr, flush=True)
