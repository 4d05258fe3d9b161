"""The output of `penstock flow`: counts of jobs, and a table of the newest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.jobs.workspaces import describe_counts, describe_open_batches, job_record, no_server_hint, status_word, tokens
from penstock.cli.ui.columns import Ink, harmless, shortened, table
from penstock.cli.ui.durations import age
from penstock.workspace.store.job_id import BATCH_PREFIX

if TYPE_CHECKING:
    from penstock.workspace.flow import JobView

HEADINGS = ["job", "status", "age", "tags", "tokens", "note"]
TAGS, NOTE = 3, 5  # columns that shrink on a narrow terminal
MAX_NOTE_COLUMNS = 100  # `penstock flow WORKSPACE JOB` prints the whole error
MAX_STRAYS_NAMED = 5


@dataclass(frozen=True, slots=True)
class Survey:
    """The state of a queue.

    counts: of all jobs, or of those that `about` describes.
    jobs: the newest of these.
    batches: number of open batches."""

    path: Path
    served: bool
    counts: Mapping[str, int]
    jobs: Sequence[JobView]
    strays: Sequence[str] = ()
    about: str = ""
    batches: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "workspace": self.path.absolute(),
            "served": self.served,
            "counts": self.counts,
            "open_batches": self.batches,
            "jobs": [to_json(view) for view in self.jobs],
            "strays": self.strays,
        }

    def page(self, width: int) -> str:
        lines = heading(self.path, self.about, self.counts, self.served, self.batches)
        if self.jobs:
            rows = [row(view, self.served) for view in self.jobs]
            lines += ["", *table(HEADINGS, rows, width, Ink(False), numbers=[2, 4], elastic=[TAGS, NOTE])]
        hidden = sum(self.counts.values()) - len(self.jobs)
        if self.jobs and hidden > 0:
            lines += ["", f"{hidden} more: use --limit N to see more."]
        if self.strays:
            lines += ["", _of_strays(self.path, self.strays)]
        return "\n".join(lines)


def heading(path: Path, about: str, counts: Mapping[str, int], served: bool, batches: int = 0) -> list[str]:
    lines = [f"{path}{about and ' ' + harmless(about)}: {describe_counts(counts, served)}"]
    if batches:
        lines.append(describe_open_batches(batches))
    if (counts["queued"] or counts["running"] or batches) and not served:
        lines.append(no_server_hint(path))
    return lines


def to_json(view: JobView) -> dict[str, Any]:
    """A job as JSON, without its result."""
    import json

    request = None if view.request is None else json.loads(view.request.to_json())
    more = {"submitted": view.submitted, "waits_for": view.waits_for, "will_fail": view.will_fail or None, "request": request}
    return job_record(view.job_id, view.status, view.usage) | more


def row(view: JobView, served: bool) -> list[str]:
    count = tokens(view.usage)
    return [
        view.job_id,
        status_word(view.status, served),
        age(time.time() - view.submitted),
        harmless(", ".join(view.request.tags)) if view.request else "?",
        "" if count is None else str(count),
        shortened(harmless(_note(view)), MAX_NOTE_COLUMNS, tail=0.0),
    ]


def _note(view: JobView) -> str:
    """How a job ended, or why it will fail, or what it waits for."""
    error = view.usage.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message") or error.get("code") or "")
    if view.will_fail:
        return f"will fail: {view.will_fail}"
    isolated = ["runs in isolation, since its server died"] if view.suspect else []
    parents = [f"waits for {', '.join(view.waits_for)}"] if view.waits_for else []
    model = [f"needs {view.request.model}"] if view.status == "queued" and view.request and view.request.model else []
    batch = [f"of {BATCH_PREFIX}{view.request.batch}"] if view.request and view.request.batch else []
    return str(view.usage.get("finish_reason") or ", ".join([*isolated, *parents, *model, *batch]))


def _of_strays(path: Path, strays: Sequence[str]) -> str:
    names = ", ".join(harmless(sorted(strays)[:MAX_STRAYS_NAMED]))
    more = f" and {len(strays) - MAX_STRAYS_NAMED} more" if len(strays) > MAX_STRAYS_NAMED else ""
    return f"Ignored in {path / 'input' / 'ready'}, since they are not jobs: {names}{more}."
