"""The life of a job on disk: which folder means which status, its contents, and what its id says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.errors import WorkspaceError
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.files import PARTIAL, PROMPT, RESULT, Place
from penstock.workspace.work import Work
from tests.workspace.queues import Queue, prompts, until
from tests.workspace.runners import REFUSED

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]

ID = "1736700000_12345_0"
FURTHEST_FIRST = (Place.OUTPUT, Place.FAILED, Place.PROCESSING, Place.READY)
STATUS = {
    Place.WRITING: Status.MISSING,  # not submitted yet
    Place.READY: Status.QUEUED,
    Place.PROCESSING: Status.RUNNING,
    Place.OUTPUT: Status.DONE,
    Place.FAILED: Status.FAILED,
}


def test_there_are_five_statuses() -> None:
    assert {status.value for status in Status} == {"queued", "running", "done", "failed", "missing"}


@pytest.mark.parametrize("place", STATUS)
def test_the_folder_that_a_job_lies_in_is_its_status(queue: Queue, place: Place) -> None:
    folder = queue.plant(ID, {PROMPT: b"x"}, place)
    assert queue.flow.status(ID) is STATUS[place]
    folder.rename(queue.path.parent / "elsewhere")
    assert queue.flow.status(ID) is Status.MISSING


@pytest.mark.parametrize("at", range(len(FURTHEST_FIRST)))
def test_of_one_id_at_several_places_the_furthest_counts(queue: Queue, at: int) -> None:
    for place in FURTHEST_FIRST[at:]:
        queue.plant(ID, {PROMPT: b"x"}, place)
    assert queue.flow.status(ID) is STATUS[FURTHEST_FIRST[at]]


def test_a_job_that_is_being_written_is_neither_taken_nor_counted(queue: Queue) -> None:
    queue.plant(ID, {PROMPT: b"half a pro"}, Place.WRITING)
    queue.drain()
    assert queue.names(Place.WRITING) == {ID}
    assert sum(queue.flow.counts().values()) == 0
    (queue.path / Place.WRITING / ID).rename(queue.path / Place.READY / ID)
    queue.drain()
    queue.check([ID], ["half a pro"])


def test_a_job_that_runs_is_a_folder_in_processing_until_it_ends(queue: Queue) -> None:
    texts, runner = prompts(3, longer_than=3), queue.runner(holds_at=3)
    jobs = queue.submit(*texts)
    assert queue.names(Place.READY) == set(jobs)
    with queue.pool(runner):
        until(lambda: len(runner.said()) == 3, "all to run")
        assert (queue.names(Place.READY), queue.names(Place.PROCESSING)) == (set(), set(jobs))
        assert {queue.flow.status(job) for job in jobs} == {Status.RUNNING}
        runner.holds_at = None
        queue.check(jobs, texts)
    assert (queue.names(Place.PROCESSING), queue.names(Place.OUTPUT)) == (set(), set(jobs))


def test_a_job_that_ended_keeps_its_prompt_beside_its_result_or_its_error(queue: Queue) -> None:
    (good,), (bad,) = queue.submit("good"), queue.submit(f"this is {REFUSED}")
    queue.drain()
    for job, place, prompt, end in (
        (good, "output", "good", "result.txt"),
        (bad, "failed", f"this is {REFUSED}", "error.txt"),
    ):
        folder = queue.path / place / job
        assert (folder / "prompt.txt").read_text(encoding="utf-8") == prompt
        assert (folder / end).read_bytes() == queue.flow.get(job).data
        assert {name for name in os.listdir(folder) if name.endswith(".txt")} == {"prompt.txt", end}


def test_an_id_has_the_second_and_the_process_that_made_it_and_a_counter(tmp_path: Path) -> None:
    before = int(time.time())
    ids = [Work(tmp_path / "ws").submit("x") for _ in range(20)]
    parts = [tuple(map(int, job_id.split("_"))) for job_id in ids]
    assert all(before <= second <= time.time() for second, _, _ in parts)
    assert {process for _, process, _ in parts} == {os.getpid()}
    counters = [counter for _, _, counter in parts]
    assert counters == sorted(set(counters)), "no number twice"
    assert [view.job_id for view in Flow(tmp_path / "ws").jobs()] == ids[::-1], "the newest first"


def test_a_job_that_ended_stays_until_it_is_removed_and_removing_its_folder_by_hand_harms_nothing(queue: Queue) -> None:
    first, second = queue.submit("one", "two")
    queue.drain()
    for file in (queue.path / Place.OUTPUT / first).iterdir():
        file.unlink()
    (queue.path / Place.OUTPUT / first).rmdir()
    queue.drain()
    assert (queue.flow.status(first), queue.flow.status(second)) == (Status.MISSING, Status.DONE)
    queue.check([second], ["two"])


def test_following_a_job_that_was_restarted_never_ends_in_another_text(queue: Queue) -> None:
    (job,) = queue.submit("The sea.")
    folder = (queue.path / Place.READY / job).rename(queue.path / Place.PROCESSING / job)
    (folder / PARTIAL).write_text("The sea is blue", encoding="utf-8")
    pieces = queue.flow.follow(job)
    assert next(pieces) == b"The sea is blue"
    (folder / PARTIAL).write_text("The sea", encoding="utf-8")
    (folder / RESULT).write_text("The sea", encoding="utf-8")
    folder.rename(queue.path / Place.OUTPUT / job)
    with pytest.raises(WorkspaceError, match="was restarted, and its text differs"):
        next(pieces)
