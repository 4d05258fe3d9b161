"""What the workspace commands share: the WORKSPACE argument, hints for queues without a server, and jobs as JSON."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

WorkspaceArgument = Annotated[
    Path, typer.Argument(metavar="WORKSPACE", help="The folder that holds the jobs.", show_default=False)
]
PROOF = ("outcome", "sha256")  # fields of usage.json that prove it whole; of no use to readers


def no_server_hint(path: Path) -> str:
    """What to do about a queue that no server works on."""
    name = shlex.quote(str(path))
    return f"No server works on this queue. Run `penstock drain {name}`, or `penstock serve --workspace {name}`."


def note(text: str) -> None:
    """Print a hint on stderr, for people at a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def status_word(status: str, served: bool) -> str:
    """A job that runs without a server was interrupted: its server died."""
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
