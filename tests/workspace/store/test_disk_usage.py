"""What each owner has stored: counted as it changes, right after restarts and deletions, and never beyond the limit."""

from __future__ import annotations

import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from penstock.domain.updates import TokensOut
from penstock.errors import KeyLimit, StorageLimit
from penstock.workspace.batch.batches import Batches
from penstock.workspace.flow import Flow
from penstock.workspace.store import disk_usage as usage_module
from penstock.workspace.store.disk_usage import StorageLimits, Stored
from penstock.workspace.store.files import BLOCK_BYTES, Place, footprint
from penstock.workspace.store.responses import ResponseRecord, Responses
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.worker.batch_supervisor import BatchSupervisor
from penstock.workspace.worker.pool import Pool
from tests.workspace.batch.batch_worlds import DAY, ENDPOINT, BatchRunner, Ledger, Server, jsonl, line, refusal
from tests.workspace.crashing import quick_folder
from tests.workspace.runners import FakeTask

LIMIT = 100 * BLOCK_BYTES
OWNERS = ("ada", "bob")


@pytest.fixture
def workspace(folder: Path) -> Workspace:
    return limited(Workspace(folder / "workspace", create=True))


def limited(workspace: Workspace, size: int | None = LIMIT, batches: int | None = 2) -> Workspace:
    workspace.usage.limits_of = lambda owner: StorageLimits() if owner is None else StorageLimits(size, batches)
    return workspace


def store(workspace: Workspace, size: int, owner: str | None = "ada") -> str:
    return Uploads(workspace).add([b"x" * size], name="x", purpose="batch", owner=owner, size=size).file_id


def batch(workspace: Workspace, file: str, owner: str | None = "ada") -> str:
    made = Batches(workspace).create(file, endpoint=ENDPOINT, window=DAY, completion_window="24h", owner=owner)
    return made.batch_id


def used(workspace: Workspace, owner: str | None = "ada") -> int:
    return workspace.usage.totals().get(owner, Stored(0, 0)).bytes


def recounted(workspace: Workspace) -> Any:
    """What a server that begins now would count."""
    fresh = Workspace(workspace.path)
    return fresh.usage.totals()


# ---- the limit ----


def test_what_does_not_fit_is_refused_with_the_numbers_and_leaves_nothing(workspace: Workspace) -> None:
    first = store(workspace, 60 * BLOCK_BYTES)
    with pytest.raises(StorageLimit, match=r"may store 410 kB: 254 kB are used, and this needs 254 kB\. Delete files") as refused:
        store(workspace, 60 * BLOCK_BYTES)
    assert refused.value.code == "storage_limit"
    assert workspace.names(Place.FILES) == [first]
    assert workspace.names(Place.WRITING) == []
    store(workspace, 60 * BLOCK_BYTES, "bob")
    store(workspace, 600 * BLOCK_BYTES, None)
    Uploads(workspace).remove(first, "ada")
    store(workspace, 60 * BLOCK_BYTES)


def test_a_read_that_fails_does_not_lift_the_limit(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    store(workspace, 60 * BLOCK_BYTES)
    fresh = limited(Workspace(workspace.path))

    def names(place: Place) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(fresh, "names", names)
        with pytest.raises(OSError, match="Too many open files"):
            store(fresh, 60 * BLOCK_BYTES)
    with pytest.raises(StorageLimit):
        store(fresh, 60 * BLOCK_BYTES)


def test_files_batches_and_responses_count_together(workspace: Workspace) -> None:
    file = store(workspace, 20 * BLOCK_BYTES)
    batch(workspace, file)
    responses = Responses(workspace, keep=DAY)
    record = ResponseRecord(b"x" * 40 * BLOCK_BYTES, b"[]")
    responses.put("1700000000_1_0", record, owner="ada")
    assert used(workspace) == footprint(20 * BLOCK_BYTES, 1) * 2 + footprint(5, 2, 40 * BLOCK_BYTES)
    for refused in (
        lambda: store(workspace, 20 * BLOCK_BYTES),
        lambda: batch(workspace, file),
        lambda: responses.put("1700000000_1_1", record, owner="ada"),
        lambda: responses.check_room(20 * BLOCK_BYTES, owner="ada"),
    ):
        with pytest.raises(StorageLimit):
            refused()
    assert (len(workspace.names(Place.BATCHES)), len(workspace.names(Place.RESPONSES))) == (1, 1)
    assert recounted(workspace) == workspace.usage.totals()


def test_small_things_take_whole_blocks(workspace: Workspace) -> None:
    """Or a million of them would fill a disk that their bytes would not."""
    for _ in range(LIMIT // (3 * BLOCK_BYTES)):
        store(workspace, 1)
    with pytest.raises(StorageLimit):
        store(workspace, 1)


def test_content_that_breaks_off_leaves_nothing(workspace: Workspace) -> None:
    def chunks() -> Any:
        yield b"x"
        raise ValueError("the client has left")

    with pytest.raises(ValueError, match="has left"):
        Uploads(workspace).add(chunks(), name="x", purpose="batch", owner="ada", size=100)
    assert workspace.names(Place.WRITING) == []
    assert used(workspace) == 0


def test_many_at_the_same_time_do_not_get_beyond_the_limit(workspace: Workspace) -> None:
    def attempt(_: int) -> bool:
        try:
            store(workspace, 9 * BLOCK_BYTES - 1)
        except StorageLimit:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        stored = sum(pool.map(attempt, range(48)))
    assert stored == LIMIT // footprint(9 * BLOCK_BYTES, 1)
    assert len(workspace.names(Place.FILES)) == stored
    assert used(workspace) <= LIMIT


def test_room_that_is_held_counts_until_it_is_given_back(workspace: Workspace) -> None:
    with workspace.usage.reserve("ada", 90 * BLOCK_BYTES) as held:
        with pytest.raises(StorageLimit):
            store(workspace, 20 * BLOCK_BYTES)
        held.close()
        store(workspace, 20 * BLOCK_BYTES)
    assert workspace.usage.room("ada") == LIMIT - footprint(20 * BLOCK_BYTES, 1), "given back once"


# ---- counting ----


def test_counting_lists_the_folders_once_and_not_for_every_request(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[Place] = []
    names = Workspace.names
    monkeypatch.setattr(Workspace, "names", lambda self, place: listed.append(place) or names(self, place))  # type: ignore[func-returns-value]
    for _ in range(20):
        store(workspace, 1)
    assert len(listed) == 3


def test_what_another_process_removes_is_free_at_once(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "REFRESH_INTERVAL_S", 0.0)
    file = store(workspace, 60 * BLOCK_BYTES)
    other = Workspace(workspace.path)
    Uploads(other).remove(file, "ada")
    store(workspace, 60 * BLOCK_BYTES)


def test_what_another_process_stores_counts_before_more_is_refused_or_after_a_restart(workspace: Workspace) -> None:
    store(workspace, 1)
    store(limited(Workspace(workspace.path)), 60 * BLOCK_BYTES)
    assert used(Workspace(workspace.path)) == footprint(1, 1) + footprint(60 * BLOCK_BYTES, 1)


def test_a_workspace_that_was_replaced_is_counted_anew(workspace: Workspace) -> None:
    store(workspace, 60 * BLOCK_BYTES)
    workspace.path.rename(workspace.path.with_name("old"))
    workspace.reopen()
    assert used(workspace) == 0
    store(workspace, 60 * BLOCK_BYTES)


def test_damaged_folders_are_the_operators(workspace: Workspace) -> None:
    file = store(workspace, 1)
    (workspace.path / Place.FILES / file / "file.json").write_bytes(b"{")
    (workspace.path / Place.RESPONSES / "1700000000_1_0").mkdir()
    assert set(recounted(workspace)) == {None}


class Changes(RuleBasedStateMachine):
    """Whatever is stored and removed: what was counted is what a new process counts, and no owner is beyond its limit."""

    files: Bundle[tuple[str, str]] = Bundle("files")
    responses: Bundle[tuple[str, str]] = Bundle("responses")
    sizes = st.integers(0, 30 * BLOCK_BYTES)
    owners = st.sampled_from(OWNERS)

    def __init__(self) -> None:
        super().__init__()
        self._folder = quick_folder()
        self.workspace = limited(Workspace(self._folder.__enter__() / "workspace", create=True), batches=3)
        self.answers = Responses(self.workspace, keep=DAY)
        self.number = 0

    def teardown(self) -> None:
        self._folder.__exit__(None, None, None)

    @rule(target=files, size=sizes, owner=owners)
    def upload(self, size: int, owner: str) -> Any:
        try:
            return store(self.workspace, size, owner), owner
        except StorageLimit:
            return multiple()

    @rule(target=responses, size=sizes, owner=owners)
    def respond(self, size: int, owner: str) -> Any:
        self.number += 1
        name = f"4000000000_1_{self.number}"
        try:
            self.answers.put(name, ResponseRecord(b"x" * size, b"[]"), owner=owner)
        except StorageLimit:
            return multiple()
        return name, owner

    @rule(file=files)
    def make_batch(self, file: tuple[str, str]) -> None:
        with suppress(StorageLimit, KeyLimit):
            batch(self.workspace, *file)

    @rule(file=consumes(files))
    def delete_file(self, file: tuple[str, str]) -> None:
        Uploads(self.workspace).remove(*file)

    @rule(response=consumes(responses))
    def delete_response(self, response: tuple[str, str]) -> None:
        assert self.answers.remove(response[0], owner=response[1])

    @rule()
    def restart(self) -> None:
        self.workspace = limited(Workspace(self.workspace.path), batches=3)
        self.answers = Responses(self.workspace, keep=DAY)

    @invariant()
    def counted_right(self) -> None:
        totals = self.workspace.usage.totals()
        assert totals == recounted(self.workspace)
        assert all(found.bytes <= LIMIT and found.batches <= 3 for found in totals.values())


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)


def test_who_lists_their_files_and_batches_does_not_wait_for_those_of_others(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, others = store(workspace, 1), [store(workspace, 1, "bob") for _ in range(5)]
    own_batch = batch(workspace, own)
    batch(workspace, others[0], "bob")
    opened: list[str] = []
    open_folder = Workspace.open_folder

    def counted(self: Workspace, name: str, place: Place) -> int | None:
        opened.append(name)
        return open_folder(self, name, place)

    monkeypatch.setattr(Workspace, "open_folder", counted)
    assert [file.file_id for file in Uploads(workspace).all("ada")] == [own]
    assert [view.batch_id for view in Batches(workspace).all("ada")] == [own_batch]
    assert set(opened) == {own, own_batch}
    assert [file.file_id for file in Uploads(Workspace(workspace.path)).all("ada")] == [own], "also where nothing is counted"


# ---- batches ----


def test_an_owner_has_so_many_open_batches_and_not_one_more_also_at_the_same_time(workspace: Workspace) -> None:
    file = store(workspace, 10)
    refusals: list[KeyLimit] = []
    start = threading.Barrier(8)

    def attempt() -> None:
        start.wait()
        try:
            batch(workspace, file)
        except KeyLimit as error:
            refusals.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(workspace.names(Place.BATCHES)) == 2
    assert len(refusals) == 6
    assert str(refusals[0]) == "This key may have 2 open batches, and has 2. Wait until one has ended, or cancel one."
    batch(workspace, store(workspace, 10, "bob"), "bob")


def test_a_batch_that_has_ended_makes_way_for_another_and_can_be_deleted(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger())
    limited(server.workspace, batches=1)
    first = server.submit(jsonl([line("a"), line("b")]), owner="ada")
    with pytest.raises(KeyLimit):
        server.submit(jsonl([line("c")]), owner="ada")
    with pytest.raises(Exception, match=r"has not ended\. Cancel it first"):
        server.batches.remove(first, "ada")
    server.run()
    assert server.batches.get(first, "ada").end is not None
    assert server.workspace.usage.totals() == recounted(server.workspace)
    assert server.workspace.usage.totals()["ada"].batches == 0
    second = server.submit(jsonl([line("d")]), owner="ada")
    server.run()
    before = used(server.workspace)
    server.batches.remove(first, "ada")
    assert server.workspace.names(Place.BATCHES) == [second]
    assert used(server.workspace) < before
    assert server.workspace.usage.totals() == recounted(server.workspace)
    server.end()


def test_answers_of_an_open_batch_count_twice_so_that_its_output_always_fits(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger(), room=2)
    limited(server.workspace, size=10**9)
    opened = server.submit(jsonl([line(str(n), pad="x" * 3000) for n in range(8)]), owner="ada")
    seen = []
    while server.batches.get(opened, "ada").end is None:
        seen.append(used(server.workspace))
        server.turn()
    most = max(seen)
    assert most > seen[0], "it grows as lines are answered"
    assert used(server.workspace) <= most + 4 * BLOCK_BYTES, "writing the output takes no more room than was counted"
    server.end()


def test_lines_wait_while_their_key_has_no_room_and_go_on_when_it_has(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger())
    limited(server.workspace)
    ids = ["a", "b", "c"]
    waiting = server.submit(jsonl([line(one) for one in ids]), owner="ada")
    room = server.workspace.usage.room("ada")
    assert room is not None
    filler = store(server.workspace, room - 3 * BLOCK_BYTES)
    other = server.submit(jsonl([line("z")]), owner="bob")
    server.run()
    assert server.batches.get(other, "bob").end is not None, "other keys go on"
    view = server.batches.get(waiting, "ada")
    assert (view.end, view.counts.ended) == (None, 0)
    Uploads(server.workspace).remove(filler, "ada")
    server.run()
    assert server.batches.get(waiting, "ada").counts.completed == 3
    server.end()


def test_old_batches_that_are_cleaned_up_no_longer_count(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger())
    limited(server.workspace)
    server.submit(jsonl([line("a")]), owner="ada")
    server.run()
    before = used(server.workspace)
    Flow(server.workspace).gc(-1.0)
    assert used(server.workspace) < before
    assert server.workspace.usage.totals() == recounted(server.workspace)
    server.end()


def test_a_limit_that_is_changed_holds_from_then_on(workspace: Workspace) -> None:
    store(workspace, 60 * BLOCK_BYTES)
    limited(workspace, size=200 * BLOCK_BYTES)
    store(workspace, 60 * BLOCK_BYTES)
    limited(workspace, size=BLOCK_BYTES)
    with pytest.raises(StorageLimit):
        store(workspace, 1)


def test_folders_stay_open_no_longer_than_their_workspace(folder: Path) -> None:
    """What counts must not keep it alive."""

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # of other tests
    before = count()
    workspace: Workspace | None = limited(Workspace(folder / "workspace", create=True))
    assert workspace is not None
    store(workspace, 1)
    assert count() > before
    del workspace
    assert count() == before


@pytest.mark.parametrize(
    "body, together",
    [
        ({}, 4),
        ({"max_tokens": 500}, 4),
        ({"max_tokens": 500, "logprobs": True, "top_logprobs": 20}, 1),
        ({"max_tokens": 10**30}, 1),
        ({"input": ["x"] * 50}, 1),
        ({"max_tokens": "x", "n": -1, "logprobs": {}, "top_logprobs": None, "input": 7}, 4),
    ],
)
def test_lines_become_jobs_as_their_answers_fit(folder: Path, body: dict[str, Any], together: int) -> None:
    """Or answers of a thousand times the size of their lines would fill the disk before they are counted."""
    server = Server(folder / "workspace", Ledger(), room=8)
    limited(server.workspace)
    opened = server.submit(jsonl([line(str(n), **body) for n in range(6)]), owner="ada")
    server.run()
    assert server.most_jobs == together
    assert server.batches.get(opened, "ada").counts.completed == 6
    assert used(server.workspace) < LIMIT


def test_an_answer_that_is_longer_than_it_should_be_is_not_kept_where_it_does_not_fit(folder: Path) -> None:
    """The estimate of an answer lets a line begin; what is kept of it is bound by the limit."""
    server = Server(folder / "workspace", Ledger())
    limited(server.workspace)
    chatter = {"short": 10, "fits": 30 * BLOCK_BYTES, "long": 30 * BLOCK_BYTES, "longest": 10 * LIMIT}
    opened = server.submit(jsonl([line(one, max_tokens=1, chatter=size) for one, size in chatter.items()]), owner="ada")
    server.run()
    view = server.batches.get(opened, "ada")
    assert view.end is not None
    assert [one["custom_id"] for one in server.lines_of(view.end.output_file, "ada")] == ["short", "fits"]
    refused = server.lines_of(view.end.error_file, "ada")
    assert [one["custom_id"] for one in refused] == ["long", "longest"]
    assert {one["response"]["body"]["error"]["code"] for one in refused} == {"storage_limit"}
    assert LIMIT / 2 < used(server.workspace) <= LIMIT
    assert server.workspace.usage.totals() == recounted(server.workspace)
    server.end()


def test_the_output_of_many_short_lines_stays_within_the_limit(folder: Path) -> None:
    """A line has more around it in an output file than in the journal."""
    server = Server(folder / "workspace", Ledger(), room=50)
    limited(server.workspace, size=10**9)
    opened = server.submit(jsonl([line(str(n), max_tokens=1) for n in range(300)]), owner="ada")
    before = 0
    while server.batches.get(opened, "ada").end is None:
        before = used(server.workspace)
        server.turn()
    assert used(server.workspace) <= before + BLOCK_BYTES
    server.end()


class Talkative(BatchRunner):
    """Its answers are longer than anybody would guess."""

    def prepare(self, request: Any, prompt: str, aborted: threading.Event) -> FakeTask:
        task = super().prepare(request, prompt, aborted)
        task.resumable = self.resumable
        take = task.writer.take
        task.writer.take = lambda update: take(
            replace(update, text=update.text * 4000) if isinstance(update, TokensOut) else update
        )  # type: ignore[method-assign]
        return task

    resumable = True


@pytest.mark.parametrize("resumable", [True, False])
def test_a_job_ends_when_its_owner_has_no_room_for_its_answer(folder: Path, resumable: bool) -> None:
    """Before it is written: as text that grows, or as the whole answer."""
    server = Server(folder / "workspace", Ledger())
    workspace = limited(server.workspace)
    runner = Talkative(step=0.001)
    runner.resumable = resumable
    largest = 0

    def look(_: Any = None) -> None:
        nonlocal largest
        for path in workspace.path.rglob("*.txt"):
            with suppress(FileNotFoundError):
                largest = max(largest, path.stat().st_size)

    opened = server.submit(jsonl([line("a", max_tokens=1), line("b", max_tokens=1)]), owner="ada")
    driver = BatchSupervisor(workspace, room=16, refusal=refusal)
    Pool(workspace, runner, refill=driver.refill, on_end=look).drain()
    view = server.batches.get(opened, "ada")
    assert view.end is not None
    refused = server.lines_of(view.end.error_file, "ada")
    assert [one["response"]["body"]["error"]["code"] for one in refused] == ["storage_limit"] * 2
    assert 0 < largest < LIMIT
    assert used(workspace) < LIMIT
    runner.close()
    driver.stop()
    server.end()
