"""Life: one process using a workspace, as client or server, that records in a ledger what it begins and what it is promised."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from penstock.errors import Cancelled, ComputeFailed, PenstockError
from penstock.workspace.flow import Flow
from penstock.workspace.store.files import FINISHED, PARTIAL, SUSPECT, Place, has_file, read_file
from penstock.workspace.store.outcomes import done, failed
from penstock.workspace.store.recovery import recover
from penstock.workspace.store.request import WorkRequest, read_job
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.work import Submission, Work
from tests.workspace.crashing import SteppingDisk
from tests.workspace.ledger import Attempt, Broken, Ledger, look, seals

SEED, FINGERPRINT_BYTES = 7, b"what is answered"
TOKENS = tuple(range(1, 9))  # what the model generates, on any server
HOURS = 1e5  # seconds: anything untouched for this long is stale


class Life:
    """Opens the workspace when first needed. `workspace_type` lets a test put a wrong one in its place."""

    def __init__(
        self,
        path: Path,
        ledger: Ledger,
        disk: SteppingDisk | None = None,
        *,
        name: str = "first",
        workspace_type: type[Workspace] = Workspace,
    ) -> None:
        self.path, self.ledger, self.disk, self.name = path, ledger, disk or SteppingDisk(), name
        self.workspace_type = workspace_type
        self.held: dict[str, HeldJob] = {}
        self.transcripts: dict[str, Transcript] = {}
        self.said: dict[str, int] = {}
        self.shown: dict[str, int] = {}
        self.ran: list[str] = []
        self._workspace: Workspace | None = None

    @property
    def workspace(self) -> Workspace:
        if self._workspace is None:
            self._workspace = self.workspace_type(self.path, create=True, disk=self.disk)
            ended = self._workspace.close.detach()  # a killed process must not close its folders again later
            assert ended is not None
            _, close, folders, _ = ended
            self._close = partial(close, *folders)
        return self._workspace

    def end(self) -> None:
        """Close what is open, as the kernel does when a process ends: nothing on disk changes."""
        for held in self.held.values():
            held.release()
        self.transcripts, self.held = {}, {}
        if self._workspace is not None:
            self._close()
            self._workspace = None

    # ---- as a client ----

    def submit(self, prompt: str, key: str | None = None) -> str:
        return self._submit(prompt, WorkRequest(key=key, submitted=1.0))

    def _submit(self, prompt: str, request: WorkRequest) -> str:
        attempt = Attempt(prompt.encode(), request.to_json(), request.key)
        self.ledger.attempt(attempt)
        try:
            job_id = Work(self.workspace).submit_request(request, prompt).job_id
        except PenstockError:
            self.ledger.refuse(attempt)
            raise
        self.ledger.acknowledge(attempt, job_id, self.workspace.find(job_id) or Place.WRITING)
        return job_id

    def retry(self, job_id: str) -> str:
        asked = self.ledger.jobs[job_id].asked
        work = Work(self.workspace)
        attempt: list[Attempt] = []

        def submit_request(request: WorkRequest, prompt: str) -> Submission:
            attempt.append(Attempt(prompt.encode(), request.to_json()))
            self.ledger.attempt(attempt[0])
            return Work.submit_request(work, request, prompt)

        work.submit_request = submit_request  # type: ignore[method-assign]
        try:
            again = work.retry(job_id)
        except PenstockError:
            if attempt:
                self.ledger.refuse(attempt[0])
            raise
        assert attempt[0].prompt == asked.prompt
        self.ledger.acknowledge(attempt[0], again, Place.READY)
        return again

    def cancel(self, job_id: str) -> Place:
        self.ledger.change(job_id, promised=False, may_fail=True)
        if self.ledger.jobs[job_id].places & {Place.READY, Place.PROCESSING}:
            self.ledger.may_move(job_id, Place.PROCESSING, Place.READY, *FINISHED)
        place = Work(self.workspace).cancel(job_id)
        if place in FINISHED:
            self.ledger.is_at(job_id, place)
        else:
            self.ledger.change(job_id, promised=True, asked_to_cancel=True)
        return place

    def gc(self) -> int:
        ended = [job_id for job_id, job in self.ledger.jobs.items() if job.places & set(FINISHED)]
        for job_id in ended:
            self.ledger.change(job_id, promised=False, cleaned=True, places=self.ledger.jobs[job_id].places | {None})
        there = {job_id for place in FINISHED for job_id in self.workspace.names(place)}
        removed = Flow(self.workspace).gc(older_than=-1).jobs
        left = {job_id for place in FINISHED for job_id in self.workspace.names(place)}
        for job_id in there.intersection(ended) - left:  # one removed by another process may come back after a power cut
            self.ledger.is_at(job_id, None)
        return removed

    # ---- as a server ----

    def claim(self, job_id: str) -> bool:
        self.ledger.may_move(job_id, Place.PROCESSING)
        held = self.workspace.claim(job_id)
        if held is not None:
            self.held[job_id] = held
        return held is not None

    def sync_claims(self) -> None:
        self.workspace.sync_claims()
        for job_id in self.held:
            self.ledger.is_at(job_id, Place.PROCESSING)

    def run_alone(self, job_id: str) -> None:
        job = self.ledger.jobs[job_id]
        self.ledger.change(job_id, promised=False, most_alone=job.most_alone + 1)
        self.workspace.record_isolated_run(self.held[job_id])
        self.ledger.change(job_id, promised=True, fewest_alone=job.fewest_alone + 1)

    def say(self, job_id: str, count: int, *, sync: bool = False) -> None:
        """Write the next tokens, after those already written."""
        held = self.held[job_id]
        if job_id not in self.transcripts:
            said = read_tokens(held.folder) or SavedTokens(SEED, FINGERPRINT_BYTES)
            if said.tokens != TOKENS[: len(said.tokens)]:
                raise Broken("a resume goes on where it stopped", f"{job_id} is said to have said {said.tokens}")
            self.transcripts[job_id] = Transcript(self.disk, held.folder, said)
            self.said[job_id], self.shown[job_id] = len(said.tokens), 0
        start, end = self.said[job_id], self.said[job_id] + count
        self.transcripts[job_id].append(TOKENS[start:end], words(self.shown[job_id], end), sync=sync)
        self.said[job_id] = self.shown[job_id] = end

    def check_said(self) -> None:
        for job_id in self.transcripts:
            folder, count = self.held[job_id].folder, self.said[job_id]
            said, text = read_tokens(folder), read_file(folder, PARTIAL, 1000)
            assert said == SavedTokens(SEED, FINGERPRINT_BYTES, TOKENS[:count])
            assert text == words(0, count)

    def finish(self, job_id: str) -> bytes:
        """Finish a job with an answer specific to this life, so that replacing another's result is detected."""
        job = self.ledger.jobs[job_id]
        answer = f"{self.name} answers: ".encode() + job.asked.prompt
        self.ledger.change(job_id, promised=False, answers=job.answers | {answer}, places=job.places | {Place.OUTPUT})
        self.workspace.finish(self.held[job_id], done(answer.decode(), {}))
        self._ended(job_id, Place.OUTPUT, answer)
        return answer

    def fail(self, job_id: str) -> None:
        job = self.ledger.jobs[job_id]
        self.ledger.change(job_id, promised=False, may_fail=True, places=job.places | {Place.FAILED})
        outcome = failed(ComputeFailed(f"{self.name} cannot"))
        self.workspace.finish(self.held[job_id], outcome)
        self._ended(job_id, Place.FAILED, outcome.text)

    def _ended(self, job_id: str, place: Place, text: bytes) -> None:
        self.ran.append(job_id)
        self.ledger.change(job_id, promised=True, end=(place, text), places=frozenset({place}))
        self._let_go(job_id)

    def give_back(self, job_id: str, *, suspect: bool = False, survived: bool = False) -> None:
        self.ledger.may_move(job_id, Place.READY)
        job = self.ledger.jobs[job_id]
        if survived:
            self.ledger.change(job_id, promised=False, fewest_alone=max(0, job.fewest_alone - 1))
        self.workspace.give_back(self.held[job_id], suspect=suspect, survived=survived)
        if survived:
            self.ledger.change(job_id, promised=True, most_alone=max(0, job.most_alone - 1))
        if suspect:
            self.ledger.change(job_id, promised=True, suspect=True)
        self.ledger.is_at(job_id, Place.READY)
        self._let_go(job_id)

    def recover(self) -> dict[str, Place]:
        for job_id, job in self.ledger.jobs.items():
            if Place.PROCESSING in job.places:
                self.ledger.may_move(job_id, Place.READY, *FINISHED)
        moved = recover(self.workspace)
        for job_id, place in moved.items():
            self.ledger.is_at(job_id, place)
            if place is Place.READY:
                self.ledger.change(job_id, promised=True, suspect=True)
        return moved

    def _let_go(self, job_id: str) -> None:
        self.held.pop(job_id).release()
        self.transcripts.pop(job_id, None)

    def moved_on(self, jobs: list[str]) -> bool:
        """Whether one of these jobs was moved and released before the error that we got."""
        gone = [job_id for job_id in jobs if job_id in self.held and self.held[job_id].folder < 0]
        for job_id in gone:
            self._let_go(job_id)
        return bool(gone)

    def run(self, job_id: str) -> None:
        """Do what a server does with one job, from claim to end; after an error, continue where it stopped."""
        if job_id not in self.held and not self.claim(job_id):
            raise Broken("nothing is stuck", f"{job_id} is ready and cannot be claimed")
        self.sync_claims()
        held = self.held[job_id]
        if self.workspace.is_cancel_requested(job_id):
            self.cancelled(job_id)
            return
        read_job(held.folder)
        if has_file(held.folder, SUSPECT):
            self.run_alone(job_id)
        if job_id not in self.transcripts:
            self.say(job_id, 0)
        self.say(job_id, len(TOKENS) - self.said[job_id])
        self.finish(job_id)

    def cancelled(self, job_id: str) -> None:
        job = self.ledger.jobs[job_id]
        if not job.may_fail:
            raise Broken("no job fails without a reason", f"nobody cancelled {job_id}")
        self.ledger.may_move(job_id, Place.FAILED)
        outcome = failed(Cancelled("The job was cancelled."))
        self.workspace.finish(self.held[job_id], outcome)
        self._ended(job_id, Place.FAILED, outcome.text)

    def run_everything(self) -> None:
        for job_id in sorted(self.workspace.names(Place.READY)):
            self.run(job_id)


def words(start: int, end: int) -> bytes:
    return b"".join(b"word %d " % number for number in range(start, end))


def restart(path: Path, ledger: Ledger, *, tidy: bool = True) -> list[str]:
    """After a restart of the machine or process: recover, run what waits, and check that all promises are kept. Return the jobs
    that ran."""
    found = look(path)
    ledger.check(found, tidy=tidy)
    keys = {asked.key: asked.prompt.decode() for asked in everything_asked(ledger) if asked.key}
    ledger.adopt(found)
    sealed = seals(path)
    life = Life(path, ledger, name="last")
    try:
        try:
            life.recover()
            ledger.check(look(path), tidy=tidy)
            for key, prompt in keys.items():
                life.submit(prompt, key)
            ledger.check(look(path), tidy=tidy)
            life.run_everything()
        except (OSError, PenstockError) as error:
            raise Broken("nothing is stuck", f"{type(error).__name__}: {error}") from error
        check_all_ended(path, ledger, tidy)
        sealed = check_sealed(sealed, path)
        before = dict(ledger.jobs)
        for key, prompt in keys.items():
            life.submit(prompt, key)
        if life.recover() or ledger.jobs.keys() != before.keys():
            raise Broken("one job for a key", f"{sorted(ledger.jobs)} after {sorted(before)}")
        life.workspace.sweep(now=HOURS + max(0.0, (path / Place.WRITING).stat().st_mtime))
        if os.listdir(path / Place.WRITING):
            raise Broken("what dead clients left is swept", str(os.listdir(path / Place.WRITING)))
        check_sealed(sealed, path)
        return life.ran
    finally:
        life.end()


def everything_asked(ledger: Ledger) -> list[Attempt]:
    return [*ledger.attempts, *(job.asked for job in ledger.jobs.values())]


def check_all_ended(path: Path, ledger: Ledger, tidy: bool = True) -> None:
    found = look(path)
    ledger.check(found, tidy=tidy)
    for job_id, places in found.items():
        if not places.keys() <= set(FINISHED):
            raise Broken("nothing is stuck", f"{job_id} is still at {sorted(places)}")


def check_sealed(sealed: dict[str, tuple[int, bytes]], path: Path) -> dict[str, tuple[int, bytes]]:
    """Check that sealed files are unchanged; return what is sealed now."""
    now = seals(path)
    changed = [os.path.relpath(file, path) for file, seal in sealed.items() if now.get(file) != seal]
    added = [os.path.relpath(file, path) for file in now if file not in sealed and os.path.dirname(file) in sealed]
    if changed or added:
        raise Broken("an end stays", f"changed: {changed}, added: {added}")
    return now
