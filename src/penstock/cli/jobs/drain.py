"""`penstock drain`: work on a queue until it is empty, then exit."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.exits import FAILED, INTERRUPTED, print_error
from penstock.cli.jobs.workspaces import OptionalWorkspace, describe_open_batches, job_record
from penstock.cli.node.logs import set_up_logging
from penstock.cli.node.old_variables import log_old_variables
from penstock.cli.node.settings import takes_some_settings
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.columns import harmless
from penstock.cli.ui.output import print_json
from penstock.config.network import NetworkConfig
from penstock.config.node import NodeConfig
from penstock.config.settings import Settings
from penstock.config.table import SETTINGS
from penstock.workspace.store.root import wrap_os_errors

if TYPE_CHECKING:
    from penstock.doors.access.keys import Keys
    from penstock.node import Drained, Node
    from penstock.workspace.worker.pool import JobEnd


# server settings have no effect here, except the folder of keys: batches of revoked keys are not worked on
SETTINGS_OF_A_DRAIN = [
    setting.key
    for setting in SETTINGS
    if setting.table not in ("server", "limits") or setting.key in ("server.keys", "limits.max_tokens")
    if setting.key not in ("workspace.path", "workspace.keep_responses")
]


@takes_some_settings(*SETTINGS_OF_A_DRAIN, network="Network to take part in; none unless this names one.")
def drain(
    settings: Settings,
    workspace: OptionalWorkspace = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each job that ends, and one with the counts.")
    ] = False,
) -> None:
    """Work on a queue and its batches until both are done.

    Submit jobs with `penstock work`, before or meanwhile; `penstock flow` fetches results. Opens no port. A server that works on
    the same folder takes its share of the jobs. This process works without a network unless --network names one, since it would
    join as the node of this machine, which may be running already.

    \b
    penstock drain nightly
    penstock drain nightly --model Qwen/Qwen2.5-0.5B-Instruct --json

    The exit code is 0 if all jobs are done, 1 if some failed or need a model that is not here. Ctrl-C puts running jobs back
    into the queue; they continue next time.
    """
    workspace = workspace or settings.node.workspace.path
    if workspace is None:
        raise typer.BadParameter("The settings name no workspace. Give the folder of the jobs.", param_hint="WORKSPACE")
    config = drain_config(workspace, settings)
    quiet = settings.sources["log.level"].source == "default"  # the bar shows the jobs
    set_up_logging(config.log.format, "warning" if quiet else config.log.level)
    log_old_variables()

    from penstock.workspace.flow import Flow, Status
    from penstock.workspace.store.workspace import Workspace

    with wrap_os_errors(workspace):
        flow = Flow(Workspace(workspace))
        has_work = any(flow.counts()[status] for status in (Status.QUEUED, Status.RUNNING)) or flow.open_batches()
    if not has_work:  # known without loading a model
        _conclude(workspace, {"done": 0, "failed": 0, "left": 0, "open_batches": 0}, as_json)
        return

    interrupt_on_signals()
    with ProgressBars() as bars, _node(config, bars) as node:
        watch = Watch(flow.path, bars, as_json)
        try:
            report = node.drain(on_end=watch)
        except KeyboardInterrupt:
            bars.clear()
            again = f"penstock drain {shlex.quote(str(workspace))}"
            before = "1 job" if watch.ended == 1 else f"{watch.ended} jobs"
            print(f"Interrupted after {before}. Running jobs went back into the queue; continue with: {again}", file=sys.stderr)
            if as_json:
                counts = {"done": watch.ended - watch.failed, "failed": watch.failed, "left": watch.left}
                print_json(counts | {"open_batches": flow.open_batches()})
            raise typer.Exit(INTERRUPTED) from None
    counts = {"done": report.done, "failed": report.failed, "left": report.left, "open_batches": report.open_batches}
    _conclude(workspace, counts, as_json)
    if report.left:
        _report_left(workspace, report)
    if report.blocked:
        print_error(f"{report.blocked} more could not be started.", "See the log above; `penstock flow` shows where they are.")
    if report.open_batches:
        why = "Their lines wait for that." if report.left else "See the log above; the next drain continues them."
        print_error(describe_open_batches(report.open_batches), why)
    if report.failed or report.left or report.blocked or report.open_batches:
        raise typer.Exit(FAILED)


def drain_config(workspace: Path, settings: Settings) -> NodeConfig:
    """Configure the node that drains a folder: without a network, unless one was named. A joined one does not count."""
    config = replace(settings.node, workspace=replace(settings.node.workspace, path=workspace))
    return replace(config, network=NetworkConfig()) if settings.sources["network.name"].source.startswith("network ") else config


def _node(config: NodeConfig, bars: ProgressBars) -> Node:
    bars.start()

    from penstock.node import Node

    return Node(config, keys=open_keys(config), progress=bars, door=False)


def open_keys(config: NodeConfig) -> Keys:
    """Open the API keys: batches of revoked keys are not worked on, and each key is limited to its models."""
    from penstock.config.api_key import key_folder
    from penstock.doors.access.keys import Keys

    return Keys(key_folder(config.server, os.environ), None)


class Watch:
    """Called with every job that ends: moves the progress bar, or prints a line of JSON."""

    def __init__(self, path: Path, bars: ProgressBars, as_json: bool) -> None:
        self.ended = 0
        self.failed = 0
        self.left = 0
        self._what = f"working on {path.name or path}"
        self._bars = bars
        self._as_json = as_json
        self._bars(self._what, 0, 0)

    def __call__(self, end: JobEnd) -> None:
        self.ended += 1
        self.failed += not end.done
        self.left = end.left
        if self._as_json:
            self._print(end)
        self._bars(self._what, self.ended, self.ended + end.left)

    def _print(self, end: JobEnd) -> None:
        try:
            print_json(job_record(end.job_id, "done" if end.done else "failed", end.facts))
            sys.stdout.flush()
        except BrokenPipeError:  # stdout was closed, but the jobs are still wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupt_on_signals() -> None:
    """Treat SIGTERM and SIGHUP like Ctrl-C: if this process died instead, its jobs would count as suspects."""
    for name in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) is not signal.SIG_IGN:  # under nohup
            signal.signal(name, signal.default_int_handler)


def _conclude(workspace: Path, counts: Mapping[str, int], as_json: bool) -> None:
    if as_json:
        print_json(counts)
    elif not any(counts.values()):
        print(f"No jobs are waiting in {workspace}.")
    else:
        left = f", {counts['left']} left" if counts["left"] else ""
        print(f"{counts['done']} done, {counts['failed']} failed{left}.")


def _report_left(workspace: Path, report: Drained) -> None:
    jobs = "1 job waits" if report.left == 1 else f"{report.left} jobs wait"
    models = [harmless(name) for name in report.models if name]
    if not models:
        print_error(f"{jobs} for a model, and none is loaded.", "Name one with --model.")
        return
    again = f"penstock drain {shlex.quote(str(workspace))} --model {shlex.quote(models[0])}"
    print_error(f"{jobs} for a model that is not loaded: {', '.join(models)}.", f"Run: {again}")
