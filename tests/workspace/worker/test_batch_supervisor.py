"""Who drives batches: what one of them may not do to the others, to a drain, and to whoever waits for it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import UnknownJob
from penstock.workspace.batch.batches import Batches, BatchStatus, open_batches
from penstock.workspace.batch.lines import MAX_DEPTH, Lines
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import PROMPT, Place
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker import batch_run as batch_drive
from penstock.workspace.worker.batch_supervisor import BatchSupervisor
from penstock.workspace.worker.pool import Pool
from tests.workspace.batch.batch_worlds import BatchRunner, Ledger, Server, batch_driver, jsonl, line, refusal
from tests.workspace.queues import until


@pytest.fixture
def runner() -> Iterator[BatchRunner]:
    made = BatchRunner(step=0.001)
    yield made
    made.close()


def lines(count: int, **body: str) -> bytes:
    return jsonl([line(str(number), **body) for number in range(count)])


# ---- drains ----


def test_a_drain_goes_on_when_another_thread_submits_between_its_look_and_its_question(
    server: Server, runner: BatchRunner
) -> None:
    batch = server.submit(lines(5))
    driver = batch_driver(server.workspace)

    def refill() -> bool:
        other = threading.Thread(target=driver.turn)
        other.start()
        other.join()
        return driver.refill()

    driver.turn()
    assert Pool(server.workspace, runner, refill=refill).drain() == []
    assert server.batches.get(batch).status is BatchStatus.COMPLETED
    driver.stop()


def test_a_question_is_answered_for_all_turns_since_the_last(server: Server) -> None:
    server.submit(lines(1))
    assert server.driver.turn()
    assert server.driver.turn()
    assert not server.driver.turn()
    assert server.driver.refill(), "two turns have changed something"
    assert not server.driver.refill()


class FullDisk(Disk):
    full = False

    def write(self, file: int, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(file, data)


def test_a_drain_outlives_a_full_disk(folder: Path, runner: BatchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workspace.worker.pool.RETRY_DELAY_S", 0.01)
    server = Server(folder / "workspace", Ledger(), disk := FullDisk())
    batch = server.submit(lines(3))
    driver = batch_driver(server.workspace)
    request = itertools.count()

    def refill() -> bool:
        disk.full = next(request) == 0
        return driver.refill()

    assert Pool(server.workspace, runner, refill=refill).drain() == []
    assert server.batches.get(batch).status is BatchStatus.COMPLETED
    driver.stop()
    server.end()


# ---- one batch, and the others ----


def test_a_batch_that_stumbles_does_not_stop_the_others_and_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def vet(owner: str | None, model: str | None) -> None:
        if owner == "bob" and broken:
            raise IndexError("a mistake of ours")

    server = Server(folder / "workspace", Ledger(), vet=vet)
    bad, good = server.submit(lines(1), owner="bob", window=100.0), server.submit(jsonl([line("good")]), window=200.0)
    server.run()
    for _ in range(3):
        server.turn()
    assert server.batches.get(good).status is BatchStatus.COMPLETED
    assert caplog.text.count(f"unexpected error in batch {bad}") == 1
    assert open_batches(server.workspace) == [bad]
    broken = False
    server.driver._retry_at[bad] = 0.0  # its time has come
    server.run()
    assert server.batches.get(bad, "bob").status is BatchStatus.COMPLETED
    server.end()


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": "24h"},
        {"created": float("nan")},
        {"owner": 7},
        {"metadata": []},
        {"keep_output": 10**400},
        {"models": [7]},
        {"more": 1},
    ],
)
def test_a_record_that_somebody_changed_does_not_hold_up_the_others(server: Server, wrong: dict[str, object]) -> None:
    odd = server.submit(lines(1))
    file = server.workspace.path / Place.BATCHES / odd / "batch.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    good = server.submit(jsonl([line("good")]))
    server.run()
    assert [view.batch_id for view in server.batches.all()] == [good]
    assert server.batches.get(good).status is BatchStatus.COMPLETED
    assert open_batches(server.workspace) == [], "nobody waits for what is no batch"


def test_a_file_whose_record_somebody_changed_is_as_good_as_none(server: Server) -> None:
    odd, good = (server.uploads.add([b"x"], name="x", purpose="batch").file_id for _ in range(2))
    file = server.workspace.path / Place.FILES / odd / "file.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"expires": "soon"}))
    server.uploads.sweep()
    assert [found.file_id for found in server.uploads.all()] == [good]


def test_batches_for_a_model_that_is_not_here_give_way_to_others(
    folder: Path, runner: BatchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workspace.worker.batch_supervisor.MAX_OPEN_BATCHES", 2)
    server = Server(folder / "workspace", Ledger())
    absent = [server.submit(lines(20, model="other")) for _ in range(5)]
    here, cancelled = server.submit(lines(3)), server.submit(lines(3, model="other"))
    server.batches.cancel(cancelled)
    driver = batch_driver(server.workspace)
    left = Pool(server.workspace, runner, refill=driver.refill).drain()
    assert {job.model for job in left} == {"other"}
    assert server.batches.get(here).status is BatchStatus.COMPLETED
    assert server.batches.get(cancelled).status is BatchStatus.CANCELLED
    assert sorted(open_batches(server.workspace)) == sorted(absent)
    driver.stop()
    server.end()


def test_lines_for_a_model_that_is_not_here_take_no_room_from_the_others_and_others_may_run_them(
    folder: Path, runner: BatchRunner
) -> None:
    server = Server(folder / "workspace", Ledger())
    here = jsonl([line(f"here {number}") for number in range(20)])
    batch = server.submit(lines(30, model="other") + here + jsonl([line("last", model="third")]))
    driver = BatchSupervisor(server.workspace, room=8, refusal=refusal, accepts=runner.accepts)
    left = Pool(server.workspace, runner, refill=driver.refill).drain()
    assert server.batches.get(batch).counts.completed == 20
    assert {job.model for job in left} == {"other"}, "and not all of them are jobs"
    driver.stop()
    server.run()
    view = server.batches.get(batch)
    assert (view.status, view.counts.completed) == (BatchStatus.COMPLETED, 51)
    server.end()


def test_a_batch_is_cancelled_with_the_lines_whose_model_is_not_here(folder: Path, runner: BatchRunner) -> None:
    server = Server(folder / "workspace", Ledger(), accepts=runner.accepts)
    batch = server.submit(lines(30, model="other"))
    for _ in range(3):
        server.driver.turn()
    server.batches.cancel(batch)
    while server.driver.turn():
        pass
    view = server.batches.get(batch)
    assert (view.status, view.counts.failed) == (BatchStatus.CANCELLED, 30)
    server.end()


def test_what_was_not_offered_when_a_batch_was_made_is_an_error_whoever_drives_it(server: Server) -> None:
    request = [line("a"), line("b", model="small"), line("c", model="nowhere"), line("d", model=7)]
    batch = server.submit(jsonl(request), offers=lambda model: model == "small")
    server.run()
    view = server.batches.get(batch)
    assert view.end is not None
    assert (view.request.models, view.counts.completed) == (["small"], 1)
    errors = [one["response"]["body"]["error"] for one in server.lines_of(view.end.error_file)]
    assert [error["code"] for error in errors] == ["unknown_model", "unknown_model", "invalid_request"]
    assert [error["message"] for error in errors[:2]] == ["No model is served here.", "Model 'nowhere' is not served here."]


def test_all_batches_together_have_no_more_jobs_than_there_is_room(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger(), room=16)
    batches = [server.submit(lines(50))]
    seen = []
    for _ in range(4):
        server.driver.turn()
        seen.append(len(server.workspace.names(Place.READY)))
        batches.append(server.submit(lines(50)))
    for _ in range(5):
        server.driver.turn()
    assert seen == [0, 8, 12, 14], "half of what the others leave, after a turn in which the lines are read"
    assert len(server.workspace.names(Place.READY)) <= 16
    assert all(server.driver._runs[batch].jobs for batch in batches), "and each has some"
    server.end()


def test_a_stop_does_not_wait_for_a_turn_of_all_batches(server: Server) -> None:
    first, second = server.submit(lines(1), window=100.0), server.submit(lines(1), window=200.0)
    real = batch_drive.BatchRun.step

    def step(drive: batch_drive.BatchRun, room: int) -> bool:
        server.driver._stopping.set()
        return real(drive, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_drive.BatchRun, "step", step)
        server.driver.turn()
    assert [server.batches.get(batch).begun is not None for batch in (first, second)] == [True, False]


# ---- calling off ----


def test_what_has_expired_stays_so_when_the_clock_goes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workspace.worker.batch_run.MAX_NOTED_LINES", 5)
    server = Server(folder / "workspace", Ledger(), room=8)
    batch = server.submit(lines(20), window=1000.0)
    server.driver.turn()
    server.driver.turn()
    late = time.time() + 2000
    with monkeypatch.context() as patch:
        patch.setattr("penstock.workspace.worker.batch_run.time.time", lambda: late)
        server.driver.turn()
    server.driver.stop()
    again = Server(folder / "workspace", server.ledger)
    again.run()
    view = again.batches.get(batch)
    assert (view.status, view.counts.failed, server.ledger.done) == (BatchStatus.EXPIRED, 20, [])
    assert view.end is not None
    assert {one["error"]["code"] for one in again.lines_of(view.end.error_file)} == {"batch_expired"}
    again.end()


def test_a_batch_waits_while_nobody_can_tell_whether_its_key_is_good(folder: Path) -> None:
    good: dict[str | None, bool | None] = {"mia": None}
    server = Server(folder / "workspace", Ledger(), is_wanted=good.get)
    batch = server.submit(jsonl([line("a")]), owner="mia")
    server.run()
    assert server.batches.get(batch, "mia").status is BatchStatus.IN_PROGRESS
    assert server.workspace.names(Place.READY) == []
    good["mia"] = True
    server.run()
    assert server.batches.get(batch, "mia").counts.completed == 1
    server.end()


# ---- what somebody changed ----


def test_a_batch_whose_input_is_changed_fails_with_the_reason_and_its_jobs_end(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger(), room=8)
    batch = server.submit(lines(20))
    server.driver.turn()
    server.driver.turn()
    file = server.workspace.path / Place.BATCHES / batch / "input.jsonl"
    file.write_bytes(b"x" * file.stat().st_size)
    server.driver.stop()
    again = Server(folder / "workspace", Ledger())
    again.run()
    view = again.batches.get(batch)
    assert view.end is not None
    assert (view.status, view.end.mistakes[0]["code"]) == (BatchStatus.FAILED, "broken_batch")
    assert open_batches(again.workspace) == []
    again.end()


@pytest.mark.parametrize("levels, status", [(MAX_DEPTH, BatchStatus.COMPLETED), (MAX_DEPTH + 1, BatchStatus.FAILED)])
def test_how_deep_a_line_may_be_is_the_same_for_every_stack(server: Server, levels: int, status: BatchStatus) -> None:
    inside: list[object] = []
    for _ in range(levels - 3):  # the line, its body, and the innermost list are three
        inside = [inside]
    batch = server.submit(jsonl([line("a", x=inside)]))

    def deeper(depth: int) -> None:
        if depth:
            deeper(depth - 1)
        else:
            server.run()

    deeper(300)
    assert server.batches.get(batch).status is status


def test_of_a_file_with_too_many_lines_only_those_that_may_be_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workspace.batch.lines.MAX_LINES", 3)
    (folder / "input").write_bytes(b"1\n" * 1000)
    file = os.open(folder / "input", os.O_RDONLY)
    assert len(Lines(file)) == 4
    os.close(file)


def test_a_key_of_a_line_that_somebody_used_is_told_and_holds_up_nothing(server: Server) -> None:
    batch = server.submit(jsonl([line("a"), line("b")]))
    job = Work(server.workspace).submit('{"say": "c"}', key=f"{batch}/0")
    server.run()
    view = server.batches.get(batch)
    assert view.end is not None
    (error,) = server.lines_of(view.end.error_file)
    assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("a", "key_taken")
    assert Flow(server.workspace).status(job) is Status.DONE, "it is not the batch's"


def test_letters_are_written_as_they_are(server: Server) -> None:
    server.submit(jsonl([line("a", text="grün")]))
    while not (names := server.workspace.names(Place.READY)):
        server.driver.turn()
    assert "grün" in (server.workspace.path / Place.READY / names[0] / PROMPT).read_text(encoding="utf-8")


# ---- files ----


def refuse(*_: object) -> bool:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_two_batches_whose_ids_meet_leave_two_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that share a workspace count their processes alike."""
    first, second = (Server(folder / "workspace", Ledger()) for _ in range(2))
    one = first.submit(jsonl([line("one")]))
    first.driver.turn()
    two = second.submit(jsonl([line("two")]))
    second.driver.turn()
    first.driver.turn(), second.driver.turn()
    first.answer_jobs()
    ids = iter(["1_1_1", "1_1_1", "1_1_1", "1_1_2"])
    monkeypatch.setattr("penstock.workspace.batch.results.new_public_id", lambda: next(ids))
    with monkeypatch.context() as patch:  # both decide before either writes
        patch.setattr("penstock.workspace.batch.results.Results.write", refuse)
        for server in (first, second, first, second):
            with suppress(OSError):
                server.driver.turn()
    for server, batch, output in ((first, one, "one"), (second, two, "two")):
        server.run()
        end = server.batches.get(batch).end
        assert end is not None
        assert [found["custom_id"] for found in server.lines_of(end.output_file)] == [output]
    first.end(), second.end()


# ---- beside others ----


def test_a_job_that_is_submitted_beside_a_cleaning_finds_its_parent(server: Server, runner: BatchRunner) -> None:
    work, flow = Work(server.workspace), Flow(server.workspace)
    parent = work.submit("parent")
    Pool(server.workspace, runner).drain()
    child: list[str] = []

    def submit() -> None:
        with suppress(UnknownJob):
            child.append(work.submit("{{p}} again", after={"p": parent}))

    client, wanted = threading.Thread(target=submit), flow._wanted

    def look() -> set[str]:
        found = wanted()
        client.start()  # in this moment
        client.join(0.2)
        return found

    flow._wanted = look  # type: ignore[method-assign]
    flow.gc(older_than=-1)
    client.join()
    Pool(server.workspace, runner).drain()
    assert [flow.status(job) for job in child] in ([], [Status.DONE]), "it is refused, or it is done; it does not fail"


def test_a_queue_is_not_idle_while_a_batch_is_open(server: Server) -> None:
    batch = server.submit(lines(1))
    flow = Flow(server.workspace)
    done = threading.Thread(target=flow.wait_until_idle)
    done.start()
    assert flow.open_batches() == 1
    done.join(0.1)
    assert done.is_alive()
    server.run()
    done.join()
    assert server.batches.get(batch).end is not None
    assert flow.open_batches() == 0


def test_a_workspace_that_is_put_somewhere_else_is_left_by_all(folder: Path, runner: BatchRunner) -> None:
    workspace = Workspace(folder / "workspace", create=True)
    batches, uploads = Batches(workspace), Uploads(workspace)
    driver = BatchSupervisor(workspace, room=16, refusal=refusal)
    pool = Pool(workspace, runner, on_end=lambda end: driver.wake())
    pool.start()
    driver.start()
    (folder / "workspace").rename(folder / "elsewhere")
    until(lambda: workspace.opened == 2, "another")
    file = uploads.add([lines(2)], name="in.jsonl", purpose="batch")
    batch = batches.create(file.file_id, endpoint="/v1/chat/completions", window=60.0, completion_window="60s").batch_id
    driver.wake()
    until(lambda: batches.get(batch).end, "the end")
    assert os.listdir(folder / "workspace" / Place.BATCHES) == [batch]
    assert os.listdir(folder / "elsewhere" / Place.BATCHES) == []
    driver.stop()
    pool.stop()
    workspace.close()
