"""`penstock keys add`, `list`, `edit`, `usage`, `revoke` and `remove`, as people type them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from penstock.config.key_usage import OPERATOR, KeyStorage, KeyUse, ServerUsage, UsageCounts, UsageFile, today
from penstock.config.keys import KeyFolder, KeyLimits, digest
from tests import warm
from tests.server import clean_environment

NO_STORAGE = {"disk": None, "batches": None}
Done = subprocess.CompletedProcess[str]


def penstock(home: Path, *args: str, rc: int = 0, **env: str) -> Done:
    command = warm.penstock(*args)
    environment = clean_environment(PENSTOCK_HOME=str(home), **env)
    done = subprocess.run(command, text=True, capture_output=True, env=environment, timeout=60, check=False)
    assert done.returncode == rc, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_key_is_made_shown_once_listed_and_revoked(tmp_path: Path) -> None:
    limits = ("--jobs", "2", "--tokens-per-minute", "6000", "--priority", "-5", "--model", "smollm2-135m", "--model", "gpt-4o")
    made = penstock(tmp_path, "keys", "add", "bob", *limits)
    assert re.fullmatch(r"sk-penstock-[\w-]{43}\n", made.stdout)  # nothing but the key
    key = made.stdout.strip()
    assert key not in made.stderr
    assert "2 answers at once, 6000 tokens a minute, priority up to -5, only smollm2-135m and gpt-4o." in made.stderr
    assert "penstock keys revoke bob" in made.stderr

    output = penstock(tmp_path, "keys", "list").stdout
    assert re.search(
        rf"^bob +\.\.\.{re.escape(key[-4:])} +\d{{4}}-\d\d-\d\d +2 answers at once, .*gpt-4o$", output, flags=re.MULTILINE
    )
    (entry,) = json.loads(penstock(tmp_path, "keys", "list", "--json").stdout)["keys"]
    created = entry.pop("created")
    assert entry == {
        "name": "bob",
        "tail": key[-4:],
        "limits": {"jobs": 2, "tokens_per_minute": 6000, "priority": -5, "models": ["smollm2-135m", "gpt-4o"], **NO_STORAGE},
        "revoked": None,
    }

    assert "'bob' is revoked" in penstock(tmp_path, "keys", "revoke", "bob").stdout
    assert "Nothing has changed" in penstock(tmp_path, "keys", "revoke", "bob").stdout
    (entry,) = json.loads(penstock(tmp_path, "keys", "list", "--json").stdout)["keys"]
    assert entry["revoked"] >= created
    assert "There is already a key 'bob'" in penstock(tmp_path, "keys", "add", "bob", rc=1).stderr


def test_revoking_the_last_key_says_what_that_means_and_a_revoked_one_can_be_removed(tmp_path: Path) -> None:
    penstock(tmp_path, "keys", "add", "ann")
    penstock(tmp_path, "keys", "add", "bob")
    assert "last" not in penstock(tmp_path, "keys", "revoke", "ann").stderr
    assert "'bob' is valid" in penstock(tmp_path, "keys", "remove", "bob", rc=1).stderr
    last = penstock(tmp_path, "keys", "revoke", "bob").stderr
    assert "It was the last valid one" in last
    assert "refuses all requests" in last
    assert penstock(tmp_path, "keys", "remove", "ann").stderr == ""
    assert "from its next start on, a server on this machine requires none" in penstock(tmp_path, "keys", "remove", "bob").stderr
    assert "There is no key 'bob'" in penstock(tmp_path, "keys", "remove", "bob", rc=1).stderr
    penstock(tmp_path, "keys", "add", "bob")


def test_the_limits_of_a_key_are_changed_and_the_key_stays(tmp_path: Path) -> None:
    key = penstock(tmp_path, "keys", "add", "bob", "--jobs", "2", "--priority", "0", "--disk", "5GB", "--batches", "1")
    assert "5 GB of disk space, 1 open batch." in key.stderr
    folder = KeyFolder(tmp_path / "keys")
    (before,) = folder.records()
    changes = ("--jobs", "none", "--tokens-per-minute", "600", "--disk", "300MB", "--model", "m", "--model", "n")
    changed = penstock(tmp_path, "keys", "edit", "bob", *changes).stdout
    assert "600 tokens a minute, priority up to 0, only m and n, 300 MB of disk space, 1 open batch." in changed
    assert "notices within a second" in changed
    (after,) = folder.records()
    assert after.sha256 == before.sha256
    assert after.limits == KeyLimits(tokens_per_minute=600, priority=0, models=("m", "n"), disk=300 * 10**6, batches=1)
    penstock(tmp_path, "keys", "edit", "bob", "--model", "none", "--batches", "none", "--disk", "NONE")
    assert folder.records()[0].limits == KeyLimits(tokens_per_minute=600, priority=0)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ((), "Nothing would change"),
        (("--jobs", "0"), "cannot be used"),
        (("--jobs", "many"), "Give a whole number, or none"),
        (("--disk", "5XB"), "Give a size such as"),
        (("--batches", "-1"), "cannot be used"),
        (("--priority", "11"), "cannot be used"),
    ],
)
def test_a_change_that_cannot_be_is_wrong_usage_and_changes_nothing(tmp_path: Path, wrong: tuple[str, ...], words: str) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("bob", KeyLimits(jobs=1))
    done = penstock(tmp_path, "keys", "edit", "bob", *wrong, rc=64)
    assert words in " ".join(done.stderr.split())
    assert folder.records()[0].limits == KeyLimits(jobs=1)


def test_only_a_key_that_is_valid_can_be_changed(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("bob")
    folder.revoke("bob")
    assert "is revoked" in penstock(tmp_path, "keys", "edit", "bob", "--jobs", "1", rc=1).stderr
    assert "There is no key 'eve'" in penstock(tmp_path, "keys", "edit", "eve", "--jobs", "1", rc=1).stderr


def test_what_keys_have_used_is_shown(tmp_path: Path) -> None:
    assert "nothing was used" in penstock(tmp_path, "keys", "usage").stdout
    assert json.loads(penstock(tmp_path, "keys", "usage", "--json").stdout) == {"keys": []}
    folder = KeyFolder(tmp_path / "keys")
    owner = digest(folder.add("bob"))[:16]
    folder.add("ada")
    folder.add("eve")
    folder.revoke("eve")
    day = today()
    record = ServerUsage(
        written=1.0,
        workspace="/jobs",
        used={
            owner: KeyUse(UsageCounts(30, 4000, 500), day, UsageCounts(3, 400, 50)),
            OPERATOR: KeyUse(UsageCounts(1, 2, 3), "2020-01-01", UsageCounts(1, 2, 3)),
            "f" * 16: KeyUse(UsageCounts(9, 9, 9)),
        },
        held={owner: KeyStorage(1_500_000, 2)},
    )
    file = UsageFile(folder.path)
    file.write(record)
    file.close()
    rows = [line.split() for line in penstock(tmp_path, "keys", "usage").stdout.splitlines()]
    assert rows[1:] == [
        ["ada", *["0"] * 6, "0", "bytes", "0"],
        ["bob", "3", "400", "50", "30", "4,000", "500", "1.5", "MB", "2"],
        ["eve", "(revoked)", *["0"] * 6, "0", "bytes", "0"],
        ["(owner)", "0", "0", "0", "1", "2", "3", "0", "bytes", "0"],
        ["(removed)", "0", "0", "0", "9", "9", "9", "0", "bytes", "0"],
    ]
    entries = json.loads(penstock(tmp_path, "keys", "usage", "--json").stdout)["keys"]
    assert [(one["name"], one["state"]) for one in entries][:3] == [("ada", "valid"), ("bob", "valid"), ("eve", "revoked")]
    assert entries[1] == {
        "name": "bob",
        "state": "valid",
        "today": {"requests": 3, "prompt_tokens": 400, "completion_tokens": 50},
        "total": {"requests": 30, "prompt_tokens": 4000, "completion_tokens": 500},
        "disk_bytes": 1_500_000,
        "open_batches": 2,
    }


def test_without_keys_the_list_says_what_that_means(tmp_path: Path) -> None:
    assert "`penstock keys add NAME` creates one" in penstock(tmp_path, "keys", "list").stdout
    assert json.loads(penstock(tmp_path, "keys", "list", "--json").stdout) == {"keys": []}
    assert "There is no key 'bob'" in penstock(tmp_path, "keys", "revoke", "bob", rc=1).stderr


def test_a_key_without_limits_says_so(tmp_path: Path) -> None:
    assert "The key 'bob': no limits." in penstock(tmp_path, "keys", "add", "bob").stderr


@pytest.mark.parametrize("wrong", [("--jobs", "0"), ("--tokens-per-minute", "-1"), ("--priority", "11"), ("--model", " ")])
def test_a_limit_that_cannot_be_is_wrong_usage_and_makes_no_key(tmp_path: Path, wrong: tuple[str, str]) -> None:
    done = penstock(tmp_path, "keys", "add", "bob", *wrong, rc=64)
    assert "cannot be used" in done.stderr
    assert KeyFolder(tmp_path / "keys").records() == ()


def test_a_server_with_a_folder_of_its_own_gets_its_keys_there(tmp_path: Path) -> None:
    home, own, other = tmp_path / "home", tmp_path / "own", tmp_path / "other"
    penstock(home, "keys", "add", "bob", "--keys", str(own))
    penstock(home, "keys", "add", "eve", PENSTOCK_KEYS=str(other))
    assert [record.name for folder in (own, other) for record in KeyFolder(folder).records()] == ["bob", "eve"]
    assert not home.exists()


def test_what_is_told_about_another_folder_names_it(tmp_path: Path) -> None:
    own = str(tmp_path / "own keys")
    assert "refuses all requests" in penstock(tmp_path, "keys", "list", "--keys", own).stdout
    assert "refuses all requests" in penstock(tmp_path, "keys", "list", PENSTOCK_KEYS=own).stdout
    assert "requires none" in penstock(tmp_path, "keys", "list").stdout
    made = penstock(tmp_path, "keys", "add", "bob", "--keys", own)
    assert f"penstock keys revoke bob --keys '{own}'" in made.stderr
    assert "requires a key" in made.stderr
    assert "requires a key" not in penstock(tmp_path, "keys", "add", "ann", "--keys", own).stderr


def test_a_damaged_record_is_named_beside_the_list_of_the_others(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    folder.add("bob", KeyLimits(jobs=1))
    folder.add("eve")
    (folder.path / "eve.json").write_bytes(b"{")
    done = penstock(tmp_path, "keys", "list", rc=1)
    assert "bob" in done.stdout
    assert "eve.json is not a valid key file" in done.stderr
    assert "eve.json" in penstock(tmp_path, "config", rc=1).stderr  # and no server starts


def test_a_server_that_others_reach_is_configured_with_a_key_alone(tmp_path: Path) -> None:
    assert "penstock keys add NAME" in penstock(tmp_path, "config", "--host", "0.0.0.0", rc=1).stderr
    KeyFolder(tmp_path / "keys").add("bob")
    penstock(tmp_path, "config", "--host", "0.0.0.0")


@pytest.mark.parametrize("command", ["", "add", "list", "edit", "usage", "revoke"])
def test_every_command_explains_itself(tmp_path: Path, command: str) -> None:
    path = ["keys", *command.split()]
    assert penstock(tmp_path, *path, "--help").stdout.startswith(f"Usage: {' '.join(['penstock', *path])}")
