"""A workspace is for its user alone: modes of what is created, and folders that are refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import WorkspaceError
from penstock.workspace.store.files import Place
from penstock.workspace.store.responses import ResponseRecord, Responses
from penstock.workspace.store.uploads import Uploads
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from tests.jobs import Run
from tests.workspace.queues import Queue


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(path: Path) -> dict[bool, set[int]]:
    """The modes of all folders (True) and files (False)."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for one in (path, *path.rglob("*")):
        found[one.is_dir()].add(stat.S_IMODE(one.stat().st_mode))
    return found


@pytest.mark.usefixtures("no_umask", "impatient")
def test_what_is_created_is_for_its_user_alone(queue: Queue) -> None:
    path = queue.path
    (done,) = queue.submit("a prompt")
    queue.drain()
    workspace = Workspace(path)
    workspace.request_cancel(Work(path).submit("another", key="once"))
    Uploads(workspace).add([b"{}\n"], name="a.jsonl", purpose="batch")
    Responses(workspace, keep=1e9).put("1736700000_1_1", ResponseRecord(b"{}", b"[]"), owner=None)
    assert {place for place in Place if any((path / place).iterdir())} >= {Place.OUTPUT, Place.KEYS, Place.CANCEL, Place.FILES}
    assert (path / Place.OUTPUT / done).is_dir()
    assert modes(path) == {True: {0o700}, False: {0o600}}


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o720, 0o702, 0o777])
def test_a_workspace_that_others_can_write_to_is_refused(mode: int, tmp_path: Path, quickly: Run) -> None:
    path = tmp_path / "my jobs"
    Work(path).submit("x")
    path.chmod(mode)
    with pytest.raises(WorkspaceError) as caught:
        Workspace(path)
    assert caught.value.message == f"Other users can write to {path} (its mode is {mode:04o})."
    assert caught.value.hint == f"If none has, run: chmod -R go-w '{path}'"
    for command in (["work", str(path), "y"], ["flow", str(path)]):
        code, _, err = quickly(*command)
        assert (code, caught.value.message in err) == (1, True)


def test_an_empty_folder_that_others_can_write_to_becomes_no_workspace(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(WorkspaceError, match="can write to"):
        Workspace(tmp_path, create=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["input", *Place])
def test_a_folder_inside_that_others_can_write_to_is_refused_if_they_can_reach_it(place: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    Work(path).submit("x")
    (path / place).chmod(0o775)
    Workspace(path)  # nobody else can enter it
    path.chmod(0o755)
    with pytest.raises(WorkspaceError, match=f"can write to {path / place} "):
        Workspace(path)


def test_a_folder_that_others_can_read_may_be_used_and_gets_private_files(tmp_path: Path) -> None:
    path = tmp_path / "jobs"
    path.mkdir()
    path.chmod(0o755)
    job = Work(path).submit("x")
    assert modes(path / Place.READY / job) == {True: {0o700}, False: {0o600}}


@pytest.mark.parametrize("foreign", ["", "input", Place.READY])
def test_a_workspace_of_another_user_is_refused(foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jobs"
    Work(path).submit("x")
    plain_stat = Path.stat

    def stat_of_another(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        found = plain_stat(self, follow_symlinks=follow_symlinks)
        if self != path / foreign:
            return found
        values = list(found)
        values[stat.ST_UID] += 1
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", stat_of_another)
    with pytest.raises(WorkspaceError, match=f"{path / foreign} belongs to another user") as caught:
        Workspace(path)
    assert "chown" in caught.value.hint
