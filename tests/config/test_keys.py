"""A folder of API keys: no key in it, private files, names that are used once, and damage that is told by its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.api_key import key_folder, read_api_key
from penstock.config.keys import PRIORITIES, KeyFolder, KeyLimits
from penstock.config.node import ServerConfig
from penstock.doors.openai.requests import TIERS
from penstock.errors import ConfigError

SOME = KeyLimits(jobs=2, tokens_per_minute=1000, priority=-1, models=("smollm2-135m", "gpt-4o"))


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "home" / "keys")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def written(folder: KeyFolder, name: str, /, **changes: Any) -> Path:
    """The file of a new key, with other values."""
    folder.add(name)
    file = folder.path / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return file


# ---- adding ----


def test_a_key_is_random_and_its_record_tells_all_but_the_key(folder: KeyFolder) -> None:
    key = folder.add("bob", SOME)
    assert re.fullmatch(r"sk-penstock-[\w-]{43}", key)
    (record,) = folder.records()
    assert (record.name, record.tail, record.limits, record.revoked) == ("bob", key[-4:], SOME, None)
    assert record.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record.created)
    assert all(key not in file.read_text(encoding="utf-8") for file in folder.path.iterdir())
    assert folder.add("eve") != key


def test_folder_and_files_are_for_their_user_alone_whatever_the_umask(folder: KeyFolder) -> None:
    before = os.umask(0)
    try:
        folder.add("bob")
        folder.revoke("bob")
    finally:
        os.umask(before)
    assert (mode(folder.path), mode(folder.path / "bob.json")) == (0o700, 0o600)
    assert [file.name for file in folder.path.iterdir()] == ["bob.json"]  # nothing that was written aside is left


def test_a_name_is_used_once_also_after_it_was_revoked(folder: KeyFolder) -> None:
    folder.add("bob")
    (record,) = folder.records()
    with pytest.raises(ConfigError, match="There is already a key 'bob'"):
        folder.add("bob")
    folder.revoke("bob")
    with pytest.raises(ConfigError, match=r"There is already a key 'bob', or a revoked one\. Use another name"):
        folder.add("bob")
    assert folder.records()[0].sha256 == record.sha256


@pytest.mark.parametrize("name", ["", ".bob", "../bob", "a/b", "two words", "x" * 65, "Ü"])
def test_a_name_that_is_no_file_name_is_refused(folder: KeyFolder, name: str) -> None:
    with pytest.raises(ConfigError, match="name = "):
        folder.add(name)
    assert not folder.path.exists()


def test_of_processes_that_add_one_name_at_once_one_gets_the_key(folder: KeyFolder) -> None:
    program = f"""
import sys
from collections.abc import Callable
from pathlib import Path
from penstock.config.keys import KeyFolder
from penstock.errors import ConfigError
print("ready", flush=True)
sys.stdin.readline()
try:
    print(KeyFolder(Path({str(folder.path)!r})).add("bob"))
except ConfigError:
    print("refused")
"""
    pipe = subprocess.PIPE
    adding = [subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in adding:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in adding:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=60)[0].strip() for process in adding)
    assert said[:3] == ["refused"] * 3
    (record,) = folder.records()
    assert record.sha256 == hashlib.sha256(said[3].encode()).hexdigest()


# ---- revoking ----


def test_a_revoked_key_stays_as_a_record_that_says_when(folder: KeyFolder) -> None:
    folder.add("bob", SOME)
    (before,) = folder.records()
    assert folder.revoke("bob")
    (after,) = folder.records()
    assert after.revoked is not None
    assert dataclasses.replace(after, revoked=None) == before
    assert not folder.revoke("bob")
    assert folder.records() == (after,)


def test_who_revokes_a_name_that_is_not_there_is_told_those_that_are(folder: KeyFolder) -> None:
    with pytest.raises(ConfigError, match="There is no key 'bob'"):
        folder.revoke("bob")
    folder.add("eve")
    with pytest.raises(ConfigError, match="There are: eve"):
        folder.revoke("bob")


# ---- limits ----


@pytest.mark.parametrize(
    "limits",
    [
        {"jobs": 0},
        {"jobs": True},
        {"tokens_per_minute": -1},
        {"tokens_per_minute": 1.5},
        {"priority": 11},
        {"priority": True},
        {"models": ()},
        {"models": ("",)},
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(limits))} = .* cannot be used"):
        KeyLimits(**limits)


def test_priorities_are_those_of_requests() -> None:
    assert (PRIORITIES[0], PRIORITIES[-1]) == (min(TIERS.values()), max(TIERS.values()))


# ---- what lies in the folder ----


def test_no_folder_is_no_keys(folder: KeyFolder, tmp_path: Path) -> None:
    assert (folder.records(), folder.stamp()) == ((), None)
    file = tmp_path / "file"
    file.touch()
    assert KeyFolder(file / "keys").records() == ()
    with pytest.raises(ConfigError, match="file cannot be read: Not a directory"):
        KeyFolder(file).records()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "eve"},
        {"name": 7},
        {"sha256": "abc"},
        {"sha256": None},
        {"tail": None},
        {"created": 7},
        {"revoked": True},
        {"limits": None},
        {"limits": {}},
        {"limits": {"models": "smollm2"}},
        {"limits": {"models": None, "jobs": 0}},
        {"more": 1},
    ],
)
def test_a_record_with_a_value_that_cannot_be_is_told_by_its_file_and_the_others_are_read(
    folder: KeyFolder, changes: dict[str, Any]
) -> None:
    file = written(folder, "bob", **changes)
    folder.add("carol")
    with pytest.raises(ConfigError, match=re.escape(str(file))):
        folder.records()
    found = folder.contents()
    assert [record.name for record in found.records] == ["carol"]
    assert len(found.broken) == 1


@given(data=st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda x: json.dumps(x).encode()))
def test_whatever_a_file_holds_it_is_a_record_or_an_error_that_names_it(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = KeyFolder(tmp_path_factory.mktemp("keys"))
    (folder.path / "bob.json").write_bytes(data)
    found = folder.contents()
    assert found.records == ()
    assert str(folder.path / "bob.json") in found.broken[0].message


def test_a_file_that_is_no_file_and_one_that_is_being_written(folder: KeyFolder) -> None:
    folder.add("bob")
    (folder.path / ".eve.json.0123").touch()
    (folder.path / "notes.txt").touch()
    assert [record.name for record in folder.records()] == ["bob"]
    (folder.path / "carol.json").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"carol\.json cannot be read: Is a directory"):
        folder.records()


def test_what_other_users_can_write_is_refused(folder: KeyFolder) -> None:
    folder.add("bob")
    (folder.path / "bob.json").chmod(0o622)
    with pytest.raises(ConfigError, match=r"can write to .*bob\.json .*0622.*chmod 600"):
        folder.records()
    folder.path.chmod(0o770)
    for use in (folder.records, lambda: folder.add("eve")):
        with pytest.raises(ConfigError, match=r"can write to .*keys .*0770.*chmod 700"):
            use()


def test_every_change_has_another_stamp_and_a_folder_at_rest_keeps_its_own(folder: KeyFolder) -> None:
    stamps = [folder.stamp()]
    for change in (lambda: folder.add("bob"), lambda: folder.add("eve"), lambda: folder.revoke("bob")):
        change()
        stamps.append(folder.stamp())
    assert len(set(stamps)) == 4
    assert folder.stamp() != folder.stamp()  # another change could come in the same moment
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (1, 1))
    assert folder.stamp() == folder.stamp()


@pytest.mark.parametrize(
    "change", [lambda file: file.write_bytes(b"{"), lambda file: file.chmod(0o660), lambda file: os.utime(file, (2, 2))]
)
def test_a_change_in_place_has_another_stamp(folder: KeyFolder, change: Callable[[Path], None]) -> None:
    folder.add("bob")
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (1, 1))
    before, file = folder.stamp(), folder.path / "bob.json"
    change(file)
    assert folder.stamp() != before


# ---- the server that takes them ----


def test_the_folder_is_that_of_the_home_unless_the_server_names_another(tmp_path: Path) -> None:
    environ = {"PENSTOCK_HOME": str(tmp_path)}
    found, named = key_folder(ServerConfig(), environ), key_folder(ServerConfig(keys=tmp_path / "mine"), environ)
    assert found is not None
    assert named is not None
    assert (found.path, named.path) == (tmp_path / "keys", tmp_path / "mine")
    assert key_folder(ServerConfig(), {}) is None


def test_a_server_that_others_reach_may_start_with_a_good_key_and_not_with_revoked_ones(tmp_path: Path) -> None:
    folder, config = KeyFolder(tmp_path), ServerConfig(host="0.0.0.0", keys=tmp_path)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match=r"without an API key\. .*penstock keys add NAME"):
        read_api_key(config, {})
    folder.add("bob")
    assert read_api_key(config, {}) is None
    folder.revoke("bob")
    with pytest.raises(ConfigError, match="without an API key"):
        read_api_key(config, {})


def test_a_record_that_cannot_be_read_is_told_before_anything_is_loaded(folder: KeyFolder) -> None:
    file = written(folder, "bob", sha256="")
    for environ in ({}, {"PENSTOCK_API_KEY": "a-long-enough-key"}):
        with pytest.raises(ConfigError, match=re.escape(str(file))):
            read_api_key(ServerConfig(keys=folder.path), environ)
