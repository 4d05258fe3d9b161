"""Pools over a workspace, with a runner that needs no model: order, suspects, cancelling, stopping, and a disk in trouble."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import watchfiles

from penstock.errors import ComputeFailed
from penstock.workspace.flow import Status
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import RESULT, SUSPECT, TOKENS, USAGE, Place
from penstock.workspace.store.workspace import HeldJob, Workspace
from penstock.workspace.worker import pool as pool_module
from penstock.workspace.worker import scanner as scanner_module
from penstock.workspace.worker.pool import Pool
from tests.workspace.queues import Queue, needed, prompts, until
from tests.workspace.runners import BREAKS, REFUSED, tokens_of

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]


# ---- running ----


def test_jobs_run_side_by_side_and_results_are_exact(queue: Queue) -> None:
    texts, runner = prompts(20), queue.runner(holds_at=2)
    jobs = queue.submit(*texts)
    with queue.pool(runner):
        until(lambda: frozenset(texts) in runner.seen_together, "all to run together")
        runner.holds_at = None
        queue.check(jobs, texts)
    assert queue.tokens_made() == needed(texts)


def test_a_new_job_is_taken_when_the_kernel_tells_of_it(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SCAN_INTERVAL_S", 10_000.0)
    with queue.pool():
        until(queue.flow.is_served, "the pool to begin")
        time.sleep(0.5)  # its first look is over
        queue.check(queue.submit("late"), ["late"])


@pytest.mark.parametrize("why", ["the limit on watches was reached", "there is no such library"])
def test_jobs_are_noticed_where_the_kernel_tells_nothing(
    queue: Queue, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def watch(*args: Any, **details: Any) -> Any:
        raise OSError(errno.ENOSPC, why)

    monkeypatch.setattr(watchfiles, "watch", watch)
    if "library" in why:
        monkeypatch.setitem(sys.modules, "watchfiles", None)
    with queue.pool():
        until(lambda: "noticed with a delay" in caplog.text, "the warning")
        queue.check(queue.submit("late"), ["late"])


def test_recovery_warns_with_the_id_of_every_job_that_lost_its_server(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    texts = prompts(4)
    jobs = queue.submit(*texts)
    for job in jobs:
        owned(queue, job).release()
    queue.workspace.request_cancel(jobs[3])
    with queue.pool():
        queue.check(jobs[:3], texts[:3])
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    requeued = [f"the server of job {job} died: it will continue in isolation" for job in jobs[:3]]
    assert sorted(warnings) == sorted([*requeued, f"the server of job {jobs[3]} died: it is in failed now"])


def test_a_pool_that_stumbles_goes_on(queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever was not thought of: running jobs go back, and it begins again."""
    real, failures = scanner_module.Scanner.scan, [ValueError("nobody thought of this"), ValueError("nor of this")]

    def stumbles(scanner: Any) -> None:
        if queue.flow.counts()[Status.RUNNING] and failures:
            raise failures.pop()
        real(scanner)

    monkeypatch.setattr(scanner_module.Scanner, "scan", stumbles)
    with queue.pool(queue.runner(holds_at=2)) as pool:
        (job,) = queue.submit("first")
        until(lambda: caplog.text.count("unexpected error in the workspace") == 2, "both failures")
        assert not queue.file(job, SUSPECT).exists()
        queue.runners[-1].holds_at = None
        queue.check([job], ["first"])
        assert pool.failed == 0


def test_a_queue_is_served_while_a_pool_runs(queue: Queue) -> None:
    assert not queue.flow.is_served()
    with queue.pool():
        until(queue.flow.is_served, "the pool to begin")
        with queue.pool():
            assert queue.flow.is_served()
        assert queue.flow.is_served()
    assert not queue.flow.is_served()


def test_a_drained_queue_is_empty(queue: Queue) -> None:
    texts = prompts(30)
    jobs = queue.submit(*texts)
    assert queue.drain(max_running=4) == []
    assert queue.flow.counts() == {Status.QUEUED: 0, Status.RUNNING: 0, Status.DONE: 30, Status.FAILED: 0}
    queue.check(jobs, texts)


# ---- who is next ----


def test_ids_are_ordered_by_their_numbers(queue: Queue) -> None:
    ids = ["999_7_1", "1000_1_2", "1000_1_10", "1000_2_1", "1000_10_0"]
    for job_id in sorted(ids):
        queue.plant(job_id, {"prompt.txt": b"x"})
    queue.drain(max_running=1)
    assert [end.job_id for end in queue.ends] == ids


def test_the_order_is_priority_then_deadline_then_age(queue: Queue) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"deadline": 900.0},
        {"deadline": 60.0},
        {"priority": 3},
        {"priority": 3, "deadline": 5000.0},
        {"priority": -10, "deadline": 1.0},
        {},
    ]
    jobs = [queue.work.submit("x", **details) for details in asked]
    queue.drain(max_running=1)
    assert [jobs.index(end.job_id) for end in queue.ends] == [4, 3, 2, 1, 0, 6, 5]


def test_a_higher_priority_does_not_wait_for_a_place(queue: Queue) -> None:
    texts, runner = prompts(3, longer_than=3), queue.runner(holds_at=3)
    queue.submit(*texts)
    with queue.pool(runner, max_running=2):
        until(lambda: len(runner.said()) == 2, "two to run")
        (urgent,) = queue.submit("urgent", priority=4)
        until(lambda: "urgent" in runner.said(), "the urgent one to run")
        assert len(queue.names(Place.READY)) == 1
        runner.holds_at = None
        queue.check([urgent], ["urgent"])


def test_there_is_an_end_to_places_for_higher_priorities(queue: Queue) -> None:
    runner = queue.runner(holds_at=3)
    queue.submit(*prompts(2, longer_than=3))
    queue.submit(*prompts(6, longer_than=3, name="urgent"), priority=4)
    with queue.pool(runner, max_running=2):
        until(lambda: len(runner.said()) == 2, "two to run")
        queue.submit("more urgent", priority=9)
        until(lambda: "more urgent" in runner.said(), "the third")
        queue.submit(*prompts(6, longer_than=3, name="most urgent"), priority=10)
        until(lambda: len(runner.said()) == 4, "the fourth")
        time.sleep(0.2)
        assert len(runner.said()) == 4


def test_a_job_for_a_model_that_is_not_here_waits(queue: Queue) -> None:
    (elsewhere,) = queue.submit("x", model="another", priority=10)
    (here,) = queue.submit("y", model="fake")
    (left,) = queue.drain()
    assert (left.job_id, left.model) == (elsewhere, "another")
    assert queue.flow.status(elsewhere) is Status.QUEUED
    queue.check([here], ["y"])
    queue.drain(queue.runner(models=("another",)))
    queue.check([elsewhere], ["x"])


# ---- jobs that fail ----


def test_a_refused_job_fails_with_its_reason_and_the_others_go_on(queue: Queue) -> None:
    texts = prompts(5)
    jobs = queue.submit(*texts)
    (refused,) = queue.submit(f"this is {REFUSED}")
    queue.drain()
    result = queue.flow.get(refused)
    assert (result.status, result.text) == (Status.FAILED, "This prompt is refused. Ask something else.\n")
    assert result.usage["error"]["message"] == "This prompt is refused."
    queue.check(jobs, texts)


def test_only_who_fails_alone_pays_for_a_pass_that_failed(queue: Queue) -> None:
    texts, runner = prompts(6, longer_than=4), queue.runner(holds_at=1)
    guilty_text = f"this {BREAKS} it"
    jobs, (guilty,) = queue.submit(*texts), queue.submit(guilty_text)
    with queue.pool(runner, max_deaths=2):
        until(lambda: frozenset([*texts, guilty_text]) in runner.seen_together, "all to run together")
        runner.holds_at = None
        queue.check(jobs, texts)
        result = queue.flow.wait(guilty, timeout=60)
    assert (result.status, result.text) == (Status.FAILED, "The pass failed.\n")
    assert queue.runs_alone(guilty) == 2
    assert queue.names(Place.FAILED) == {guilty}


def test_a_suspect_runs_alone_and_nothing_is_taken_beside_it(queue: Queue) -> None:
    texts, runner = prompts(4), queue.runner()
    suspects = queue.submit("first suspect", "second suspect", priority=5)
    for job in suspects:
        queue.file(job, SUSPECT).touch()
    jobs = queue.submit(*texts)
    with queue.pool(runner):
        queue.check(jobs, texts)
        queue.check(suspects, ["first suspect", "second suspect"])
    assert all(len(together) == 1 for together in runner.seen_together if any("suspect" in text for text in together))
    assert not any(queue.runs_alone(job) > 1 for job in suspects)


def test_others_go_before_a_suspect_of_the_same_priority(queue: Queue) -> None:
    (suspect,) = queue.submit("suspect")
    queue.file(suspect, SUSPECT).touch()
    jobs = queue.submit(*prompts(6))
    queue.drain(max_running=2)
    assert {end.job_id for end in queue.ends[:-1]} == set(jobs)
    assert queue.ends[-1].job_id == suspect


def test_a_stream_of_other_jobs_does_not_starve_a_suspect(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner_module, "SUSPECT_DELAY_S", 0.2)
    (suspect,) = queue.submit("suspect")
    queue.file(suspect, SUSPECT).touch()
    leaving, submitted = threading.Event(), []

    def stream() -> None:
        while not leaving.is_set():
            submitted.extend(queue.submit("one of many"))

    client = threading.Thread(target=stream)
    client.start()
    try:
        until(lambda: len(submitted) > 20, "a queue")
        with queue.pool(max_running=2):
            queue.check([suspect], ["suspect"])
            assert queue.flow.counts()[Status.QUEUED] > 0
    finally:
        leaving.set()
        client.join()


# ---- cancelling ----


def test_a_running_job_can_be_cancelled(queue: Queue) -> None:
    (text,), runner = prompts(1, longer_than=4), queue.runner(holds_at=3)
    (job,) = queue.submit(text)
    with queue.pool(runner):
        until(lambda: runner.said() == {text: 3}, "three tokens")
        assert queue.work.cancel(job) is Place.PROCESSING
        result = queue.flow.wait(job, timeout=60)
        until(lambda: not queue.names(Place.CANCEL), "the request to be forgotten")
    assert (result.status, result.text) == (Status.FAILED, "The job was cancelled.\n")
    assert queue.file(job, "partial.txt").read_bytes() == "".join(f"{token:x} ä\r\n" for token in tokens_of(text)[:3]).encode()


def test_a_waiting_job_is_cancelled_at_once(queue: Queue) -> None:
    (job,) = queue.submit("x")
    assert queue.work.cancel(job) is Place.FAILED
    assert queue.flow.get(job).text == "The job was cancelled.\n"
    assert not queue.names(Place.CANCEL)


def test_a_job_whose_client_died_while_cancelling_is_cancelled_when_it_is_taken(queue: Queue) -> None:
    runner = queue.runner(holds_at=0)
    (job,) = queue.submit("x")
    queue.workspace.request_cancel(job)
    with queue.pool(runner):
        assert queue.flow.wait(job, timeout=60).text == "The job was cancelled.\n"


def test_a_job_whose_server_is_dead_is_cancelled_at_once(queue: Queue) -> None:
    (job,) = queue.submit("x")
    owned(queue, job).release()  # as when the kernel closes what a dead process had open
    assert queue.flow.status(job) is Status.RUNNING
    assert queue.work.cancel(job) is Place.FAILED
    assert queue.flow.get(job).text == "The job was cancelled.\n"


def test_cancelling_what_is_over_changes_nothing(queue: Queue) -> None:
    (job,) = queue.submit("x")
    queue.drain()
    before = seal(queue.file(job, ""))
    assert queue.work.cancel(job) is Place.OUTPUT
    queue.workspace.request_cancel(job)  # what a client would leave that looked just before the end
    with queue.pool():
        until(lambda: not queue.names(Place.CANCEL), "the request to be forgotten")
    assert seal(queue.file(job, "")) == before


# ---- stopping, dying, sharing ----


def test_a_stopped_pool_gives_its_jobs_back_and_the_next_goes_on_where_they_were(queue: Queue) -> None:
    texts, runner = prompts(5, longer_than=6), queue.runner(holds_at=6)
    jobs = queue.submit(*texts)
    with queue.pool(runner):
        until(lambda: runner.said() == dict.fromkeys(texts, 6), "six tokens of each")
    assert queue.names(Place.READY) == set(jobs)
    for job, text in zip(jobs, texts, strict=True):
        assert queue.said_on_disk(job) == tuple(tokens_of(text)[:6])
        assert not queue.file(job, SUSPECT).exists()
    queue.drain()
    queue.check(jobs, texts)
    assert [queue.flow.get(job).usage["resumed_tokens"] for job in jobs] == [6] * 5
    assert queue.tokens_made() == needed(texts)


def test_a_clean_stop_is_no_death_for_who_ran_alone(queue: Queue) -> None:
    (text,) = prompts(1, longer_than=5)
    (job,) = queue.submit(text)
    queue.file(job, SUSPECT).touch()
    for said in range(5):
        runner = queue.runner(holds_at=said + 1)
        with queue.pool(runner):
            until(lambda runner=runner, said=said: runner.said() == {text: said + 1}, "a token")
            assert queue.runs_alone(job) == 1
        assert queue.runs_alone(job) == 0
        assert queue.file(job, SUSPECT).exists()
    queue.drain()
    queue.check([job], [text])
    assert queue.tokens_made() == needed([text])


def test_a_pool_notices_jobs_whose_server_dies(queue: Queue) -> None:
    jobs = queue.submit("one", "two")
    theirs = [owned(queue, job) for job in jobs]
    with queue.pool():
        queue.check(queue.submit("three"), ["three"])
        assert queue.names(Place.PROCESSING) == set(jobs)
        for held in theirs:
            held.release()
        queue.check(jobs, ["one", "two"])


def test_drain_waits_for_what_runs_elsewhere(queue: Queue) -> None:
    (job,) = queue.submit("one")
    held = owned(queue, job)
    queue.submit("two")
    thread = threading.Thread(target=queue.drain)
    thread.start()
    until(lambda: len(queue.names(Place.OUTPUT)) == 1, "the other")
    time.sleep(0.2)
    assert thread.is_alive()
    held.release()
    thread.join(timeout=60)
    queue.check([job], ["one"])


def test_two_pools_share_a_queue_and_nothing_runs_twice(queue: Queue) -> None:
    texts = prompts(80)
    with queue.pool(max_running=4), queue.pool(max_running=4):
        jobs = queue.submit(*texts)
        queue.check(jobs, texts)
        until(lambda: len(queue.ends) >= len(jobs), "the pools to know")
    assert sorted(end.job_id for end in queue.ends) == sorted(jobs)
    assert queue.tokens_made() == needed(texts)


def test_nothing_is_taken_while_the_runner_is_not_ready(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = count_calls(monkeypatch, Workspace, "claim")
    turns = count_calls(monkeypatch, Pool, "_turn")
    runner = queue.runner()
    runner.is_ready = False
    texts = prompts(3)
    jobs = queue.submit(*texts)
    with queue.pool(runner):
        until(lambda: turns, "the first look")
        time.sleep(0.5)
        assert not claims
        assert len(turns) < 50, "it looks now and then, and does not spin"
        runner.is_ready = True
        queue.check(jobs, texts)
    assert len(claims) == 3


# ---- a disk in trouble ----


class TroubledDisk(Disk):
    """Refuses what `refuses` says, and counts that. Files are known by the name under which they were opened."""

    def __init__(self) -> None:
        self.full = False
        self.sick: dict[str, int] = {}  # names whose sync fails, and how often
        self.unwritable = ""
        self.refused = 0
        self._names: dict[int, str] = {}

    def make_folder(self, name: str, folder: int) -> None:
        self._need_room()
        super().make_folder(name, folder)

    def create(self, name: str, folder: int) -> int:
        self._need_room()
        file = super().create(name, folder)
        self._names[file] = name
        return file

    def append_to(self, name: str, folder: int) -> int:
        file = super().append_to(name, folder)
        self._names[file] = name
        return file

    def write(self, file: int, data: bytes) -> None:
        self._need_room()
        if self.unwritable and self._names.get(file) == self.unwritable:
            self._refuse(errno.EIO)
        super().write(file, data)

    def sync(self, file: int) -> None:
        name = self._names.get(file, "")
        if os.path.isdir(f"/proc/self/fd/{file}"):
            name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        if self.sick.get(name, 0) > 0:
            self.sick[name] -= 1
            self._refuse(errno.EIO)
        super().sync(file)

    def _need_room(self) -> None:
        if self.full:
            self._refuse(errno.ENOSPC)

    def _refuse(self, code: int) -> None:
        self.refused += 1
        raise OSError(code, os.strerror(code))


def test_a_full_disk_pauses_claims_and_loses_nothing(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    disk, runner = TroubledDisk(), queue.runner(holds_at=2)
    texts = prompts(8, longer_than=8)
    jobs = queue.submit(*texts[:4])
    with queue.pool(runner, disk=disk, max_running=8):
        until(lambda: len(runner.said()) == 4, "four to run")
        disk.full = True
        runner.holds_at = 6
        until(lambda: disk.refused, "the disk to refuse something")
        until(lambda: "not taking jobs" in caplog.text, "the pool to tell")
        jobs += queue.submit(*texts[4:])  # from a disk with room
        seen = disk.refused
        until(lambda: disk.refused > seen + 20, "more of that")
        assert queue.names(Place.READY) == set(jobs[4:])
        runner.holds_at = None  # those that run come to their end, in memory
        until(lambda: not runner.said(), "their ends")
        seen = disk.refused
        until(lambda: disk.refused > seen + 20, "more of that")
        assert queue.names(Place.READY) == set(jobs[4:])
        assert not queue.names(Place.OUTPUT)
        disk.full = False
        queue.check(jobs, texts)
    assert not queue.names(Place.FAILED)
    assert queue.tokens_made() == needed(texts)


def test_a_clean_stop_is_possible_while_the_disk_is_full(queue: Queue) -> None:
    disk, runner = TroubledDisk(), queue.runner(holds_at=2)
    texts = prompts(3, longer_than=8)
    jobs = queue.submit(*texts)
    with queue.pool(runner, disk=disk):
        until(lambda: len(runner.said()) == 3, "three to run")
        disk.full = True
        runner.holds_at = 6
        until(lambda: disk.refused, "the disk to refuse something")
    assert queue.names(Place.READY) == set(jobs)
    assert not any(queue.file(job, SUSPECT).exists() for job in jobs)
    queue.drain()
    queue.check(jobs, texts)


@pytest.mark.parametrize("name", [RESULT, USAGE, "output"])
def test_an_end_that_could_not_be_synced_is_written_again(queue: Queue, name: str) -> None:
    disk = TroubledDisk()
    disk.sick = {name: 1}
    jobs = queue.submit("one", "two")
    with queue.pool(disk=disk):
        queue.check(jobs, ["one", "two"])
        until(lambda: len(queue.ends) == 2, "the pool to know")
    assert disk.refused == 1


def test_a_job_comes_to_its_end_without_progress_on_disk(queue: Queue) -> None:
    disk, runner = TroubledDisk(), queue.runner(holds_at=3)
    disk.unwritable = TOKENS
    texts = prompts(3, longer_than=4)
    jobs = queue.submit(*texts)
    with queue.pool(runner, disk=disk):
        until(lambda: disk.refused > 3, "the disk to refuse something")
        runner.holds_at = None
        queue.check(jobs, texts)


def test_a_failed_job_comes_to_its_end_without_progress_on_disk(queue: Queue) -> None:
    disk, runner = TroubledDisk(), queue.runner(holds_at=3)
    disk.unwritable = TOKENS
    (text,) = prompts(1, longer_than=4)
    (job,) = queue.submit(text)
    with queue.pool(runner, disk=disk):
        until(lambda: disk.refused > 3, "the disk to refuse something")
        queue.work.cancel(job)
        assert queue.flow.wait(job, timeout=60).text == "The job was cancelled.\n"


def test_a_job_that_cannot_be_judged_yet_is_judged_later(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start fails as a pass does, and how often it ran alone cannot be read at first."""
    runner, refused = queue.runner(), []

    def breaks(*args: Any) -> Any:
        raise ComputeFailed("The pass failed.")

    def refuse(self: Workspace, held: HeldJob) -> int:
        if len(refused) < 3:
            refused.append(held.job_id)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, held)

    real = Workspace.count_isolated_runs
    monkeypatch.setattr(Workspace, "count_isolated_runs", refuse)
    monkeypatch.setattr(runner, "enter", breaks)
    (job,) = queue.submit("x")
    with queue.pool(runner, max_deaths=2):
        assert queue.flow.wait(job, timeout=60).text == "The pass failed.\n"


def test_a_disk_that_refuses_to_count_runs_alone_is_no_death(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = Workspace.record_isolated_run, []

    def refuse(self: Workspace, held: HeldJob) -> None:
        real(self, held)
        if len(refused) < 5:
            refused.append(held.job_id)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Workspace, "record_isolated_run", refuse)
    (job,) = queue.submit("suspect")
    queue.file(job, SUSPECT).touch()
    with queue.pool(max_deaths=3):
        queue.check([job], ["suspect"])
    assert refused == [job] * 5


# ---- what these tests need ----


def owned(queue: Queue, job: str) -> HeldJob:
    """A job in the hands of a server that lives."""
    held = queue.workspace.claim(job)
    assert held is not None
    return held


def seal(folder: Path) -> dict[str, Any]:
    """All that would show a change."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()} | {
        "": (folder.stat().st_ino, folder.stat().st_mtime_ns)
    }


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    calls: list[None] = []
    real = getattr(owner, name)

    def counted(*args: Any, **details: Any) -> Any:
        calls.append(None)
        return real(*args, **details)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_a_job_that_could_not_be_read_for_a_moment_is_not_called_blocked(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_folder, failed = Workspace.open_folder, list[str]()

    def out_of_files(workspace: Workspace, job_id: str, place: Place) -> int | None:
        if place is Place.READY and job_id not in failed:
            failed.append(job_id)
            raise OSError(errno.EMFILE, "Too many open files")
        return open_folder(workspace, job_id, place)

    monkeypatch.setattr(Workspace, "open_folder", out_of_files)
    monkeypatch.setattr(pool_module, "SCAN_INTERVAL_S", 0.05)
    (job,) = queue.submit("Read it later.")
    with queue.pool() as pool:
        until(lambda: queue.flow.status(job) is Status.DONE, "the answer")
        assert pool.blocked == set()
    assert "cannot be opened: Too many open files" in caplog.text


def test_a_running_job_that_is_removed_is_not_called_blocked(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    (text,), runner = prompts(1, longer_than=4), queue.runner(holds_at=3)
    (job,) = queue.submit(text)
    with queue.pool(runner) as pool:
        until(lambda: runner.said() == {text: 3}, "three tokens")
        (queue.path / Place.PROCESSING / job).rename(queue.path.parent / "elsewhere")
        runner.holds_at = None
        until(lambda: "it was removed" in caplog.text, "the warning")
        assert pool.blocked == set()
