"""A pool that goes on: one odd job, one model that is not ready, a moved folder or a crowd of new jobs hold up nobody else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EngineStopped, NotReady, WorkspaceError
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.files import PROMPT, SUSPECT, USAGE, Place
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker import pool as pool_module
from penstock.workspace.worker.pool import Pool
from penstock.workspace.worker.scanner import Scanner
from tests.workspace.queues import PATIENCE, Queue, prompts, until
from tests.workspace.runners import FakeRunner, FakeTask, text_of

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]

ID = "1000_1_1"
NOBODY = 65534


# ---- jobs that cannot be taken ----

DRAIN_AS_NOBODY = """
import os, sys
import platform, watchfiles
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker import pool
from tests.workspace.runners import FakeRunner
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({nobody})
    os.setuid({nobody})
pool.SCAN_INTERVAL_S = 0.02
working = pool.Pool(Workspace(sys.argv[1]), FakeRunner(step=0.02))
working.drain()
print(*sorted(working.blocked), working.done)
"""


def test_folders_that_cannot_be_moved_hold_up_nobody_and_are_told_once(queue: Queue) -> None:
    odd = [queue.plant(f"1000_1_{number}", {PROMPT: b"x"}) for number in (1, 2)]
    texts = prompts(3, longer_than=8)
    jobs = queue.submit(*texts)
    if os.getuid() == 0:
        for path in [queue.path.parent, *queue.path.parent.rglob("*")]:
            os.chown(path, NOBODY, NOBODY)
    for folder in odd:
        folder.chmod(0o555)
    command = [sys.executable, "-c", DRAIN_AS_NOBODY.format(nobody=NOBODY), queue.path]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (output.returncode, output.stdout) == (0, "1000_1_1 1000_1_2 3\n"), output.stderr
    queue.check(jobs, texts)
    assert queue.names(Place.READY) == {folder.name for folder in odd}
    assert [output.stderr.count(folder.name) for folder in odd] == [1, 1], output.stderr


def put_file(path: Path) -> None:
    path.write_bytes(b"x")


def put_link(path: Path) -> None:
    path.symlink_to(path.parent)


@pytest.mark.parametrize("place", [Place.READY, Place.PROCESSING])
@pytest.mark.parametrize("put", [put_file, put_link], ids=["a file", "a link"])
def test_what_only_has_a_jobs_name_is_no_job_for_anybody(queue: Queue, place: Place, put: Callable[[Path], None]) -> None:
    put(stray := queue.path / place / ID)
    before = stray.lstat()
    jobs = queue.submit("good")
    assert queue.drain() == []
    queue.check(jobs, ["good"])
    queue.flow.wait_until_idle(timeout=1)
    assert queue.flow.counts() == {Status.QUEUED: 0, Status.RUNNING: 0, Status.DONE: 1, Status.FAILED: 0}
    assert stray.lstat() == before


def test_records_that_nobody_can_read_keep_no_job_from_being_recovered(queue: Queue) -> None:
    texts = prompts(2)
    jobs = queue.submit(*texts)
    for job in jobs:
        owned(queue, job).release()  # as when the kernel closes what a dead process had open
        queue.file(job, USAGE).write_bytes(b"[" * 200_000)
    with queue.pool():
        queue.check(jobs, texts)


def test_a_job_that_cannot_be_recovered_is_told_once_and_left(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = queue.submit("odd", "good")
    for job in jobs:
        owned(queue, job).release()
    real = Workspace.count_isolated_runs

    def stumble(self: Workspace, held: HeldJob) -> int:
        if held.job_id == jobs[0]:
            raise ValueError("nobody has thought of this")
        return real(self, held)

    monkeypatch.setattr(Workspace, "count_isolated_runs", stumble)
    with queue.pool() as pool:
        queue.check(jobs[1:], ["good"])
        assert pool.blocked == {jobs[0]}
        queue.check(queue.submit("later"), ["later"])
    assert caplog.text.count("nobody has thought of this") == 1


# ---- models and engines that are not there ----


class TwoModels(FakeRunner):
    """Refuses jobs of a model that is not ready, as a node does while a part of its route is missing."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(step=0.001, made=queue.made, models=("here", "slow"))
        self.missing = {"slow"}
        queue.runners.append(self)

    def ready(self, model: str | None = None) -> bool:
        return model not in self.missing

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> FakeTask:
        if request.model in self.missing:
            raise NotReady("A part of it is missing.")
        return super().prepare(request, prompt, aborted)


def test_a_model_that_is_not_ready_holds_up_only_its_own_jobs(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = claimed_jobs(monkeypatch)
    runner, texts = TwoModels(queue), prompts(6)
    slow = queue.submit(*texts[:3], model="slow", priority=5)
    quick = queue.submit(*texts[3:], model="here")
    with queue.pool(runner, max_running=2):
        queue.check(quick, texts[3:])
        queue.check(queue.submit("later"), ["later"])
        assert not set(claims) & set(slow)
        runner.missing.clear()
        queue.check(slow, texts[:3])
    assert len(claims) == 7


def die() -> None:
    raise EngineStopped("The engine has stopped.")


def test_drain_ends_with_the_reason_when_the_engine_has_died(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, runner = queue.submit(*prompts(2)), queue.runner()
    monkeypatch.setattr(runner, "check", die)
    with pytest.raises(EngineStopped, match="The engine has stopped"):
        queue.drain(runner)
    assert queue.names(Place.READY) == set(jobs)


def test_nobody_serves_a_queue_whose_engine_has_died(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts, runner = prompts(2, longer_than=3), queue.runner(holds_at=2)
    jobs = queue.submit(*texts)
    with queue.pool(runner):
        until(lambda: len(runner.said()) == 2, "two to run")
        assert queue.flow.is_served()
        monkeypatch.setattr(runner, "check", die)
        until(lambda: not queue.flow.is_served(), "the pool to leave")
        assert queue.names(Place.READY) == set(jobs)
    assert "stopped working on" in caplog.text
    queue.drain()
    queue.check(jobs, texts)


# ---- folders that are moved under a pool ----


def test_a_folder_that_was_replaced_is_served_again(queue: Queue) -> None:
    with queue.pool():
        queue.check(queue.submit("before"), ["before"])
        remove(queue.path)
        job = Work(queue.path).submit("after")
        assert Flow(queue.path).wait(job, timeout=PATIENCE).text == text_of("after")


def test_a_folder_that_cannot_be_opened_again_at_once_is_opened_later(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Path] = []
    reopen = Workspace.reopen

    def refuse(workspace: Workspace) -> None:
        if len(refused) < 3:
            refused.append(workspace.path)
            raise WorkspaceError(f"{workspace.path} is a folder with other things in it.")
        reopen(workspace)

    with queue.pool():
        queue.check(queue.submit("before"), ["before"])
        monkeypatch.setattr(Workspace, "reopen", refuse)
        remove(queue.path)
        job = Work(queue.path).submit("after")
        assert Flow(queue.path).wait(job, timeout=PATIENCE).text == text_of("after")
    assert refused == [queue.path] * 3


def test_jobs_of_a_folder_that_was_moved_away_are_not_lost(queue: Queue) -> None:
    texts, runner = prompts(5, longer_than=4), queue.runner(holds_at=3)
    jobs = queue.submit(*texts)
    elsewhere = queue.path.parent / "elsewhere"
    with queue.pool(runner, max_running=4):
        until(lambda: list(runner.said().values()) == [3] * 4, "three tokens of four")
        queue.path.rename(elsewhere)
        runner.holds_at = None
        until(lambda: not os.listdir(elsewhere / Place.PROCESSING), "those that ran to end, or to go back")
    where = {job: place for place in (Place.READY, Place.OUTPUT) for job in os.listdir(elsewhere / place)}
    assert set(where) == set(jobs)
    assert not list(elsewhere.glob(f"*/*/{SUSPECT}"))
    moved = Workspace(elsewhere)
    Pool(moved, queue.runner()).drain()
    assert [Flow(moved).get(job).text for job in jobs] == list(map(text_of, texts))


# ---- who is still there, and who is next ----


def test_drain_does_not_miss_a_job_that_goes_back_between_two_looks(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in `processing` when drain looks into `ready`, and in `ready` when it looks into `processing`."""
    (job,) = queue.submit("it goes back")
    held, looking = owned(queue, job), []
    real_empty, real_names = Pool._is_empty, Workspace.names

    def is_empty(self: Pool) -> bool:
        looking.append(True)
        try:
            return real_empty(self)
        finally:
            looking.pop()

    def names(self: Workspace, place: Place) -> list[str]:
        if looking and place is Place.PROCESSING and held.folder >= 0:
            queue.workspace.give_back(held)
        return real_names(self, place)

    monkeypatch.setattr(Pool, "_is_empty", is_empty)
    monkeypatch.setattr(Workspace, "names", names)
    queue.drain()
    queue.check([job], ["it goes back"])


def test_drain_leaves_when_the_last_job_has_ended_and_not_at_its_next_look(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SCAN_INTERVAL_S", 10_000.0)
    monkeypatch.setattr(Scanner, "_watch", lambda *_: None)  # nothing else wakes it
    texts = prompts(3)
    jobs, pool = queue.submit(*texts), Pool(queue.workspace, queue.runner())
    drain = threading.Thread(target=pool.drain)
    drain.start()
    drain.join(timeout=PATIENCE)
    has_left = not drain.is_alive()
    pool.stop()
    assert has_left
    queue.check(jobs, texts)


class SlowToPrepare(FakeRunner):
    """Compiles the grammar of some jobs for as long as they are wanted."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(step=0.001, made=queue.made)
        self.preparing: set[str] = set()
        queue.runners.append(self)

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> FakeTask:
        if "grammar" in prompt:
            self.preparing.add(prompt)
            aborted.wait()
            raise NotReady("It was stopped.")
        return super().prepare(request, prompt, aborted)


def test_jobs_that_are_slow_to_prepare_hold_up_no_others_and_no_stop(queue: Queue) -> None:
    slow, texts = queue.submit(*(f"grammar {i}" for i in range(6)), priority=5), prompts(4)
    quick = queue.submit(*texts)
    runner = SlowToPrepare(queue)
    with queue.pool(runner, max_running=8):
        queue.check(quick, texts)
        until(lambda: len(runner.preparing) == 6, "all of them at once")
        queue.work.cancel(slow[0])
        assert queue.wait(slow[:1])[0].text == "The job was cancelled.\n"
    assert queue.names(Place.READY) == set(slow[1:])


class Reader(FakeRunner):
    """Remembers the requests that it was given."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(step=0.001, made=queue.made)
        self.requests: list[WorkRequest] = []
        queue.runners.append(self)

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> FakeTask:
        self.requests.append(request)
        return super().prepare(request, prompt, aborted)


def test_a_job_made_by_hand_is_due_after_the_time_of_its_id(queue: Queue) -> None:
    files = {PROMPT: b"by hand", "request.json": json.dumps({"deadline": 10}).encode()}
    queue.plant("4000000000_1_1", files)
    queue.submit("soon", deadline=600.0)
    runner = Reader(queue)
    queue.drain(runner, max_running=1)
    assert [end.job_id for end in queue.ends][-1] == "4000000000_1_1"
    assert [request.submitted for request in runner.requests][-1] == 4_000_000_000


@pytest.mark.parametrize("job_id", ["1700000000000000_1_1", "999999999999999999_1_1"])
def test_a_job_whose_id_counts_in_microseconds_runs_and_is_listed(queue: Queue, job_id: str) -> None:
    queue.plant(job_id, {PROMPT: b"by hand", "request.json": json.dumps({"deadline": 10, "priority": 3}).encode()})
    queue.submit("usual")
    queue.drain(max_running=1)
    assert queue.ends[0].job_id == job_id
    queue.check([job_id], ["by hand"])
    assert all(view.submitted > 0 for view in queue.flow.jobs())


# ---- a great many at once ----


def test_jobs_that_run_are_saved_while_a_crowd_of_new_ones_is_read(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [f"1000_1_{number}" for number in range(2000)]
    eyes_shut, slow, read = threading.Event(), threading.Event(), []
    slow.set()
    real_look, real_add = Scanner.scan, Scanner._add

    def look(self: Scanner) -> None:
        if not eyes_shut.is_set():  # so that all of them come at once
            real_look(self)

    def add(self: Scanner, job_id: str) -> None:
        if job_id in crowd:
            read.append(job_id)
            time.sleep(0.002 if slow.is_set() else 0)
        real_add(self, job_id)

    monkeypatch.setattr(Scanner, "scan", look)
    monkeypatch.setattr(Scanner, "_add", add)
    monkeypatch.setattr(Scanner, "_watch", lambda *_: None)
    (text,), runner = prompts(1, longer_than=5), queue.runner(holds_at=2)
    (job,) = queue.submit(text)
    with queue.pool(runner, max_running=1):
        until(lambda: runner.said() == {text: 2}, "two tokens")
        eyes_shut.set()
        for job_id in crowd:
            queue.plant(job_id, {})
        eyes_shut.clear()
        until(lambda: read, "the crowd to be read")
        runner.holds_at = 5
        until(lambda: queue.file(job, "partial.txt").read_text().count("\n") == 5, "five tokens on the disk")
        assert len(read) < len(crowd)
        slow.clear()
        runner.holds_at = None
        queue.check([job], [text])


# ---- what these tests need ----


def remove(folder: Path) -> None:
    """At one moment, as nobody sees it who looks now and then."""
    gone = folder.rename(folder.with_name("gone"))
    shutil.rmtree(gone)


def owned(queue: Queue, job: str) -> HeldJob:
    """A job in the hands of a server that lives."""
    held = queue.workspace.claim(job)
    assert held is not None
    return held


def claimed_jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom pools claim from now on, in that order."""
    claims: list[str] = []
    real = Workspace.claim

    def claim(self: Workspace, job_id: str) -> Any:
        claims.append(job_id)
        return real(self, job_id)

    monkeypatch.setattr(Workspace, "claim", claim)
    return claims
