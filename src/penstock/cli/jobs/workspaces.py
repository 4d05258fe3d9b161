"""What the commands around a workspace share: how it is named, who works on it, and jobs as JSON."""

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
PROOF = ("outcome", "sha256")  # by which a workspace knows that a job's files are whole; it says nothing to others


def no_server_hint(path: Path) -> str:
    """What to do about a queue that nobody works on."""
    name = shlex.quote(str(path))
    return f"Nobody works on this queue now. Run `penstock drain {name}`, or `penstock serve --workspace {name}`."


def note(text: str) -> None:
    """Something that helps a person; programs that read stderr are spared it."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def status_word(status: str, served: bool) -> str:
    """What runs while nobody works was interrupted: its server died."""
    return "interrupted" if status == "running" and not served else status


def describe_counts(counts: Mapping[str, int], served: bool = True) -> str:
    """`"3 queued, 1 running, 20 done."`; what there is none of is left out."""
    told = (f"{count} {status_word(name, served)}" for name, count in counts.items() if count)
    return (", ".join(told) or "There are no jobs") + "."


def describe_open_batches(count: int) -> str:
    return "1 batch is open." if count == 1 else f"{count} batches are open."


def job_record(job_id: str, status: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """A job as JSON. `facts` are those of its usage.json; it cannot overrule what we know ourselves."""
    record = {"id": job_id, "status": status, "tokens": tokens(facts)}
    return record | {name: value for name, value in facts.items() if name not in (*PROOF, *record)}


def tokens(facts: Mapping[str, Any]) -> int | None:
    """How many a job has said; None while nobody knows."""
    count = facts.get("completion_tokens")
    return count if type(count) is int else None
