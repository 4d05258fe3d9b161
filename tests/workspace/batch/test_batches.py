"""Batches: every line ends exactly once, whenever the process dies; cancelling, expiring, and files that are no batch."""

from __future__ import annotations

import codecs
import itertools
import json
import os
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError, UnknownBatch, UnknownFile
from penstock.workspace.batch.batches import BatchStatus
from penstock.workspace.batch.journal import JOURNAL, Entry, Journal, read_entries
from penstock.workspace.batch.lines import Lines
from penstock.workspace.flow import Flow
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import FINISHED, FOLDER, Place
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.pool import Pool
from tests.workspace.batch.batch_worlds import FAILS, BatchRunner, Ledger, Server, batch_driver, check_whole, jsonl, line
from tests.workspace.crashing import FailingDisk, KillingDisk, SteppingDisk, process, quick_folder
from tests.workspace.queues import until
from tests.workspace.runners import text_of

IDS = ["a", "b", "c", "d", "e"]
BAD = ["b", "d"]
LINES = [line("a"), line("b", stream=True), line("c"), line("d", why=FAILS), line("e")]


# ---- a whole life ----


def test_every_line_ends_once_in_the_order_of_the_input(server: Server) -> None:
    batch = server.submit(jsonl(LINES), metadata={"night": "7"})
    assert server.batches.get(batch).status is BatchStatus.VALIDATING
    server.run()
    view = server.batches.get(batch)
    assert view.status is BatchStatus.COMPLETED
    check_whole(server, view, IDS, bad=BAD)
    assert view.end is not None
    refused, failed = server.lines_of(view.end.error_file)
    assert refused["response"]["body"]["error"] == {"code": "invalid_request", "message": "A line of a batch cannot be streamed."}
    assert failed["response"]["body"]["error"]["message"] == "The pump is broken."
    assert (failed["response"]["status_code"], failed["error"]) == (400, None)


def test_only_a_window_of_lines_are_jobs_at_once(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger(), room=8)
    ids = [str(number) for number in range(50)]
    batch = server.submit(jsonl([line(one) for one in ids]))
    server.run()
    assert server.most_jobs == 4
    check_whole(server, server.batches.get(batch), ids)
    server.end()


def test_a_job_that_somebody_removed_is_asked_again(server: Server) -> None:
    batch = server.submit(jsonl([line("a")]))
    while not (names := server.workspace.names(Place.READY)):
        server.driver.turn()
    server.workspace.throw_away(names, Place.READY)
    server.run()
    check_whole(server, server.batches.get(batch), ["a"])


def test_cleaning_leaves_the_jobs_of_an_open_batch_alone(server: Server) -> None:
    batch = server.submit(jsonl([line("a"), line("b")]))
    while not server.answer_jobs():
        server.driver.turn()
    assert Flow(server.workspace).gc(older_than=-1).jobs == 0
    server.run()
    check_whole(server, server.batches.get(batch), ["a", "b"])


def test_cleaning_removes_batches_that_are_over_with_the_files_that_they_left(server: Server) -> None:
    batch = server.submit(jsonl([line("a")]))
    server.run()
    view = server.batches.get(batch)
    Flow(server.workspace).gc(older_than=3600)
    assert server.batches.get(batch) == view
    Flow(server.workspace).gc(older_than=-1)
    with pytest.raises(UnknownBatch):
        server.batches.get(batch)
    assert server.workspace.names(Place.FILES) == [view.request.input_file], "what somebody uploaded is not ours to clean"


def test_files_vanish_when_their_time_is_over(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = server.submit(jsonl([line("a")]), keep_output=100.0)
    server.run()
    end = server.batches.get(batch).end
    assert end is not None
    assert server.uploads.get(end.output_file or "").expires is not None
    later = time.time() + 200
    monkeypatch.setattr("penstock.workspace.store.uploads.time.time", lambda: later)
    with pytest.raises(UnknownFile):
        server.uploads.get(end.output_file or "")
    server.uploads.sweep()
    assert end.output_file not in server.workspace.names(Place.FILES)


def test_only_one_of_two_servers_drives_a_batch_and_the_other_goes_on_when_it_leaves(folder: Path) -> None:
    first, second = (Server(folder / "workspace", Ledger()) for _ in range(2))
    batch = first.submit(jsonl([line("a"), line("b")]))
    assert first.driver.turn()
    assert not second.driver.turn()
    first.end()
    second.run()
    check_whole(second, second.batches.get(batch), ["a", "b"])
    second.end()


# ---- deaths ----


def live(path: Path, ledger: Ledger, disk: Disk, *, cancel: bool) -> None:
    """A client that asks, and the server that answers, as one process."""
    server = Server(path, ledger, disk, room=2)
    batch = server.submit(jsonl(LINES))
    if isinstance(disk, SteppingDisk):
        disk.arm()
    server.recover()
    for number in range(100):
        if number == 3 and cancel:
            server.batches.cancel(batch)
        if not server.turn():
            break
    server.end()


EVERY = [pytest.param(1, marks=pytest.mark.slow, id="every step"), pytest.param(7, id="every seventh")]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("cancel", [False, True], ids=["to its end", "cancelled in the middle"])
def test_a_server_may_die_at_any_step_of_a_batch(folder: Path, cancel: bool, every: int) -> None:
    counted = SteppingDisk()
    live(folder / "counted", Ledger(), counted, cancel=cancel)
    assert counted.steps
    steps = [*counted.steps, "after the last"]
    for number, step in reversed(list(enumerate(steps, 1))[::-every]):  # the last one always
        path, ledger = folder / str(number), Ledger()
        with process():
            live(path, ledger, KillingDisk(number), cancel=cancel)
        after = Server(path, ledger, room=2)
        after.run()
        (batch,) = after.workspace.names(Place.BATCHES)
        view = after.batches.get(batch)
        assert view.end is not None, f"killed before step {number}, {step}"
        every = [*after.lines_of(view.end.output_file), *after.lines_of(view.end.error_file)]
        assert sorted(one["custom_id"] for one in every) == IDS, f"killed before step {number}, {step}"
        if not cancel:
            check_whole(after, view, IDS, bad=BAD)
        assert view.counts.ended == view.counts.total == len(IDS)
        after.end()


@pytest.mark.parametrize("every", EVERY)
def test_any_call_may_fail_and_the_batch_goes_on_later(folder: Path, every: int) -> None:
    for number in itertools.count(1, every):
        server = Server(folder / str(number), Ledger(), disk := FailingDisk(number), room=2)
        batch = server.submit(jsonl(LINES))
        while not server.batches.get(batch).end:
            disk.armed = not disk.failed
            with suppress(OSError, PenstockError):
                server.driver.turn()
            disk.repair()
            server.answer_jobs()  # how jobs run is tested elsewhere
        view = server.batches.get(batch)
        for place in FINISHED:  # a job that could not be thrown away is an old job like others
            server.workspace.throw_away(server.workspace.names(place), place)
        check_whole(server, view, IDS, bad=BAD)
        server.end()
        if not disk.failed:
            break
    assert number > 50, "so many calls have failed"


def test_a_torn_tail_of_the_journal_is_cut_off_and_its_line_asked_again(server: Server) -> None:
    batch = server.submit(jsonl([line("a"), line("b")]))
    while not server.batches.get(batch).counts.completed:
        server.turn()
    server.driver.stop()
    file = server.workspace.path / Place.BATCHES / batch / JOURNAL
    whole = file.read_bytes()
    file.write_bytes(whole + b'12345678 {"n": 1, "custom_id": "b", "bo')
    again = Server(server.workspace.path, server.ledger)
    again.run()
    check_whole(again, again.batches.get(batch), ["a", "b"])
    assert file.read_bytes().startswith(whole)
    again.end()


# ---- calling it off ----


def test_a_cancelled_batch_keeps_what_is_done_and_tells_of_the_rest(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger(), room=8)
    ids = [str(number) for number in range(30)]
    batch = server.submit(jsonl([line(one) for one in ids]))
    while server.batches.get(batch).counts.completed < 8:
        server.turn()
    assert server.batches.cancel(batch).status is BatchStatus.CANCELLING
    server.run()
    view = server.batches.get(batch)
    assert view.status is BatchStatus.CANCELLED
    check_whole(server, view, ids, bad=ids[view.counts.completed :])
    assert view.end is not None
    assert {one["error"]["code"] for one in server.lines_of(view.end.error_file)} == {"batch_cancelled"}
    assert server.batches.cancel(batch) == view, "it is over"
    server.end()


def test_a_drain_ends_a_cancelled_batch_whose_lines_wait_for_a_model_that_is_not_here(folder: Path) -> None:
    workspace = Workspace(folder / "workspace", create=True)
    runner = BatchRunner(step=0.001)
    server = Server(folder / "workspace", Ledger())
    batch = server.submit(jsonl([line(str(number), model="other") for number in range(20)]))
    driver = batch_driver(workspace)
    left = Pool(workspace, runner, refill=driver.refill).drain()
    assert len(left) == 8, "half of the room"
    server.batches.cancel(batch)
    assert Pool(workspace, runner, refill=driver.refill).drain() == []
    assert server.batches.get(batch).status is BatchStatus.CANCELLED
    driver.stop()
    runner.close()
    server.end()
    workspace.close()


def test_lines_that_are_not_done_in_time_expire(server: Server) -> None:
    batch = server.submit(jsonl([line("a"), line("b")]), window=0.05)
    while time.time() < server.batches.get(batch).request.due:
        server.driver.turn()
    server.run()
    view = server.batches.get(batch)
    assert view.status is BatchStatus.EXPIRED
    check_whole(server, view, ["a", "b"], bad=["a", "b"])
    assert view.end is not None
    assert {one["error"]["code"] for one in server.lines_of(view.end.error_file)} == {"batch_expired"}
    assert not server.ledger.done


def test_a_batch_whose_owner_lost_the_key_is_called_off(folder: Path) -> None:
    good = {"mia": True}
    server = Server(folder / "workspace", Ledger(), is_wanted=lambda owner: good.get(owner or "", False))
    batch = server.submit(jsonl([line("a"), line("b")]), owner="mia")
    server.driver.turn()
    good["mia"] = False
    server.run()
    view = server.batches.get(batch, "mia")
    assert (view.status, view.counts.failed) == (BatchStatus.CANCELLED, 2)
    with pytest.raises(UnknownBatch):
        server.batches.get(batch)
    with pytest.raises(UnknownFile):
        server.uploads.get(view.request.input_file)
    server.end()


# ---- files that are no batch ----


@pytest.mark.parametrize(
    "data, code, number",
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"{}\n", "invalid_custom_id", 1),
        (jsonl([line("a")]) + b"\n{oops\n", "invalid_json_line", 3),
        (jsonl([line("a")]) + b'"text"\n', "invalid_json_line", 2),
        (jsonl([line("a")]) + b"\xff\n", "invalid_json_line", 2),
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (jsonl([line("a", url="/v1/other")]), "mismatched_endpoint", 1),
        (jsonl([line("a") | {"method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a") | {"body": []}]), "invalid_body", 1),
    ],
)
def test_a_file_that_is_no_batch_fails_with_the_line_and_the_reason(
    server: Server, data: bytes, code: str, number: int | None
) -> None:
    batch = server.submit(data)
    server.run()
    view = server.batches.get(batch)
    assert view.status is BatchStatus.FAILED
    assert view.end is not None
    (mistake,) = view.end.mistakes
    assert (mistake["code"], mistake["line"]) == (code, number)
    assert not server.ledger.done


def test_too_many_lines_are_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workspace.batch.lines.MAX_LINES", 3)
    batch = server.submit(jsonl([line(str(number)) for number in range(4)]))
    server.run()
    end = server.batches.get(batch).end
    assert end is not None
    assert end.mistakes[0]["code"] == "too_many_lines"


def test_a_folder_that_is_no_batch_does_not_hold_up_the_others(server: Server) -> None:
    (server.workspace.path / Place.BATCHES / "1_2_3").mkdir()
    (server.workspace.path / Place.BATCHES / "1_2_4").symlink_to("/")
    batch = server.submit(jsonl([line("a")]))
    server.run()
    check_whole(server, server.batches.get(batch), ["a"])


@given(st.lists(st.binary(max_size=300).map(lambda data: data.replace(b"\n", b"")), max_size=20), st.booleans())
def test_lines_are_found_whatever_they_hold(pieces: list[bytes], newline: bool) -> None:
    with quick_folder() as folder:
        (folder / "input").write_bytes(b"\n".join(pieces) + b"\n" * newline)
        file = os.open(folder / "input", os.O_RDONLY)
        found = Lines(file)
        if pieces:
            pieces[0] = pieces[0].removeprefix(codecs.BOM_UTF8)
        places = [number for number, piece in enumerate(pieces, 1) if piece.strip()]
        assert [mistake.line for mistake in found.mistakes("/v1/completions")] == (places or [None])
        os.close(file)


@pytest.mark.parametrize("text", [b"no JSON", b"", b"[" * 100_000, b"\xff", b"[]", b"7"])
def test_a_line_of_a_journal_that_is_no_fact_counts_as_torn_though_its_checksum_is_right(text: bytes) -> None:
    with quick_folder() as path:
        folder = os.open(path, FOLDER)
        good = b'{"n":0}'
        (path / JOURNAL).write_bytes(b"".join(b"%08x %b\n" % (zlib.crc32(line), line) for line in (good, text, good)))
        assert [entry.fact for entry in read_entries(folder)] == [{"n": 0}]
        os.close(folder)


@pytest.mark.parametrize("fact", [{"lines": "three", "at": 1.0}, {"lines": 3, "at": None}, {"lines": True, "at": []}])
def test_a_journal_that_begins_with_nonsense_leaves_a_batch_that_has_not_begun(server: Server, fact: dict[str, Any]) -> None:
    batch = server.submit(jsonl([line("a")]))
    file = server.workspace.path / Place.BATCHES / batch / JOURNAL
    text = json.dumps(fact).encode()
    file.write_bytes(b"%08x %b\n" % (zlib.crc32(text), text))
    assert server.batches.get(batch).status is BatchStatus.VALIDATING


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), min_size=1, max_size=8), st.data())
def test_a_journal_cut_anywhere_has_the_facts_before_and_goes_on(facts: list[dict[str, Any]], data: st.DataObject) -> None:
    with quick_folder() as path:
        folder = os.open(path, FOLDER)
        journal = Journal(Disk(), folder)
        journal.open(lambda entry: pytest.fail(f"{entry} is known"))
        entries = journal.append(facts)
        cut = data.draw(st.integers(0, entries[-1].end))
        os.truncate(path / JOURNAL, cut)
        before = [entry.fact for entry in entries if entry.end <= cut]
        again = Journal(Disk(), folder)
        known: list[Entry] = []
        again.open(known.append)
        assert [entry.fact for entry in known] == before
        again.append([{"new": 1}])
        assert [entry.fact for entry in read_entries(folder)] == [*before, {"new": 1}]
        os.close(folder)


# ---- beside a pool ----


def test_a_pool_that_drains_does_all_lines_and_makes_no_token_twice(folder: Path) -> None:
    workspace = Workspace(folder / "workspace", create=True)
    runner = BatchRunner(step=0.001, made=folder / "made")
    server = Server(folder / "workspace", Ledger())
    ids = [str(number) for number in range(40)]
    batch = server.submit(jsonl([line(one) for one in ids]))
    driver = batch_driver(workspace)
    driver.start()
    assert Pool(workspace, runner, max_running=4, on_end=lambda end: driver.wake(), refill=driver.refill).drain() == []
    driver.stop()
    view = server.batches.get(batch)
    assert view.end is not None
    found = server.lines_of(view.end.output_file)
    request = [json.dumps(line(one)["body"]) for one in ids]
    assert [one["response"]["body"]["said"] for one in found] == [text_of(prompt) for prompt in request]
    assert len((folder / "made").read_bytes().splitlines()) == sum(text_of(prompt).count("\n") for prompt in request)
    runner.close()
    server.end()
    workspace.close()


def test_running_jobs_of_a_cancelled_batch_are_cancelled(folder: Path) -> None:
    workspace = Workspace(folder / "workspace", create=True)
    runner = BatchRunner(step=0.001, made=folder / "made")
    runner.holds_at = 2
    server = Server(folder / "workspace", Ledger())
    batch = server.submit(jsonl([line(str(number)) for number in range(20)]))
    driver = batch_driver(workspace)
    pool = Pool(workspace, runner, max_running=4, on_end=lambda end: driver.wake())
    driver.start()
    pool.start()
    until(lambda: len(runner.said()) == 4, "jobs that run")
    server.batches.cancel(batch)
    driver.wake()
    until(lambda: server.batches.get(batch).end, "the end")
    assert server.batches.get(batch).status is BatchStatus.CANCELLED
    driver.stop()
    pool.stop()
    runner.close()
    server.end()
    workspace.close()
