"""Drive: takes one batch, whose lock we hold, from its input to its end. Every step can be done again after a crash.

A line that is not in the journal is a job, or becomes one; its key tells which, so that no line is two. When the job ended, that
goes to the journal first, and only then the job is thrown away. When all lines are there, the journal says which files will be
written, then they are, in the order of the input, and at last end.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from penstock.domain.job import new_job_id
from penstock.errors import BadJob, Cancelled, EngineError, KeyForbids, RequestError, UnknownJob
from penstock.workspace.batch_lines import MAX_TOLD, Line, Lines
from penstock.workspace.batches import (
    END,
    INPUT,
    BatchEnd,
    BatchRequest,
    BatchStatus,
    Counts,
    is_asked_to_end,
    read_asked,
    read_end,
)
from penstock.workspace.disk import put_file
from penstock.workspace.files import FINISHED, open_file
from penstock.workspace.flow import Flow
from penstock.workspace.journal import JOURNAL, Entry, Journal, read_entry
from penstock.workspace.layout import HeldJob, Workspace
from penstock.workspace.outcomes import told
from penstock.workspace.request import LOWEST, WorkRequest
from penstock.workspace.uploads import Uploads
from penstock.workspace.work import Work, key_file

SUBMITTING = 0.5  # seconds at a time: a disk may be slow, and somebody may want us to stop
GROUP = 500  # lines that are put into the journal together

Fact = Mapping[str, Any]
Refusal = Callable[[Mapping[str, str]], tuple[int, Mapping[str, Any]]]
"""The status and the body with which the API answers an error, of which it is given the record."""
Vet = Callable[[str | None, str | None], None]
"""Raises KeyForbids if an owner may not use a model."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallOff:
    """Why lines that have not ended never will."""

    status: BatchStatus
    code: str
    message: str

    def fact(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


CANCELLED = CallOff(BatchStatus.CANCELLED, "batch_cancelled", "The batch was cancelled before this line was done.")
REVOKED = CallOff(BatchStatus.CANCELLED, "batch_cancelled", "The key that asked for the batch is not good any more.")
EXPIRED = CallOff(BatchStatus.EXPIRED, "batch_expired", "This line was not done within the batch's completion window.")


class Drive:
    """`open` first, then `step` again and again until `over`. After an error it is of no use: another one, made of what is on the
    disk, goes on. BadJob if the folder is no batch."""

    def __init__(
        self, workspace: Workspace, held: HeldJob, refusal: Refusal, may_go_on: Callable[[str | None], bool], vet: Vet
    ) -> None:
        self.batch_id, self.over = held.job_id, False
        self._workspace, self._held = workspace, held
        self._refusal, self._may_go_on, self._vet = refusal, may_go_on, vet
        self._work, self._flow, self._uploads = Work(workspace), Flow(workspace), Uploads(workspace)
        self._journal = Journal(workspace.disk, held.folder)
        self._asked = _asked(held)
        self._input: int | None = None
        self._begun: float | None = None
        self._closing: Fact | None = None
        self._ended: dict[int, tuple[int, int, bool]] = {}  # lines in the journal: from where to where, and whether done
        self._jobs: dict[int, str] = {}  # lines that are jobs now
        self._waiting: list[int] = []  # lines that are not yet, the first at the end
        self._told_to_end: set[str] = set()  # jobs

    @property
    def due(self) -> float:
        return self._asked.due

    @property
    def told(self) -> dict[str, Any]:
        """How it ended, for the log."""
        end = read_end(self._held.folder)
        return {} if end is None else {"status": str(end.status), **dataclasses.asdict(end.counts)}

    def open(self) -> None:
        if read_end(self._held.folder) is not None:
            self.over = True
            return
        self._input = open_file(self._held.folder, INPUT)
        if self._input is None:
            raise BadJob(f"There is no {INPUT}.")
        self._lines = Lines(self._input)
        known = self._journal.open()
        for entry in known:
            self._learn(entry)
        if self._begun is not None:
            self._find_jobs()
        self._clean(known[-GROUP:])  # all before were cleaned away before these were noted

    def close(self) -> None:
        """Let others have it."""
        if self._input is not None:
            os.close(self._input)
            self._input = None
        self._held.let_go()

    def step(self, room: int) -> bool:
        """Do what can be done now, and tell whether there was anything. `room` are the jobs that it may have at once."""
        if self.over:
            return False
        if self._begun is None:
            self._validate()
            return True
        if self._closing is None and len(self._ended) < len(self._lines):
            off = self._called_off()
            changed = self._collect(off)
            return (self._submit(room) if off is None else self._end_lines(off)) or changed
        self._finish()
        return True

    # ---- what the journal tells ----

    def _learn(self, entry: Entry) -> None:
        match entry.fact:
            case {"lines": _, "at": at}:
                self._begun = at
            case {"closing": _}:
                self._closing = entry.fact
            case {"n": n}:
                self._ended[n] = (entry.start, entry.end, "body" in entry.fact)
                self._jobs.pop(n, None)

    def _note(self, facts: list[Fact]) -> None:
        noted = self._journal.append(facts)
        for entry in noted:
            self._learn(entry)
        self._clean(noted)

    def _clean(self, noted: Iterable[Entry]) -> None:
        """Throw away jobs whose ends are in the journal."""
        jobs = {entry.fact["n"]: entry.fact["job"] for entry in noted if "job" in entry.fact}
        for n in jobs:
            self._workspace.forget_key(key_file(self._key(n)))
        places = {job: self._workspace.find(job) for job in jobs.values()}
        for place in FINISHED:
            self._workspace.throw_away([job for job, where in places.items() if where is place], place)

    def _find_jobs(self) -> None:
        """Lines that are jobs already: who drove the batch before us may have died."""
        for n in range(len(self._lines) - 1, -1, -1):
            if n in self._ended:
                continue
            job = self._workspace.job_of_key(key_file(self._key(n)))
            if job is None:
                self._waiting.append(n)
            else:
                self._jobs[n] = job

    # ---- from the input to jobs ----

    def _validate(self) -> None:
        now = round(time.time(), 3)
        mistakes = []
        for mistake in self._lines.mistakes(self._asked.endpoint):
            mistakes.append(dataclasses.asdict(mistake))
            if len(mistakes) == MAX_TOLD:
                break
        if mistakes:
            self._end(BatchEnd(status=BatchStatus.FAILED, ended=now, mistakes=tuple(mistakes)))
            return
        self._note([{"lines": len(self._lines), "at": now}])
        self._find_jobs()

    def _submit(self, room: int) -> bool:
        refused: list[Fact] = []
        submitted, until = False, time.monotonic() + SUBMITTING
        while self._waiting and len(self._jobs) < room and len(refused) < GROUP and time.monotonic() < until:
            n = self._waiting[-1]
            line = self._lines.line(n)
            try:
                line.check()
                request = self._request(n, line)
                self._vet(self._asked.owner, line.model)
                self._jobs[n] = self._work.submit_request(request, json.dumps(line.body)).job_id
                submitted = True
            except (RequestError, KeyForbids) as error:
                refused.append({"n": n, "custom_id": line.custom_id, "refused": told(error)})
            self._waiting.pop()
        self._note(refused)
        return submitted or bool(refused)

    def _request(self, n: int, line: Line) -> WorkRequest:
        """The same whenever it is asked for: a key must not come with two requests."""
        return WorkRequest(
            model=line.model,
            endpoint=self._asked.endpoint,
            priority=LOWEST,
            deadline=self._asked.window,
            key=self._key(n),
            batch=self.batch_id,
            submitted=self._asked.created,
        )

    def _key(self, n: int) -> str:
        return f"{self.batch_id}/{n}"

    # ---- from jobs to the journal ----

    def _collect(self, off: CallOff | None) -> bool:
        facts: list[Fact] = []
        for n, job in list(self._jobs.items()):
            place = self._workspace.find(job)
            if place in FINISHED:
                facts.append({"n": n, "custom_id": self._lines.line(n).custom_id, "job": job, **self._outcome(job, off)})
            elif place is None:  # somebody removed it: it is asked again
                del self._jobs[n]
                self._waiting.append(n)
            if len(facts) == GROUP:
                break
        self._note(facts)
        return bool(facts)

    def _outcome(self, job: str, off: CallOff | None) -> dict[str, Any]:
        try:
            result = self._flow.get(job)
            if result.done:
                return {"body": json.loads(result.data)}
        except BadJob as error:
            return {"refused": told(error)}
        except ValueError:
            return {"refused": told(EngineError("The answer is not JSON."))}
        why = result.usage.get("error")
        if off is not None and isinstance(why, dict) and why.get("code") == Cancelled.code:
            return {"off": off.fact()}
        return {"refused": why if isinstance(why, dict) else told(EngineError(result.text.strip()))}

    # ---- calling it off ----

    def _called_off(self) -> CallOff | None:
        if is_asked_to_end(self._held.folder):
            return CANCELLED
        if not self._may_go_on(self._asked.owner):
            return REVOKED
        return EXPIRED if time.time() >= self._asked.due else None

    def _end_lines(self, off: CallOff) -> bool:
        """Lines that are no jobs yet end here; jobs are told to, and end when they hear of it."""
        jobs = set(self._jobs.values()) - self._told_to_end
        for job in jobs:
            with suppress(UnknownJob):
                self._work.cancel(job)
            self._told_to_end.add(job)
        rest = self._waiting[-GROUP:]
        self._note([{"n": n, "custom_id": self._lines.line(n).custom_id, "off": off.fact()} for n in reversed(rest)])
        del self._waiting[len(self._waiting) - len(rest) :]
        return bool(jobs or rest)

    # ---- the end ----

    def _finish(self) -> None:
        if self._closing is None:
            self._note([self._decide()])
        closing = self._closing
        assert closing is not None
        self._write(closing["output"], done=True)
        self._write(closing["errors"], done=False)
        completed = sum(done for _, _, done in self._ended.values())
        self._end(
            BatchEnd(
                status=BatchStatus(closing["closing"]),
                ended=round(time.time(), 3),
                begun=self._begun,
                finalizing=closing["at"],
                counts=Counts(len(self._ended), completed, len(self._ended) - completed),
                output_file=closing["output"],
                error_file=closing["errors"],
            )
        )

    def _decide(self) -> Fact:
        """How it ends, and the names of the files that it leaves: known before they are written, they are written once."""
        off = self._called_off()
        with self._reading() as journal:
            codes = {fact["off"]["code"] for fact in self._facts(journal, done=False) if "off" in fact}
        status = BatchStatus.COMPLETED
        if CANCELLED.code in codes or off in (CANCELLED, REVOKED):
            status = BatchStatus.CANCELLED
        elif EXPIRED.code in codes:
            status = BatchStatus.EXPIRED
        kinds = {done for _, _, done in self._ended.values()}
        ids = {done: self._free_id() if done in kinds else None for done in (True, False)}
        return {"closing": status, "at": round(time.time(), 3), "output": ids[True], "errors": ids[False]}

    def _free_id(self) -> str:
        while self._uploads.has(file_id := new_job_id()):
            pass
        return file_id

    def _write(self, file_id: str | None, *, done: bool) -> None:
        if file_id is None or self._uploads.has(file_id):
            return
        with self._reading() as journal:
            answers = (self._answer(fact) for fact in self._facts(journal, done=done))
            self._uploads.add(
                (json.dumps(answer, separators=(",", ":")).encode() + b"\n" for answer in answers),
                name=f"batch_{self.batch_id}_{'output' if done else 'error'}.jsonl",
                purpose="batch_output",
                owner=self._asked.owner,
                expires_after=self._asked.keep_output,
                file_id=file_id,
            )

    def _facts(self, journal: int, *, done: bool) -> Iterator[Fact]:
        """What is known of the lines that are done, or of the others, in the order of the input."""
        for _, (start, end, was_done) in sorted(self._ended.items()):
            if was_done is done:
                yield read_entry(journal, start, end)

    @contextmanager
    def _reading(self) -> Iterator[int]:
        file = open_file(self._held.folder, JOURNAL)
        if file is None:
            raise BadJob(f"There is no {JOURNAL} any more.")
        try:
            yield file
        finally:
            os.close(file)

    def _answer(self, fact: Fact) -> dict[str, Any]:
        """A line of the output."""
        request_id = fact.get("job") or f"{self.batch_id}_{fact['n']}"
        line = {"id": f"batch_req_{request_id}", "custom_id": fact["custom_id"], "response": None, "error": fact.get("off")}
        if "off" not in fact:
            status, body = (200, fact["body"]) if "body" in fact else self._refusal(fact["refused"])
            line["response"] = {"status_code": status, "request_id": request_id, "body": body}
        return line

    def _end(self, end: BatchEnd) -> None:
        put_file(self._workspace.disk, self._held.folder, END, end.record())
        self._workspace.disk.sync(self._held.folder)
        self.over = True


def _asked(held: HeldJob) -> BatchRequest:
    asked = read_asked(held.folder)
    if asked is None:
        raise BadJob("batch.json cannot be read.", hint="It was made by hand, or by another version.")
    return asked
