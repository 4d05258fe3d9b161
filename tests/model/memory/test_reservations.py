"""Memory that other processes have reserved: counted while they live, as far as they have not taken it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.model.memory.reservations import PROC, Reservations

pytestmark = pytest.mark.skipif(not PROC.exists(), reason="the memory of other processes is read from /proc")

RESERVE = """
import sys
from pathlib import Path
from penstock.model.memory.reservations import Reservations
class Owner: pass
owner, reservations = Owner(), Reservations(Path(sys.argv[1]))
with reservations.locked():
    reservations.reserve(int(sys.argv[2]), owner)
print("reserved", flush=True)
sys.stdin.readline()
del owner
print("released", flush=True)
sys.stdin.readline()
"""
SIZE = 5 << 30


def process(folder: Path, size: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RESERVE, str(folder), str(size)]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "reserved\n"
    return started


def test_what_others_have_reserved_counts_until_they_release_it_or_die(tmp_path: Path) -> None:
    reservations = Reservations(tmp_path)
    with process(tmp_path, SIZE) as first, process(tmp_path, SIZE) as second:
        assert 1.9 * SIZE < reservations.unused() < 2 * SIZE, "less what they have taken already"
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "released\n"
        assert 0.9 * SIZE < reservations.unused() < SIZE
        second.kill()
        second.wait()
        assert reservations.unused() == 0
        assert [file.name for file in tmp_path.iterdir()] == ["lock"], "nothing of the dead is left"
        first.kill()


def test_what_a_process_has_taken_does_not_count_twice(tmp_path: Path) -> None:
    with process(tmp_path, 1 << 20) as small:
        assert Reservations(tmp_path).unused() == 0  # Python alone takes more
        small.kill()


def test_a_process_does_not_wait_for_its_own_memory(tmp_path: Path) -> None:
    class Owner:
        pass

    owner, reservations = Owner(), Reservations(tmp_path)
    with reservations.locked():
        reservations.reserve(SIZE, owner)
        assert reservations.unused() == 0


def test_a_folder_that_cannot_be_used_reserves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reservations = Reservations(tmp_path / "file")
    with reservations.locked():
        reservations.reserve(SIZE, reservations)
        assert reservations.unused() == 0


@pytest.mark.parametrize("planted", ["another user's", "writable by all", "a link"])
def test_a_folder_that_is_not_this_users_alone_is_not_used(planted: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "real").mkdir()
    (tmp_path / "precious").write_text("precious")
    if planted == "a link":
        folder.symlink_to(tmp_path / "real")
    else:
        folder.mkdir()
        (folder / "lock").symlink_to(tmp_path / "precious")
        (folder / "1.a.bytes").write_text(str(SIZE))
        if planted == "another user's":
            if os.getuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(folder, 65534, 65534)
        else:
            folder.chmod(0o777)
    reservations = Reservations(folder)
    with reservations.locked():
        reservations.reserve(SIZE, reservations)
        assert reservations.unused() == 0
    assert (tmp_path / "precious").read_text() == "precious"
    assert list((tmp_path / "real").iterdir()) == []


def test_files_that_are_no_reservations_are_ignored(tmp_path: Path) -> None:
    for name, content in {"notes.bytes": b"x", "1.a.bytes": b"abc", "1.b.bytes": b"\xff\xfe", "1.c.bytes": b"-5"}.items():
        (tmp_path / name).write_bytes(content)
    assert Reservations(tmp_path).unused() == 0


def test_a_lock_that_is_held_for_too_long_does_not_hold_up_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.model.memory.reservations.LOCK_TIMEOUT_S", 0.1)
    with Reservations(tmp_path).locked(), Reservations(tmp_path).locked():
        pass
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with Reservations(tmp_path).locked():
        pass
