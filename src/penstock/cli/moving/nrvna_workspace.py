"""Looks through a workspace of nrvna-ai without changing it: what waits, what was interrupted, and what Penstock cannot run."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, WorkspaceError
from penstock.workspace.store.files import ERROR, FOLDER, MAX_RESULT_BYTES, RESULT, Place, has_file, read_file, try_lock
from penstock.workspace.store.job_id import is_job_id, order
from penstock.workspace.store.request import read_job

STATES = {
    Place.WRITING: "being written",
    Place.READY: "queued",
    Place.PROCESSING: "running",
    Place.OUTPUT: "done",
    Place.FAILED: "failed",
}
TEXT_JOB = "text"  # of type.txt
SHOWN = 10  # lines of each list

# Files that change what nrvna-ai does with a job, and that Penstock does not read.
EXTRAS = {
    "images": "images",
    "audio": "audio",
    "schema.json": "a JSON schema",
    "grammar.gbnf": "a GBNF grammar",
}


@dataclass(slots=True)
class NrvnaSurvey:
    """What a workspace holds.

    orphans: jobs that nrvnad left in `processing`; they will run again.
    unreadable: why each of these jobs would fail, or its result cannot be shown.
    other_kinds: what each of these queued jobs needs beside its prompt.
    strays: paths that are no jobs, and will be left alone.
    daemon: process id of a running nrvnad.
    model: what nrvnad noted as its model.
    """

    path: Path
    counts: dict[Place, int] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    other_kinds: dict[str, str] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    daemon: int | None = None
    model: str = ""

    @property
    def ready(self) -> bool:
        """Whether Penstock may work on it now."""
        return self.daemon is None and not self.other_kinds

    @property
    def next_command(self) -> str:
        path = shlex.quote(str(self.path))
        model = shlex.quote(self.model) if self.model.endswith(".gguf") else "MODEL.gguf"
        if self.counts[Place.READY] or self.orphans:
            return f"penstock drain {path} --model {model}"
        return f"penstock serve --workspace {path} --model {model}"

    def record(self) -> dict[str, Any]:
        """The survey as JSON."""
        return {
            "workspace": self.path.absolute(),
            "ready": self.ready,
            "counts": {state: self.counts[place] for place, state in STATES.items()},
            "orphans": self.orphans,
            "unreadable": self.unreadable,
            "other_kinds": self.other_kinds,
            "strays": self.strays,
            "nrvnad": self.daemon,
            "next": self.next_command,
        }


def survey(path: Path) -> NrvnaSurvey:
    if not (path / Place.READY).is_dir():
        what = "is not a workspace of nrvna-ai: it has no folder input/ready" if path.is_dir() else "does not exist"
        raise WorkspaceError(f"{path} {what}.", hint="Name the folder that nrvnad, wrk and flw were given.")
    found = NrvnaSurvey(path, daemon=_daemon(path), model=_model(path))
    for place in STATES:
        jobs = _jobs(found, place)
        found.counts[place] = len(jobs)
        for job_id in jobs:
            _look_at(found, place, job_id)
    return found


def describe(found: NrvnaSurvey) -> Iterator[str]:
    """The survey for people."""
    counts = ", ".join(f"{found.counts[place]} {state}" for place, state in STATES.items() if found.counts[place])
    yield f"{found.path}: {counts or 'no jobs'}. Penstock works on it in place."
    if found.orphans:
        yield from _list("Left running by nrvnad; these will run again from the start:", found.orphans)
    if found.unreadable:
        yield from _list("Cannot be read:", [f"{job_id}: {why}" for job_id, why in found.unreadable.items()])
    if found.other_kinds:
        kinds = [f"{job_id}: {kind}" for job_id, kind in found.other_kinds.items()]
        yield from _list("Not run as meant, since Penstock reads only prompt.txt; move these out of the workspace:", kinds)
    if found.strays:
        yield from _list("Left alone, since these are no jobs:", found.strays)
    if found.counts[Place.WRITING]:
        yield "Jobs that are being written are removed after an hour, unless their client finishes them."
    if found.daemon is not None:
        yield f"nrvnad is running (process {found.daemon}): stop it first, or both will take the same jobs."
    if found.model and not found.model.endswith(".gguf"):
        yield f"nrvnad last ran the model '{found.model}' here."
    yield f"{'Next' if found.ready else 'Then'}: {found.next_command}"


def _list(heading: str, lines: list[str]) -> Iterator[str]:
    yield heading
    yield from (f"  {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN} more"


def _jobs(found: NrvnaSurvey, place: Place) -> list[str]:
    """Ids of the jobs at a place, oldest first; everything else there is a stray."""
    jobs = []
    with suppress(FileNotFoundError), os.scandir(found.path / place) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if is_job_id(entry.name) and entry.is_dir(follow_symlinks=False):
                jobs.append(entry.name)
            else:
                found.strays.append(f"{place}/{entry.name}")
    return sorted(jobs, key=order)


def _look_at(found: NrvnaSurvey, place: Place, job_id: str) -> None:
    try:
        folder = os.open(found.path / place / job_id, FOLDER)
    except FileNotFoundError:  # it has just moved on
        return
    except OSError as error:
        found.unreadable[job_id] = f"{error.strerror}."
        return
    try:
        if place in (Place.READY, Place.PROCESSING):
            if place is Place.PROCESSING and try_lock(folder, shared=True):  # a Penstock server would hold its lock
                found.orphans.append(job_id)
            if kind := _other_kind(folder):
                found.other_kinds[job_id] = kind
            read_job(folder)
        elif place is not Place.WRITING:
            name = RESULT if place is Place.OUTPUT else ERROR
            if read_file(folder, name, MAX_RESULT_BYTES) is None:
                found.unreadable[job_id] = f"There is no {name}."
    except PenstockError as error:
        found.unreadable[job_id] = error.message
    except OSError as error:
        found.unreadable[job_id] = f"{error.strerror}."
    finally:
        os.close(folder)


def _other_kind(folder: int) -> str:
    """What a job needs beside its prompt; empty for a plain text job."""
    kind = (read_file(folder, "type.txt", 100) or b"").decode("utf-8", "replace").strip()
    if kind not in ("", TEXT_JOB):
        return f"a job of type {kind}"
    return ", ".join(f"with {what}" for name, what in EXTRAS.items() if has_file(folder, name))


def _daemon(path: Path) -> int | None:
    """Process id of the nrvnad that works here. Newer ones hold a lock; of older ones only the id is known."""
    try:
        pid = int((path / ".nrvnad.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        pid = 0
    with suppress(OSError), (path / ".nrvnad.lock").open("rb") as file:
        return None if try_lock(file.fileno(), shared=True) else pid
    try:
        if pid > 0:
            os.kill(pid, 0)
            return pid
    except PermissionError:  # it is another user's
        return pid
    except (ProcessLookupError, OverflowError):
        pass
    return None


def _model(path: Path) -> str:
    with suppress(OSError, ValueError, AttributeError):
        named = json.loads((path / ".nrvnad.info").read_text(encoding="utf-8")).get("model")
        if isinstance(named, str) and named:
            return named
    with suppress(OSError, ValueError):
        return (path / ".model").read_text(encoding="utf-8").strip()
    return ""
