"""Clients of a workspace, while others clean, cancel and copy it: each gets its answer, or the real reason why there is none."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.prompt import MAX_PROMPT_BYTES
from penstock.config.node import MAX_WORKSPACE_JOBS, WorkspaceConfig
from penstock.errors import ConfigError, KeyTaken, RequestError, UnknownJob, WorkspaceError
from penstock.workspace import flow as flow_module
from penstock.workspace import work as work_module
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import ERROR, PROMPT, RESULT, USAGE, Place
from penstock.workspace.store.outcomes import done
from penstock.workspace.store.recovery import recover
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests.jobs import in_this_process
from tests.workspace.queues import PATIENCE, Queue, prompts, until

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]

ID = "1000_1_1"


class FullFor(Disk):
    """A disk without space for files of some names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create(self, name: str, folder: int) -> int:
        if name == self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(name, folder)


class Stuck(Disk):
    """A disk that cannot move some jobs."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def move(self, name: str, source: int, target: int) -> None:
        if name in self.names:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        super().move(name, source, target)


# ---- cancelling ----


@pytest.mark.parametrize("who", ["another client", "recovery"])
def test_a_client_that_failed_to_cancel_holds_nothing_up(queue: Queue, who: str) -> None:
    (job,) = queue.submit("x")
    client = Work(Workspace(queue.path, disk=FullFor(ERROR)))
    with pytest.raises(WorkspaceError, match="The disk is full"):
        client.cancel(job)
    if who == "recovery":
        assert recover(queue.workspace) == {job: Place.FAILED}
    else:
        assert queue.work.cancel(job) is Place.FAILED
    assert queue.flow.get(job).text == "The job was cancelled.\n"
    assert not queue.names(Place.CANCEL)


@pytest.mark.parametrize("model", [None, "another"], ids=["for a model that is here", "for one that is not"])
def test_a_waiting_job_is_cancelled_for_a_client_that_died_asking(queue: Queue, model: str | None) -> None:
    runner = queue.runner(holds_at=1)
    queue.submit(*prompts(1, longer_than=2))
    (job,) = queue.submit("unwanted", model=model)
    with queue.pool(runner, max_running=1):
        until(lambda: len(runner.said()) == 1, "the first to run")
        queue.workspace.request_cancel(job)
        assert queue.flow.wait(job, timeout=PATIENCE).text == "The job was cancelled.\n"
        until(lambda: not queue.names(Place.CANCEL), "the request to be forgotten")
        until(lambda: [(end.job_id, end.done) for end in queue.ends] == [(job, False)], "the pool to count it")


def test_a_job_that_was_over_before_it_was_cancelled_counts_as_done(queue: Queue) -> None:
    runner, outcome = queue.runner(), done("its result", {})
    runner.is_ready = False
    queue.plant(ID, {PROMPT: b"x", RESULT: outcome.text, USAGE: outcome.record()})
    with queue.pool(runner):
        queue.workspace.request_cancel(ID)
        until(lambda: queue.ends, "its end")
    assert [(end.job_id, end.done) for end in queue.ends] == [(ID, True)]
    assert queue.flow.get(ID).text == "its result"


# ---- keys ----


def test_the_same_request_in_other_words_has_the_same_key(queue: Queue) -> None:
    job = queue.work.submit("x", key="k", temperature=1, max_tokens=5, deadline=60)
    assert queue.work.submit("x", key="k", max_tokens=5, temperature=1.0, deadline=60.0) == job
    assert queue.work.submit("x", deadline=60, max_tokens=5, temperature=1, key="k") == job
    assert queue.names(Place.READY) == {job}


@pytest.mark.parametrize("other", [{"temperature": 1.1}, {"temperature": 1, "priority": 1}, {"temperature": 1, "raw": True}, {}])
def test_another_request_does_not_get_a_keys_job(queue: Queue, other: dict[str, Any]) -> None:
    queue.work.submit("x", key="k", temperature=1)
    with pytest.raises(KeyTaken):
        queue.work.submit("x", key="k", **other)


def test_a_key_whose_job_is_moved_to_the_trash_meanwhile_gets_a_new_job(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    job = finished_job(queue, key="k")

    def job_of_key(self: Workspace, key: str) -> str | None:
        known = real(self, key)
        throw_away(queue, job)
        return known

    real = Workspace.job_of_key
    monkeypatch.setattr(Workspace, "job_of_key", job_of_key)
    check_new_job(queue, job)


def test_a_key_whose_job_loses_its_files_meanwhile_gets_a_new_job(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    job = finished_job(queue, key="k")
    before(monkeypatch, work_module, "read_job", lambda: throw_away(queue, job))
    check_new_job(queue, job)


def check_new_job(queue: Queue, old: str) -> None:
    new = queue.work.submit("x", key="k")
    assert new != old
    assert queue.names(Place.READY) == {new}
    queue.flow.gc(older_than=0)
    assert queue.work.submit("x", key="k") == new


# ---- reading while others clean ----


def test_a_list_goes_on_beside_a_job_whose_record_is_a_link(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = queue.submit("one", "two")
    queue.drain()
    queue.file(jobs[0], USAGE).unlink()
    queue.file(jobs[0], USAGE).symlink_to("/etc/hostname")
    assert {view.job_id: view.usage.get("outcome") for view in queue.flow.jobs()} == {jobs[0]: None, jobs[1]: "done"}
    code, out, _ = in_this_process(monkeypatch, capsys, "flow", queue.path)
    assert code == 0
    assert all(job in out for job in jobs)


def test_a_job_that_is_cleaned_away_while_it_is_read_is_unknown_and_not_broken(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished_job(queue)
    before(monkeypatch, flow_module, "read_record", lambda: throw_away(queue, job))
    with pytest.raises(UnknownJob, match="There is no job"):
        queue.flow.get(job)


def test_a_job_that_is_cleaned_away_while_it_is_tried_again_is_unknown_and_not_broken(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished_job(queue)
    before(monkeypatch, work_module, "read_job", lambda: throw_away(queue, job))
    with pytest.raises(UnknownJob, match="There is no job"):
        queue.work.retry(job)


def test_cleaning_goes_on_when_one_job_cannot_be_moved(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    jobs = queue.submit(*prompts(4))
    queue.drain()
    cleaner = Flow(Workspace(queue.path, disk=Stuck(*jobs[1:3])))
    time.sleep(0.01)
    assert cleaner.gc(older_than=0).jobs == 2
    assert queue.names(Place.OUTPUT) == set(jobs[1:3])
    assert caplog.text.count(": Permission denied") == 2


def test_what_cannot_be_removed_from_the_trash_keeps_nobody_from_being_cleaned_away(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(Disk):
        def remove_folder(self, name: str, folder: int) -> None:
            if name == first:
                raise PermissionError(errno.EACCES, "Permission denied")
            super().remove_folder(name, folder)

    first, second = queue.submit("first", "second")
    queue.drain()
    cleaner = Flow(Workspace(queue.path, disk=Stubborn()))
    assert cleaner.gc(older_than=-1).jobs == 2
    assert cleaner.gc(older_than=-1).jobs == 0
    assert cleaner.status(first) == cleaner.status(second) == "missing"
    assert f"cannot remove {first}" in caplog.text


def test_threads_that_list_one_folder_at_once_see_all_of_it(queue: Queue) -> None:
    jobs = {queue.plant(f"1000_1_{number}", {}).name for number in range(200)}
    seen: list[set[str]] = []

    def look() -> None:
        seen.extend(set(queue.workspace.names(Place.READY)) for _ in range(100))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found for found in seen if found != jobs] == []


# ---- opening ----


@pytest.mark.parametrize("dropped", [["trash", "cancel", "keys", "input/writing"], ["input/writing", "input/ready", "input"]])
def test_a_workspace_that_was_copied_without_its_empty_folders_can_be_used(queue: Queue, dropped: list[str]) -> None:
    for name in dropped:
        (queue.path / name).rmdir()
    job = Work(queue.path).submit("x", key="k")
    copied = Flow(queue.path)
    assert Work(queue.path).cancel(job) is Place.FAILED
    time.sleep(0.01)
    assert copied.gc(older_than=0).jobs == 1
    assert sum(copied.counts().values()) == 0


@pytest.mark.parametrize("create", [True, False])
def test_a_path_that_is_a_file_is_told_as_such(queue: Queue, create: bool) -> None:
    (file := queue.path.parent / "file").touch()
    with pytest.raises(WorkspaceError, match=f"{file} is a file"):
        Workspace(file, create=create)


def test_a_place_that_is_a_file_is_named(queue: Queue) -> None:
    (queue.path / Place.OUTPUT).rmdir()
    (queue.path / Place.OUTPUT).touch()
    with pytest.raises(WorkspaceError, match=f"{queue.path / Place.OUTPUT}: .* A file is where a folder is needed"):
        Workspace(queue.path)


# ---- what is refused ----


def test_one_text_is_no_list_of_tags(queue: Queue) -> None:
    with pytest.raises(RequestError, match="tags = 'abc' is a string"):
        queue.work.submit("x", tags="abc")
    assert not queue.names(Place.READY)


class Endless:
    """A pipe whose other end is never closed."""

    def __init__(self) -> None:
        self.read_bytes = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0, "it waits for the end"
        self.read_bytes += size
        return b"x" * size


def test_a_prompt_without_an_end_is_refused_before_its_end(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = SimpleNamespace(buffer=(pipe := Endless()), isatty=lambda: False)
    code, out, err = in_this_process(monkeypatch, capsys, "work", queue.path, "-", stdin=stdin)
    assert (code, out) == (64, "")
    assert f"longer than {MAX_PROMPT_BYTES} bytes" in " ".join(err.split())
    assert pipe.read_bytes == MAX_PROMPT_BYTES + 1
    assert queue.flow.counts()[Status.QUEUED] == 0


def test_more_jobs_at_once_than_there_are_descriptors_for_are_refused() -> None:
    assert WorkspaceConfig(jobs=MAX_WORKSPACE_JOBS).jobs == 256
    with pytest.raises(ConfigError, match="jobs = 257 cannot be used"):
        WorkspaceConfig(jobs=257)


# ---- what these tests need ----


def finished_job(queue: Queue, **details: Any) -> str:
    (job,) = queue.submit("x", **details)
    queue.drain()
    return job


def throw_away(queue: Queue, job: str) -> None:
    """Delete a job, like another client that cleans at this moment."""
    queue.workspace.throw_away([job], Place.OUTPUT)


def before(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, happens: Callable[[], object]) -> None:
    """Let something happen just before a function is called."""
    real = getattr(owner, name)

    def called(*args: Any, **details: Any) -> Any:
        happens()
        return real(*args, **details)

    monkeypatch.setattr(owner, name, called)
