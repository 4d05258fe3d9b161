"""Hashes of weights are known while their file stays as it is, and computed again as soon as it does not."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from penstock.model.files import known_hashes
from penstock.model.files.known_hashes import KnownHashes, hash_parts


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(known_hashes, "_SMALL_FILE", 0)
    return tmp_path / "cache/manifests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"onetwo")
    return path


def hashed(path: Path) -> dict[str, str]:
    content = memoryview(path.read_bytes())
    return hash_parts(path, {"one": content[:3], "two": content[3:]})


def true_hashes(*parts: bytes) -> dict[str, str]:
    return {name: hashlib.sha256(part).hexdigest() for name, part in zip(("one", "two"), parts, strict=True)}


def forbid_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts of files; where a note lies is a hash of the path."""

    def sha256(data: object) -> object:
        assert not isinstance(data, memoryview), "a known part was hashed"
        return hashlib.sha256(data)  # type: ignore[arg-type]

    monkeypatch.setattr(known_hashes, "hashlib", type("Hashlib", (), {"sha256": staticmethod(sha256)}))


def test_what_is_known_is_not_read_again(notes: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hashed(file)
    forbid_hashing(monkeypatch)
    assert hashed(file) == first == true_hashes(b"one", b"two")


def test_parts_are_added_to_those_that_are_known(notes: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = memoryview(b"onetwo")
    hash_parts(file, {"one": content[:3]})
    hash_parts(file, {"two": content[3:]})
    forbid_hashing(monkeypatch)
    assert hashed(file) == true_hashes(b"one", b"two")


@pytest.mark.parametrize("replace", [False, True], ids=["written in place", "replaced, as old as before"])
def test_a_file_that_changed_is_hashed_again(notes: Path, file: Path, tmp_path: Path, replace: bool) -> None:
    hashed(file)
    before = file.stat()
    if replace:
        other = tmp_path / "other"
        other.write_bytes(b"onesix")
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(file)
    else:
        file.write_bytes(b"onesix")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert hashed(file) == true_hashes(b"one", b"six")


def test_what_was_hashed_while_the_file_changed_is_not_kept(notes: Path, file: Path) -> None:
    hashes = KnownHashes(file)
    file.write_bytes(b"longer than before")
    hashes.add({"one": "0" * 64})
    assert KnownHashes(file).get(["one"]) == {}


def test_a_link_and_its_file_share_their_hashes(notes: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed(file)
    link = tmp_path / "snapshot"
    link.symlink_to(file)
    forbid_hashing(monkeypatch)
    assert hashed(link) == true_hashes(b"one", b"two")


def test_notes_on_files_that_are_gone_are_removed(notes: Path, file: Path, tmp_path: Path) -> None:
    hashed(file)
    [first] = notes.iterdir()
    second = tmp_path / "second"
    second.write_bytes(file.read_bytes())
    file.unlink()
    hashed(second)
    [left] = notes.iterdir()
    assert left != first


@pytest.mark.parametrize("note", [b"", b"{}", b"[1, 2]", b'{"version": null, "sha256": 7}', b"\xff", b"[" * 100_000])
def test_a_damaged_note_is_made_anew(notes: Path, file: Path, note: bytes) -> None:
    first = hashed(file)
    [path] = notes.iterdir()
    whole = path.read_bytes()
    path.write_bytes(note)
    assert hashed(file) == first
    assert path.read_bytes() == whole


def test_without_a_cache_all_is_hashed(notes: Path, file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert hashed(file) == hashed(file) == true_hashes(b"one", b"two")


def test_small_files_leave_no_note(notes: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_hashes, "_SMALL_FILE", 7)
    assert hashed(file) == true_hashes(b"one", b"two")
    assert not notes.exists()
