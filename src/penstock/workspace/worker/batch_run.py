"""BatchRun: takes one batch, whose lock we hold, from its input to its end. Every step can be repeated after a crash.

A line that is not in the journal is a job, or becomes one; the job's key names the batch and the line, so that no line becomes
two jobs. The end of a job is written to the journal before the job is deleted. When all lines have ended, the journal gets the
ids of the output files, then these are written, and last end.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from penstock.errors import BadJob, KeyForbids, KeyTaken, RequestError, UnknownJob, UnknownModel
from penstock.workspace.batch.batches import (
    END_FILE,
    INPUT_FILE,
    BatchEnd,
    BatchStatus,
    Counts,
    is_cancel_requested,
    read_batch_request,
    read_end,
)
from penstock.workspace.batch.journal import Entry, Journal
from penstock.workspace.batch.lines import MAX_MISTAKES, BatchLine, Lines, Mistake
from penstock.workspace.batch.results import CANCELLED, EXPIRED, REVOKED, Cancellation, Fact, Refusal, Results
from penstock.workspace.flow import Flow
from penstock.workspace.store.disk import put_file
from penstock.workspace.store.files import FINISHED, Place, key_file, open_file
from penstock.workspace.store.outcomes import error_record
from penstock.workspace.store.request import MIN_PRIORITY, WorkRequest
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.answer_room import OUTPUT_LINE_BYTES, answer_bytes, fit_into_room
from penstock.workspace.worker.line_jobs import LineJob, job_bytes, outcome_of, request_of

SUBMIT_BUDGET_S = 0.5  # for one step: a disk may be slow, and a stop must not wait
MAX_NOTED_LINES = 500  # written to the journal together

IsWanted = Callable[[str | None], bool | None]
"""Whether an owner's batches should still run; None if that is unknown now: then they wait."""
Vet = Callable[[str | None, str | None], None]
"""Raises KeyForbids if an owner may not use a model."""
Accepts = Callable[[str | None], bool]
"""Whether jobs for this model are run here."""


class BatchRun:
    """One batch in progress. Call `open`, then `step` until `over`. After an error, close it and make a new one from disk.

    Raises BadJob if the folder is not a batch. Lines for models that are not served here become jobs too, since other servers may
    share the workspace; they are counted separately."""

    def __init__(
        self, workspace: Workspace, held: HeldJob, refusal: Refusal, is_wanted: IsWanted, vet: Vet, accepts: Accepts
    ) -> None:
        request = read_batch_request(held.folder)
        if request is None:
            raise BadJob("batch.json cannot be read.", hint="It was made by hand, or by another version.")
        self.batch_id = held.job_id
        self.over = False
        self._workspace = workspace
        self._held = held
        self._request = request
        self._is_wanted = is_wanted
        self._vet = vet
        self._accepts = accepts
        self._work = Work(workspace)
        self._flow = Flow(workspace)
        self._journal = Journal(workspace.disk, held.folder)
        self._results = Results(workspace, held, request, refusal)
        self._input: int | None = None
        self._begun: float | None = None
        self._total = 0
        self._cancellation: Cancellation | None = None
        self._closing: Fact | None = None
        self._jobs: dict[int, LineJob] = {}  # lines that are jobs now
        self._waiting: list[int] = []  # lines that are not jobs yet, the first at the end
        self._parked: dict[str | None, deque[int]] = {}  # likewise, by model, for models found to have no room
        self._cancelled_jobs: set[str] = set()
        self.why_waiting: str | None = None  # why its next line cannot become a job now

    @property
    def owner(self) -> str | None:
        return self._request.owner

    @property
    def due(self) -> float:
        return self._request.due

    @property
    def jobs(self) -> int:
        """Number of its jobs that can run here."""
        return self._count_jobs()[True]

    @property
    def end_summary(self) -> dict[str, Any]:
        """How it ended, for the log."""
        end = read_end(self._held.folder)
        return {} if end is None else {"status": str(end.status), **dataclasses.asdict(end.counts)}

    def open(self) -> None:
        if read_end(self._held.folder) is not None:
            self.over = True
            return
        try:
            self._open()
        except BadJob as error:
            self._fail(error)

    def close(self) -> None:
        """Release the batch, so that another server can take it."""
        if self._input is not None:
            os.close(self._input)
            self._input = None
        self._held.release()

    def step(self, room: int) -> bool:
        """Do what can be done now, and return whether there was anything.

        room: how many jobs it may have that can run here, and how many that cannot."""
        if self.over:
            return False
        try:
            changed = self._step(room)
        except BadJob as error:
            self._fail(error)
            changed = True
        if changed and not self.over:
            self._record_usage()
        return changed

    def validate(self) -> None:
        """Check the input of a new batch, which needs no model."""
        if not self.over and self._begun is None:
            self.step(0)

    def _open(self) -> None:
        self._input = open_file(self._held.folder, INPUT_FILE)
        if self._input is None:
            raise BadJob(f"There is no {INPUT_FILE}.")
        self._lines = Lines(self._input)
        last: deque[Entry] = deque(maxlen=MAX_NOTED_LINES)  # the jobs of older entries were deleted before these were written

        def learn(entry: Entry) -> None:
            self._learn(entry)
            last.append(entry)

        self._journal.open(learn)
        if self._begun is not None:
            self._find_jobs()
        self._clean(last)
        self._record_usage()

    def _step(self, room: int) -> bool:
        if self._begun is None:
            self._validate()
            return True
        if self._closing is not None or len(self._results) >= len(self._lines):
            self._finish()
            return True
        cancellation = self._check_cancellation()
        changed = self._collect(cancellation)
        if cancellation is not None:
            return self._cancel_lines(cancellation) or changed
        if self._is_wanted(self._request.owner):
            return self._submit(room) or changed
        return changed

    # ---- the journal ----

    def _learn(self, entry: Entry) -> None:
        match entry.fact:
            case {"n": n}:
                self._results.learn(entry)
                self._jobs.pop(n, None)
            case {"lines": total, "at": at}:
                self._total, self._begun = total, at
            case {"off": {"status": status, "code": code, "message": message}}:
                self._cancellation = Cancellation(BatchStatus(status), code, message)
            case {"closing": _}:
                self._closing = entry.fact

    def _note(self, facts: list[Fact]) -> None:
        noted = self._journal.append(facts)
        for entry in noted:
            self._learn(entry)
        self._clean(noted)

    def _clean(self, noted: Iterable[Entry]) -> None:
        """Delete jobs whose ends are in the journal."""
        jobs = {entry.fact["n"]: entry.fact["job"] for entry in noted if "job" in entry.fact}
        for n in jobs:
            self._workspace.forget_key(key_file(self._key(n)))
        places = {job: self._workspace.find(job) for job in jobs.values()}
        for place in FINISHED:
            self._workspace.throw_away([job for job, where in places.items() if where is place], place)

    def _find_jobs(self) -> None:
        """Find the lines that are jobs already: a server that had the batch before us may have died."""
        for n in range(len(self._lines) - 1, -1, -1):
            if n in self._results:
                continue
            job = self._workspace.job_of_key(key_file(self._key(n)))
            if job is None or (request := request_of(self._workspace, job, self.batch_id)) is None:
                self._waiting.append(n)
            else:
                self._jobs[n] = LineJob(job, request.model, self._bytes_of(n, self._lines.line(n)))

    # ---- from the input to jobs ----

    def _validate(self) -> None:
        now = round(time.time(), 3)
        mistakes = []
        for mistake in self._lines.mistakes(self._request.endpoint):
            mistakes.append(dataclasses.asdict(mistake))
            if len(mistakes) == MAX_MISTAKES:
                break
        if mistakes:
            counts = Counts(total=len(self._lines))
            self._end(BatchEnd(status=BatchStatus.FAILED, ended=now, counts=counts, mistakes=tuple(mistakes)))
            return
        self._note([{"lines": len(self._lines), "at": now}])
        self._find_jobs()

    def _submit(self, room: int) -> bool:
        refused: list[Fact] = []
        jobs, submitted, until = self._count_jobs(), False, time.monotonic() + SUBMIT_BUDGET_S
        self._take_parked(jobs, room)
        free = self._workspace.usage.room(self._request.owner)
        self.why_waiting = None
        while self._waiting and jobs[True] < room and len(refused) < MAX_NOTED_LINES and time.monotonic() < until:
            n = self._waiting[-1]
            line = self._lines.line(n)
            size, least = self._bytes_of(n, line), job_bytes(self._lines.length(n))
            if free is not None and free < (size if self._jobs else least):  # a lone line may prove shorter
                left, number = max(0, free), self._lines.number(n)
                self.why_waiting = f"This key has {left} bytes left on the disk, and line {number} may take {size}."
                break
            try:
                line.check()
                request = self._job_request(n, line)
                self._check_offered(line.model)
                self._vet(self._request.owner, line.model)
                here = self._accepts(line.model)
                if jobs[here] < room:
                    body = json.dumps(line.body, ensure_ascii=False)
                    self._jobs[n] = LineJob(self._work.submit_request(request, body).job_id, line.model, size)
                    jobs[here] += 1
                    free = None if free is None else free - size
                    submitted = True
                else:
                    self._parked.setdefault(line.model, deque()).append(n)
            except (RequestError, UnknownModel, KeyForbids, KeyTaken) as error:
                refused.append({"n": n, "custom_id": line.custom_id, "refused": error_record(error)})
            self._waiting.pop()
        self._note(refused)
        return submitted or bool(refused)

    def _bytes_of(self, n: int, line: BatchLine) -> int:
        """Estimate the bytes of a line as a job, with its answer."""
        return job_bytes(self._lines.length(n)) + answer_bytes(line.body)

    def _count_jobs(self) -> Counter[bool]:
        """Number of jobs that can run here (True), and that cannot (False)."""
        counts = Counter[bool]()
        for model, count in Counter(job.model for job in self._jobs.values()).items():
            counts[self._accepts(model)] += count
        return counts

    def _take_parked(self, jobs: Counter[bool], room: int) -> None:
        """Put as many parked lines as there is room for at the front of the waiting ones."""
        free = {here: room - jobs[here] for here in (True, False)}
        for model, lines in self._parked.items():
            here = self._accepts(model)
            taken = [lines.popleft() for _ in range(min(free[here], len(lines)))]
            free[here] -= len(taken)
            self._waiting += reversed(taken)
        self._parked = {model: lines for model, lines in self._parked.items() if lines}

    def _check_offered(self, model: str | None) -> None:
        if not self._request.offers(model):
            what = "No model is served here." if model is None else f"Model '{model[:100]}' is not served here."
            raise UnknownModel(what, hint="It was not when the batch was created. GET /v1/models lists those that are.")

    def _job_request(self, n: int, line: BatchLine) -> WorkRequest:
        """The request of a line's job. It must be the same every time: a key belongs to one request."""
        return WorkRequest(
            model=line.model,
            endpoint=self._request.endpoint,
            priority=MIN_PRIORITY,
            deadline=self._request.window,
            key=self._key(n),
            batch=self.batch_id,
            owner=self._request.owner,
            submitted=self._request.created,
        )

    def _key(self, n: int) -> str:
        return f"{self.batch_id}/{n}"

    # ---- from jobs to the journal ----

    def _collect(self, cancellation: Cancellation | None) -> bool:
        facts: list[Fact] = []
        free = self._workspace.usage.room(self._request.owner)
        for n, job in list(self._jobs.items()):
            place = self._workspace.find(job.job_id)
            if place in FINISHED:
                outcome = {"job": job.job_id, **outcome_of(self._flow, job.job_id, cancellation)}
                fact: Fact = {"n": n, "custom_id": self._lines.line(n).custom_id, **outcome}
                fact, free = fit_into_room(fact, job.bytes, free)
                facts.append(fact)
            elif place is None:  # it was removed by hand: submit it again
                del self._jobs[n]
                self._waiting.append(n)
            if len(facts) == MAX_NOTED_LINES:
                break
        self._note(facts)
        return bool(facts)

    # ---- cancelling ----

    def _check_cancellation(self) -> Cancellation | None:
        """Return why the batch is cancelled, or None. The first reason is written to the journal and holds from then on, whatever
        happens to the clock, the API key and the file."""
        cancellation = self._cancellation or self._reason_to_cancel()
        if cancellation is not None and self._cancellation is None:
            self._note([{"off": dataclasses.asdict(cancellation)}])
        return cancellation

    def _reason_to_cancel(self) -> Cancellation | None:
        if is_cancel_requested(self._held.folder):
            return CANCELLED
        if self._is_wanted(self._request.owner) is False:
            return REVOKED
        return EXPIRED if time.time() >= self._request.due else None

    def _cancel_lines(self, cancellation: Cancellation) -> bool:
        """Cancel the jobs, and end the lines that are not jobs yet."""
        jobs = {job.job_id for job in self._jobs.values()} - self._cancelled_jobs
        for job in jobs:
            with suppress(UnknownJob):
                self._work.cancel(job)
            self._cancelled_jobs.add(job)
        self._take_parked(Counter(), len(self._lines))
        rest = self._waiting[-MAX_NOTED_LINES:]
        self._note([{"n": n, "custom_id": self._lines.line(n).custom_id, "off": cancellation.fact()} for n in reversed(rest)])
        del self._waiting[len(self._waiting) - len(rest) :]
        return bool(jobs or rest)

    # ---- the end ----

    def _finish(self) -> None:
        closing = self._closing or self._decide()
        while not self._results.write(closing):
            closing = self._decide()
        self._end(
            BatchEnd(
                status=BatchStatus(closing["closing"]),
                ended=round(time.time(), 3),
                begun=self._begun,
                finalizing=closing["at"],
                counts=self._results.counts(self._total),
                output_file=closing["output"],
                error_file=closing["errors"],
            )
        )

    def _decide(self) -> Fact:
        """Decide the status and the ids of the output files, and journal them; the last decision counts. A batch cancelled after
        its last line had ended is complete."""
        status = self._cancellation.status if self._cancellation is not None and self._results.lost else BatchStatus.COMPLETED
        closing = {"closing": status, "at": round(time.time(), 3), **self._results.names(self._closing or {})}
        self._note([closing])
        return closing

    def _fail(self, error: BadJob) -> None:
        """End the batch because its files were changed or removed."""
        for job in self._jobs.values():
            with suppress(UnknownJob):
                self._work.cancel(job.job_id)
        mistake = Mistake("broken_batch", str(error))
        self._end(
            BatchEnd(
                status=BatchStatus.FAILED,
                ended=round(time.time(), 3),
                begun=self._begun,
                counts=self._results.counts(self._total),
                mistakes=(dataclasses.asdict(mistake),),
            )
        )

    def _record_usage(self) -> None:
        """Count the batch's disk usage, including its jobs and its output until they are files."""
        more = sum(job.bytes for job in self._jobs.values()) + OUTPUT_LINE_BYTES * len(self._results)
        self._workspace.usage.reread(Place.BATCHES, self.batch_id, more=0 if self.over else more)

    def _end(self, end: BatchEnd) -> None:
        put_file(self._workspace.disk, self._held.folder, END_FILE, end.record())
        self._workspace.disk.sync(self._held.folder)
        self.over = True
        self._record_usage()
