"""Responses on disk: whose they are, how long they are there, and what a death or a stranger's hand leaves of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import BadJob, WorkspaceError
from penstock.workspace.store.responses import ResponseRecord, Responses
from penstock.workspace.store.workspace import Workspace
from tests.clock import Clock
from tests.workspace.crashing import FailingDisk, KillingDisk, SteppingDisk, process

SAID = ResponseRecord(b'{"id":"resp_1000_1_0"}', b"[]")
JOB = "1000_1_0"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def responses(tmp_path: Path, clock: Clock) -> Responses:
    return Responses(Workspace(tmp_path / "jobs", create=True), keep=60.0, clock=clock)


def test_what_is_put_is_found_by_its_owner_alone(responses: Responses) -> None:
    responses.put(JOB, SAID, owner="ada")
    assert responses.get(JOB, owner="ada") == SAID
    assert responses.get(JOB, owner="bob") is None
    assert responses.get(JOB, owner=None) is None
    assert not responses.remove(JOB, owner="bob")
    assert responses.get(JOB, owner="ada") == SAID


@pytest.mark.parametrize("owner", [b"", b"ada", b"[" * 100_000, b"\xff"])
def test_a_damaged_owner_is_nobody(responses: Responses, tmp_path: Path, owner: bytes) -> None:
    responses.put(JOB, SAID, owner="ada")
    (tmp_path / "jobs/responses" / JOB / "owner.json").write_bytes(owner)
    assert responses.get(JOB, owner="ada") is None
    assert responses.get(JOB, owner=None) is None


def test_a_new_life_finds_what_an_earlier_one_kept(responses: Responses, tmp_path: Path, clock: Clock) -> None:
    responses.put(JOB, SAID, owner=None)
    assert Responses(Workspace(tmp_path / "jobs"), keep=60.0, clock=clock).get(JOB, owner=None) == SAID


def test_one_is_removed_whole_and_once(responses: Responses, tmp_path: Path) -> None:
    responses.put(JOB, SAID, owner=None)
    assert responses.remove(JOB, owner=None)
    assert not responses.remove(JOB, owner=None)
    assert not list((tmp_path / "jobs/responses").iterdir())
    assert not list((tmp_path / "jobs/trash").iterdir())


def test_its_time_ends_for_readers_at_once_and_on_disk_with_the_next_sweep(
    responses: Responses, clock: Clock, tmp_path: Path
) -> None:
    responses.put(JOB, SAID, owner=None)
    responses.put("1001_1_0", SAID, owner=None)
    clock.now += 59.9
    assert responses.sweep() == 0
    assert responses.get(JOB, owner=None) == SAID
    clock.now += 0.1
    assert responses.get(JOB, owner=None) is None
    assert responses.get("1001_1_0", owner=None) == SAID
    assert responses.sweep() == 1
    assert [one.name for one in (tmp_path / "jobs/responses").iterdir()] == ["1001_1_0"]


def test_nothing_is_written_over(responses: Responses) -> None:
    responses.put(JOB, SAID, owner="ada")
    with pytest.raises(WorkspaceError):
        responses.put(JOB, ResponseRecord(b"{}", b"[]"), owner="bob")
    assert responses.get(JOB, owner="ada") == SAID


def test_a_link_in_its_place_is_not_followed(responses: Responses, tmp_path: Path) -> None:
    responses.put(JOB, SAID, owner=None)
    items = tmp_path / "jobs/responses" / JOB / "items.json"
    items.unlink()
    items.symlink_to("/etc/passwd")
    with pytest.raises(BadJob, match="link"):
        responses.get(JOB, owner=None)


def left_by(disk: SteppingDisk, path: Path, clock: Clock) -> ResponseRecord | None:
    """What the next life finds of a response that was put on such a disk."""
    Workspace(path, create=True).close()
    writer = Responses(Workspace(path, disk=disk), keep=60.0, clock=clock)
    disk.arm()
    with process(), suppress(WorkspaceError):
        writer.put(JOB, SAID, owner=None)
    return Responses(Workspace(path), keep=60.0, clock=clock).get(JOB, owner=None)


def steps(tmp_path: Path, clock: Clock) -> int:
    disk = SteppingDisk()
    assert left_by(disk, tmp_path / "counted", clock) == SAID
    return len(disk.steps)


def test_whoever_dies_at_any_point_leaves_it_whole_or_not_at_all(tmp_path: Path, clock: Clock) -> None:
    found = [left_by(KillingDisk(n + 1), tmp_path / str(n), clock) for n in range(steps(tmp_path, clock))]
    moved = found.index(SAID)
    assert found == [None] * moved + [SAID] * (len(found) - moved)


def test_what_its_writer_was_told_is_not_there_is_not(tmp_path: Path, clock: Clock) -> None:
    for n in range(steps(tmp_path, clock)):
        assert left_by(FailingDisk(n + 1), tmp_path / str(n), clock) is None
        assert not list((tmp_path / str(n) / "input/writing").iterdir())
