"""`penstock flow`: list the jobs of a workspace, fetch results, wait, cancel, retry, clean up."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.jobs import flow_job
from penstock.cli.jobs.flow_jobs import for_each, named_jobs, not_ready_is_2, time_left
from penstock.cli.jobs.workspaces import OptionalWorkspace, default_folder, describe_counts, no_server_hint
from penstock.cli.options import JsonOption
from penstock.cli.prompt import STDIN, is_piped
from penstock.cli.ui.durations import METAVAR, age, parse_duration_option
from penstock.cli.ui.output import print_json
from penstock.workspace.store.job_id import is_job_id
from penstock.workspace.store.root import wrap_os_errors

if TYPE_CHECKING:
    from penstock.cli.jobs.flow_page import Survey
    from penstock.workspace.flow import Flow

DEFAULT_LIMIT = 10
EXAMPLE_ID = "1736700000_12345_0"


class Action(StrEnum):
    LIST = "the list of jobs"
    SHOW = "a JOB"
    LAST = "--last"
    WAIT = "--wait"
    FOLLOW = "--follow"
    WAIT_IDLE = "--wait-idle"
    CANCEL = "--cancel"
    RETRY = "--retry"
    CHILDREN = "--children"
    TREE = "--tree"
    GC = "--gc"


OF_ONE_JOB = (Action.WAIT, Action.FOLLOW, Action.CANCEL, Action.RETRY, Action.CHILDREN)
OF_ALL_JOBS = (Action.LAST, Action.WAIT_IDLE, Action.GC)
GOES_WITH = {
    "--timeout": (Action.WAIT, Action.FOLLOW, Action.WAIT_IDLE),
    "--tag": (Action.LIST, Action.LAST, Action.WAIT_IDLE),
    "--limit": (Action.LIST, Action.CHILDREN, Action.TREE),
    "--older-than": (Action.GC,),
    "--json": tuple(action for action in Action if action is not Action.FOLLOW),
}


def flow(
    workspace: OptionalWorkspace = None,
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="A job's id, as printed by `penstock work`; - reads one or more from stdin, as does a pipe into an option "
            "that needs a JOB.",
            show_default=False,
        ),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Print the result of the job that ended last.")] = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for JOB, then print its result.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print the result of JOB as it is generated.")] = False,
    wait_idle: Annotated[
        bool,
        typer.Option("--wait-idle", "-W", help="Wait until no job or batch is left to do, then print the counts."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(parser=parse_duration_option, metavar=METAVAR, help="Wait at most this long, such as 90s, 10m or 2h."),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel JOB, whether it waits or runs.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Submit JOB's request again, and print the new id.")] = False,
    children: Annotated[
        bool, typer.Option("--children", help="List the jobs that come after JOB (penstock work --after).")
    ] = False,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show which jobs come after which; with a JOB, only from there on.")
    ] = False,
    gc: Annotated[
        bool, typer.Option("--gc", help="Remove finished jobs and batches with their results; needs --older-than.")
    ] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration_option, metavar=METAVAR, help="For --gc: only those that ended longer ago, such as 7d."
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="WORD", help="Only jobs with this tag, in the list, for --last and --wait-idle.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"How many jobs or trees to show.  [default: {DEFAULT_LIMIT}]")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the jobs in a queue, and fetch results.

    The queue is the folder WORKSPACE, by default that of `penstock serve`. Without a JOB this counts the jobs and lists the
    newest. With one it prints its result, and nothing else.

    \b
    penstock flow nightly                    how many jobs wait, run, are done, have failed
    penstock flow nightly $job > answer.txt  a result, byte for byte
    penstock flow nightly --wait $job        the same, once it is done
    penstock flow nightly --last             the newest result
    penstock work nightly "Hi." | penstock flow nightly --wait
    penstock flow nightly - < ids.txt        the results of several jobs, each on lines of its own
    penstock flow nightly --tree             which jobs come after which
    penstock flow nightly --gc --older-than 7d

    The exit code is 0 if the job is done, 1 if it failed or does not exist, 2 if it is not ready (it waits or runs, or the
    --timeout passed), 64 for wrong usage. Of several jobs, one that failed counts more than one that is not ready.
    """
    flags = {
        Action.LAST: last,
        Action.WAIT: wait,
        Action.FOLLOW: follow,
        Action.WAIT_IDLE: wait_idle,
        Action.CANCEL: cancel,
        Action.RETRY: retry,
        Action.CHILDREN: children,
        Action.TREE: tree,
        Action.GC: gc,
    }
    if workspace is not None and job is None and _names_a_job(workspace):
        workspace, job = None, str(workspace)
    actions = [name for name, is_set in flags.items() if is_set]
    if job is None and len(actions) == 1 and actions[0] in OF_ONE_JOB and is_piped():
        job = STDIN
    action = _choose_action(actions, job)
    options = {"--timeout": timeout, "--tag": tag, "--limit": limit, "--older-than": older_than, "--json": as_json or None}
    _check_together(action, [option for option, value in options.items() if value is not None])
    if action is Action.GC and older_than is None:
        raise typer.BadParameter("It needs an age, such as --older-than 7d.", param_hint="--gc")
    if tag == "":
        raise typer.BadParameter("It is empty.", param_hint="--tag")

    from penstock.workspace.flow import Flow
    from penstock.workspace.store.workspace import Workspace

    workspace = workspace or default_folder()
    with wrap_os_errors(workspace):
        place = Workspace(workspace)
    queue = Flow(place, lambda: print(no_server_hint(place.path), file=sys.stderr, flush=True))
    with not_ready_is_2():
        match action:
            case Action.LIST:
                _list(queue, tag, limit or DEFAULT_LIMIT, as_json)
            case Action.LAST:
                flow_job.show_last(queue, tag, as_json)
            case Action.WAIT_IDLE:
                _wait_idle(queue, tag, timeout, as_json)
            case Action.GC:
                _clean(queue, older_than or 0.0, as_json)
            case Action.TREE if job is None:
                _tree(queue, None, limit or DEFAULT_LIMIT, as_json)
            case _:
                jobs = named_jobs(job or "", _example(action))
                several, left = len(jobs) > 1, time_left(timeout, jobs)
                acts: dict[Action, Callable[[str], None]] = {
                    Action.SHOW: lambda job: flow_job.show(queue, job, as_json, lines=several),
                    Action.WAIT: lambda job: flow_job.wait(queue, job, left(), as_json, lines=several),
                    Action.FOLLOW: lambda job: flow_job.follow(queue, job, left(), lines=several),
                    Action.CANCEL: lambda job: flow_job.cancel(place, job, as_json),
                    Action.RETRY: lambda job: flow_job.retry(place, job, as_json),
                    Action.CHILDREN: lambda job: _children(queue, job, limit or DEFAULT_LIMIT, as_json),
                    Action.TREE: lambda job: _tree(queue, job, limit or DEFAULT_LIMIT, as_json),
                }
                for_each(jobs, acts[action])


# ---- options that go together ----


def _names_a_job(argument: Path) -> bool:
    """Whether the only argument is a JOB of the default workspace."""
    return str(argument) == STDIN or (is_job_id(str(argument)) and not argument.exists())


def _choose_action(actions: list[Action], job: str | None) -> Action:
    if len(actions) > 1:
        raise typer.BadParameter(f"{actions[0]} and {actions[1]} cannot be combined.")
    if not actions:
        return Action.LIST if job is None else Action.SHOW
    action = actions[0]
    if action in OF_ONE_JOB and job is None:
        raise typer.BadParameter(f"Which job? For example: {_example(action)}", param_hint="JOB")
    if action in OF_ALL_JOBS and job is not None:
        raise typer.BadParameter(f"{action} applies to all jobs. Leave out {job[:80]!r}.", param_hint="JOB")
    return action


def _check_together(action: Action, options: list[str]) -> None:
    for option in options:
        if action not in GOES_WITH[option]:
            possible = " and ".join(GOES_WITH[option]) if option != "--json" else "--wait"
            raise typer.BadParameter(f"It does not go with {action}, but with {possible}.", param_hint=option)


def _example(action: Action) -> str:
    return f"penstock flow WORKSPACE {'' if action is Action.SHOW else f'{action} '}{EXAMPLE_ID}"


# ---- all jobs ----


def _list(flow: Flow, tag: str | None, limit: int, as_json: bool) -> None:
    from penstock.cli.jobs.flow_page import Survey

    with wrap_os_errors(flow.path):
        jobs = list(flow.jobs(tag=tag, limit=None if tag else limit))
        counts = _counts(flow) if tag is None else _counts_of([view.status for view in jobs])
        about = "" if tag is None else f"with the tag {tag}"
        batches = flow.open_batches() if tag is None else 0
        survey = Survey(flow.path, flow.is_served(), counts, jobs[:limit], flow.strays(), about, batches)
    _print_survey(survey, as_json)


def _print_survey(survey: Survey, as_json: bool) -> None:
    if as_json:
        print_json(survey.to_json())
    else:
        print(survey.page(_width()))


def _tree(flow: Flow, job: str | None, limit: int, as_json: bool) -> None:
    from penstock.cli.jobs.flow_page import heading
    from penstock.cli.jobs.flow_tree import forest

    with wrap_os_errors(flow.path):
        if job is not None:
            flow.describe(job)  # raises UnknownJob
        found, served = forest(flow.jobs(), job, limit), flow.is_served()
        below = found.jobs if job is None else found.below([job])
        counts = _counts_of([found.jobs[one].status for one in below])
    if as_json:
        print_json({"workspace": flow.path.absolute(), "served": served, "counts": counts, **found.to_json()})
        return
    about = "" if job is None else f"from {job} on"
    lines = found.lines(served, _width())
    print("\n".join([*heading(flow.path, about, counts, served), *([""] if lines else []), *lines]))


def _wait_idle(flow: Flow, tag: str | None, timeout: float | None, as_json: bool) -> None:
    with wrap_os_errors(flow.path):
        if any(_counts(flow)[status] for status in flow_job.OPEN) or flow.open_batches():
            flow_job.warn_if_unserved(flow)
        flow.wait_until_idle(timeout, tag=tag)
        counts = _counts(flow) if tag is None else _counts_of([view.status for view in flow.jobs(tag=tag)])
    if as_json:
        print_json({"workspace": flow.path.absolute(), "counts": counts})
    else:
        print(describe_counts(counts))


def _clean(flow: Flow, older_than: float, as_json: bool) -> None:
    with wrap_os_errors(flow.path):
        removed = flow.gc(older_than)
    if as_json:
        print_json({"removed": removed.jobs, "batches": removed.batches, "files": removed.files})
        return
    counts = {"job": removed.jobs, "batch": removed.batches, "file": removed.files}
    parts = [_some(count, what) for what, count in counts.items() if count or what == "job"]
    print(f"Removed {', '.join(parts)} that ended more than {age(older_than)} ago.")


def _some(count: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"


def _counts(flow: Flow) -> dict[str, int]:
    return {str(status): count for status, count in flow.counts().items()}


def _counts_of(statuses: list[Any]) -> dict[str, int]:
    from penstock.workspace.flow import PLACES

    found = Counter(statuses)
    return {str(status): found[status] for status in PLACES}


def _width() -> int:
    """Columns of the terminal; output that goes elsewhere is not shortened."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000


def _children(flow: Flow, job: str, limit: int, as_json: bool) -> None:
    from penstock.cli.jobs.flow_page import Survey

    with wrap_os_errors(flow.path):
        jobs = flow.children(job)
        counts = _counts_of([view.status for view in jobs])
        survey = Survey(flow.path, flow.is_served(), counts, jobs[:limit], about=f"after {job}")
    _print_survey(survey, as_json)
