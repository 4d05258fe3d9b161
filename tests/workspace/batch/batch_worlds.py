"""Batches for tests: inputs, a server that drives them and answers their jobs step by step, and what must be true at the end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import ComputeFailed
from penstock.workspace.batch.batches import Batches, BatchView
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import Place
from penstock.workspace.store.job_id import order
from penstock.workspace.store.outcomes import done, failed
from penstock.workspace.store.recovery import recover
from penstock.workspace.store.request import read_job
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.batch_supervisor import BatchSupervisor
from penstock.workspace.worker.runner import TextWriter
from tests.workspace.ledger import Broken
from tests.workspace.runners import FakeRunner, FakeTask

ENDPOINT = "/v1/chat/completions"
DAY = 86400.0
FAILS = "FAILS"  # a body that says this ends with an error


def line(custom_id: str, url: str = ENDPOINT, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"say": custom_id, **body}}


def jsonl(lines: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def refusal(error: Mapping[str, str]) -> tuple[int, Mapping[str, Any]]:
    return 400, {"error": {"code": error["code"], "message": error["message"]}}


class Ledger:
    """Which lines were answered to the end, over all lives."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def begin(self, custom_id: str) -> None:
        if custom_id in self.done:
            raise Broken("no line is done twice", f"{custom_id} runs again")

    def end(self, custom_id: str) -> None:
        """Its result survives a power cut from now on."""
        self.done.append(custom_id)


class Server:
    """One life. Whatever happens is done by `turn`, on the caller's thread. `end` closes what is open, as the kernel would."""

    def __init__(self, path: Path, ledger: Ledger, disk: Disk | None = None, *, room: int = 8, **driver: Any) -> None:
        self.ledger = ledger
        self.workspace = Workspace(path, create=True, disk=disk)
        ended = self.workspace.close.detach()
        assert ended is not None
        _, close, folders, _ = ended
        self._close = partial(close, *folders)
        self.uploads, self.batches = Uploads(self.workspace), Batches(self.workspace)
        self.driver = BatchSupervisor(self.workspace, room=room, refusal=refusal, **driver)
        self.most_jobs = 0

    def submit(self, data: bytes, *, endpoint: str = ENDPOINT, window: float = DAY, **asked: Any) -> str:
        file = self.uploads.add([data], name="in.jsonl", purpose="batch", owner=asked.get("owner"))
        made = self.batches.create(file.file_id, endpoint=endpoint, window=window, completion_window=f"{window:g}s", **asked)
        return made.batch_id

    def recover(self) -> None:
        recover(self.workspace)

    def turn(self) -> bool:
        changed = self.driver.turn()
        self.most_jobs = max(self.most_jobs, len(self.workspace.names(Place.READY)))
        return self.answer_jobs() or changed

    def run(self) -> None:
        """Until there is nothing left to do."""
        self.recover()
        while self.turn():
            pass

    def answer_jobs(self) -> bool:
        names = sorted(self.workspace.names(Place.READY), key=order)
        for job_id in names:
            held = self.workspace.claim(job_id)
            assert held is not None
            self.workspace.sync_claims()
            _, prompt = read_job(held.folder)
            body = json.loads(prompt)
            custom_id = body["say"]
            self.ledger.begin(custom_id)
            if FAILS in prompt:
                self.workspace.finish(held, failed(ComputeFailed("The pump is broken.", hint="Call the plumber.")))
            else:
                answer = {"said": custom_id} | ({"chatter": "x" * body["chatter"]} if "chatter" in body else {})
                self.workspace.finish(held, done(json.dumps(answer), {}))
            self.ledger.end(custom_id)
        return bool(names)

    def end(self) -> None:
        self.driver.stop()
        self._close()

    def lines_of(self, file_id: str | None, owner: str | None = None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        with self.uploads.reading(file_id, owner) as chunks:
            return [json.loads(one) for one in b"".join(chunks).splitlines()]


def check_whole(server: Server, view: BatchView, ids: Sequence[str], *, bad: Sequence[str] = ()) -> None:
    """Every line has exactly one result or error, in the order of the input, and nothing of its jobs is left."""
    assert view.end is not None
    good = [one for one in ids if one not in bad]
    assert [one["custom_id"] for one in server.lines_of(view.end.output_file)] == good
    assert [one["custom_id"] for one in server.lines_of(view.end.error_file)] == [one for one in ids if one in bad]
    for one in server.lines_of(view.end.output_file):
        assert one["response"]["body"] == {"said": one["custom_id"]}
    assert (view.counts.total, view.counts.completed, view.counts.failed) == (len(ids), len(good), len(bad))
    for place in (Place.READY, Place.PROCESSING, Place.OUTPUT, Place.FAILED, Place.KEYS, Place.CANCEL):
        assert not os.listdir(server.workspace.path / place), f"something is left in {place}"
    files = {name for name in (view.request.input_file, view.end.output_file, view.end.error_file) if name}
    assert set(server.workspace.names(Place.FILES)) == files, "no file is written twice"


# ---- beside a pool ----


class _JsonWriter(TextWriter):
    def result(self, usage: Any) -> str:
        return json.dumps({"said": super().result(usage)})


class BatchRunner(FakeRunner):
    def prepare(self, request: Any, prompt: str, aborted: threading.Event) -> FakeTask:
        task = super().prepare(request, prompt, aborted)
        task.writer = _JsonWriter()
        return task


def batch_driver(workspace: Workspace) -> BatchSupervisor:
    return BatchSupervisor(workspace, room=16, refusal=refusal)
