"""What the workspace commands share: the WORKSPACE argument, hints for queues without a server, and jobs as JSON."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.config.state import default_workspace
from penstock.config.table import BY_KEY
from penstock.errors import ConfigError

WorkspaceArgument = Annotated[
    Path, typer.Argument(metavar="WORKSPACE", help="The folder that holds the jobs.", show_default=False)
]
OptionalWorkspace = Annotated[
    Path | None,
    typer.Argument(
        metavar="[WORKSPACE]", help="The folder that holds the jobs; by default that of `penstock serve`.", show_default=False
    ),
]
SETTING = BY_KEY["workspace.path"]
PROOF = ("outcome", "sha256")  # fields of usage.json that prove it complete; of no use to readers


def default_folder() -> Path:
    """The workspace of a server that is started without --workspace in the same environment."""
    text = os.environ.get(SETTING.variable)
    path: Path | None = SETTING.parse(text, SETTING.variable) if text else default_workspace(os.environ)
    if path is None:
        reason = f"{SETTING.variable} is {text}" if text else "HOME is not set"
        raise ConfigError(f"There is no default workspace: {reason}.", hint="Name a folder for the jobs.")
    return path


def no_server_hint(path: Path) -> str:
    """What to do about a queue that no server works on."""
    if path == default_workspace(os.environ):
        return "No server is working on this queue. Run `penstock drain`, or `penstock serve`."
    name = shlex.quote(str(path))
    return f"No server is working on this queue. Run `penstock drain {name}`, or `penstock serve --workspace {name}`."


def note(text: str) -> None:
    """Print a hint on stderr, for people at a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def status_word(status: str, served: bool) -> str:
    """The status in a word: a job that is running without a server was interrupted, since its server died."""
    return "interrupted" if status == "running" and not served else status


def describe_counts(counts: Mapping[str, int], served: bool = True) -> str:
    """`"3 queued, 1 running, 20 done."`, without zeros."""
    parts = (f"{count} {status_word(name, served)}" for name, count in counts.items() if count)
    return (", ".join(parts) or "There are no jobs") + "."


def describe_open_batches(count: int) -> str:
    return "1 batch is open." if count == 1 else f"{count} batches are open."


def job_record(job_id: str, status: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A job as JSON. `facts` is the content of its usage.json, which cannot override the fields here."""
    record = {"id": job_id, "status": status, "tokens": tokens(facts)}
    return record | {name: value for name, value in facts.items() if name not in (*PROOF, *record)}


def tokens(facts: Mapping[str, Any]) -> int | None:
    """Number of generated tokens; None if unknown."""
    count = facts.get("completion_tokens")
    return count if type(count) is int else None
