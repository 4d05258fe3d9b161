"""Ledger: what clients and servers were promised about each job, to check a workspace on disk against."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.workspace.store.files import (
    ERROR,
    FINISHED,
    ISOLATED_RUN,
    PARTIAL,
    PROMPT,
    REQUEST,
    RESULT,
    SUSPECT,
    TOKENS,
    USAGE,
    Place,
)
from penstock.workspace.store.recovery import MAX_DEATHS

ASKED_TO_CANCEL = "cancel/"  # listed with a job's files: stands for its file in `cancel`
VISIBLE = (Place.READY, Place.PROCESSING, *FINISHED)

Files = dict[str, bytes]
Found = dict[str, dict[Place, Files]]  # the visible jobs, each with its places: there should be one


class Broken(AssertionError):
    """A promise of the workspace that was not kept. `check` names the promise."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


@dataclass(frozen=True, slots=True)
class Attempt:
    """A submission that has not returned an id: the job may exist, complete, or not at all."""

    prompt: bytes
    request: bytes
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    asked: Attempt
    places: frozenset[Place | None]  # where it may be now; None: removed
    answers: frozenset[bytes] = frozenset()  # results that a server has begun to write
    end: tuple[Place, bytes] | None = None  # once seen or reported as finished, it stays so
    may_fail: bool = False  # it was cancelled, or a server let it fail
    asked_to_cancel: bool = False  # and the request was acknowledged
    cleaned: bool = False  # its removal was requested: if a power cut brings it back, its key may belong to another job
    suspect: bool = False
    fewest_alone: int = 0  # isolated runs: the least and the most that the disk may count
    most_alone: int = 0


@dataclass(slots=True)
class Ledger:
    jobs: dict[str, Job] = field(default_factory=dict)
    attempts: tuple[Attempt, ...] = ()
    forgiving: bool = False  # a job refused because of a disk error may come back, complete, after a power cut
    on_change: Callable[[bool], None] = lambda _: None  # called with whether something was promised (or else begun)

    def copy(self) -> Ledger:
        return Ledger(dict(self.jobs), self.attempts, self.forgiving)

    def change(self, job_id: str, *, promised: bool, **changes: object) -> None:
        self.jobs[job_id] = replace(self.jobs[job_id], **changes)
        self.on_change(promised)

    def may_move(self, job_id: str, *places: Place | None) -> None:
        self.change(job_id, promised=False, places=self.jobs[job_id].places | set(places))

    def is_at(self, job_id: str, place: Place | None) -> None:
        self.change(job_id, promised=True, places=frozenset({place}))

    def attempt(self, attempt: Attempt) -> None:
        self.attempts += (attempt,)
        self.on_change(False)

    def refuse(self, attempt: Attempt) -> None:
        """Record that the client got an error: from now on the job must not exist."""
        if not self.forgiving:
            self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        at = self.attempts.index(attempt)
        self.attempts = self.attempts[:at] + self.attempts[at + 1 :]
        self.on_change(True)

    def acknowledge(self, attempt: Attempt, job_id: str, place: Place) -> None:
        known = self.jobs.get(job_id)
        if known is None:
            self.jobs[job_id] = Job(attempt, frozenset({place}))
        elif known.asked.key is None or known.asked.key != attempt.key:
            raise Broken("one id, one job", f"{job_id} was given to two clients")
        else:
            self.jobs[job_id] = replace(known, places=known.places - {None})
        self._forget(attempt)

    # ---- what must be true at any time ----

    def check(self, found: Found, *, tidy: bool = True) -> None:
        """`tidy`: a finished job must have no temporary files; after a power cut, they may reappear."""
        for job_id, job in self.jobs.items():
            if job_id not in found and None not in job.places:
                raise Broken("nothing is lost", f"{job_id} is nowhere")
        unknown = list(self.attempts)
        for job_id, places in found.items():
            if len(places) != 1:
                raise Broken("one place", f"{job_id} is at {sorted(places)}")
            ((place, files),) = places.items()
            job = self.jobs.get(job_id)
            if job is None:
                asked = next((one for one in unknown if is_asked(one, files)), None)
                if asked is None or place is not Place.READY:
                    raise Broken("nothing half-written", f"nobody asked for {job_id} at {place} with {sorted(files)}")
                unknown.remove(asked)
            else:
                check_job(job_id, job, place, files, tidy)
        keys = [asked.key for asked in self._live(found) if asked.key is not None]
        if len(keys) != len(set(keys)):
            raise Broken("one job for a key", f"two jobs of {len(set(keys))} keys")

    def adopt(self, found: Found) -> None:
        """After a crash: what exists now stays, and what could have been lost has been decided."""
        for job_id in list(self.jobs):
            if job_id not in found:
                del self.jobs[job_id]
        self._meet_strangers(found)
        for job_id, places in found.items():
            ((place, files),) = places.items()
            job, alone = self.jobs[job_id], runs_alone(files)
            end = (place, ending(place, files)) if place in FINISHED else None
            self.jobs[job_id] = replace(
                job, places=frozenset({place}), end=end, suspect=SUSPECT in files, fewest_alone=alone, most_alone=alone
            )
        self.on_change(True)

    def adopt_for_now(self, found: Found) -> None:
        """After the death of a process only: a later power cut can still undo what was never acknowledged."""
        self._meet_strangers(found)
        for job_id, places in found.items():
            self.jobs[job_id] = replace(self.jobs[job_id], places=self.jobs[job_id].places | places.keys())
        self.on_change(True)

    def _meet_strangers(self, found: Found) -> None:
        for job_id, places in found.items():
            ((place, files),) = places.items()
            if job_id not in self.jobs:
                asked = next(one for one in self.attempts if is_asked(one, files))
                self.jobs[job_id] = Job(asked, frozenset({place, None}))
        self.attempts = ()

    def _live(self, found: Found) -> Iterable[Attempt]:
        for job_id, places in found.items():
            ((_, files),) = places.items()
            known = self.jobs.get(job_id)
            if known is None:
                yield next(one for one in self.attempts if is_asked(one, files))
            elif not known.cleaned:
                yield known.asked


def check_job(job_id: str, job: Job, place: Place, files: Files, tidy: bool) -> None:
    if not is_asked(job.asked, files):
        raise Broken("nothing half-written", f"{job_id} at {place} has not what was asked: {files}")
    if place not in job.places:
        raise Broken(
            "a job is where it was said to be", f"{job_id} is at {place}, and should be at {sorted(map(str, job.places))}"
        )
    if job.asked_to_cancel and place not in FINISHED and ASKED_TO_CANCEL not in files:
        raise Broken("a request to cancel stays", f"{job_id} is at {place}, and nobody is asked to cancel it")
    if job.suspect and place not in FINISHED and SUSPECT not in files:
        raise Broken("a suspect stays one", f"{job_id} at {place} has {sorted(files)}")
    if place is not Place.OUTPUT and not job.fewest_alone <= runs_alone(files) <= job.most_alone:
        counts = f"{job.fewest_alone} to {job.most_alone}"
        raise Broken("runs alone are counted", f"{job_id} at {place} has {sorted(files)}, and should have {counts}")
    if place not in FINISHED:
        return
    text = ending(place, files)
    if not text or not is_proof(files.get(USAGE, b""), "done" if place is Place.OUTPUT else "failed", text):
        raise Broken("an end is whole", f"{job_id} at {place} has {files}")
    if tidy and place is Place.OUTPUT and files.keys() & {TOKENS, PARTIAL}:
        raise Broken("an end is tidy", f"{job_id} was moved to {place} with {sorted(files)}")
    if place is Place.OUTPUT and text not in job.answers:
        raise Broken("an end is whole", f"{job_id} has {text!r}, which nobody wrote")
    if place is Place.FAILED and not job.may_fail and job.most_alone < MAX_DEATHS:
        raise Broken("no job fails without a reason", f"{job_id}: {text!r}")
    if job.end not in (None, (place, text)):
        raise Broken("an end stays", f"{job_id} was {job.end}, and is {(place, text)}")


def ending(place: Place, files: Files) -> bytes:
    return files.get(RESULT if place is Place.OUTPUT else ERROR, b"")


def runs_alone(files: Files) -> int:
    return sum(name.startswith(ISOLATED_RUN) for name in files)


def is_asked(asked: Attempt, files: Files) -> bool:
    return files.get(PROMPT) == asked.prompt and files.get(REQUEST) == asked.request


def is_proof(record: bytes, outcome: str, text: bytes) -> bool:
    try:
        output = json.loads(record)
    except ValueError:
        return False
    return output.get("outcome") == outcome and output.get("sha256") == hashlib.sha256(text).hexdigest()


# ---- reading, without any of the tested code ----


def look(path: Path) -> Found:
    """Read all visible jobs. Paths are plain strings here and in `seals`, which are called tens of thousands of times."""
    found: Found = {}
    for place in VISIBLE:
        for folder in _entries(f"{path}/{place}"):
            files = {file.name: _read(file.path) for file in _entries(folder.path)}
            if os.path.exists(f"{path}/{Place.CANCEL}/{folder.name}"):
                files[ASKED_TO_CANCEL] = b""
            found.setdefault(folder.name, {})[place] = files
    return found


def seals(path: Path) -> dict[str, tuple[int, bytes]]:
    """Everything about finished jobs that must never change again: names, bytes and modification times."""
    found = {}
    waiting = [f"{path}/{place}" for place in FINISHED]
    while waiting:
        for entry in _entries(waiting.pop()):
            is_folder = entry.is_dir(follow_symlinks=False)
            found[entry.path] = (os.stat(entry.path).st_mtime_ns, b"" if is_folder else _read(entry.path))
            if is_folder:
                waiting.append(entry.path)
    return found


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _read(file: str) -> bytes:
    """Like `Path.read_bytes`, without creating a Path and a buffer."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size + 1)
    finally:
        os.close(descriptor)
