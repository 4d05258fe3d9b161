"""Whose key it is: the owner's, a good one's, a revoked one's or nobody's, while the folder changes under a server that runs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

import pytest

from penstock.config.keys import KeyFolder, KeyLimits
from penstock.doors.access.keys import OWNER, Caller, Keys
from penstock.doors.generation.catalog import ModelCatalog
from penstock.errors import ConfigError, InvalidKey, KeyForbids, KeyRevoked

OWNERS = "the-key-of-the-owner"


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def at_rest(folder: KeyFolder) -> None:
    """Long after the last change, when one look at the folder tells that there was none."""
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (1, 1))


def just_changed(folder: KeyFolder) -> None:
    """As whoever replaces a file leaves it."""
    os.utime(folder.path)


# ---- who is who ----


def test_without_any_key_everybody_is_let_in(folder: KeyFolder) -> None:
    for keys in (Keys(folder, None), Keys(None, None)):
        assert not keys.required
        assert keys.find(None) is keys.find("anything") is OWNER


def test_the_owners_key_has_no_limits_and_another_is_refused(folder: KeyFolder) -> None:
    keys = Keys(folder, OWNERS)
    assert keys.required
    assert keys.find(OWNERS) is OWNER
    for given in (None, "", "another-key", OWNERS[:-1], "\udcff"):
        with pytest.raises(InvalidKey) as refused:
            keys.find(given)
        assert refused.value.code == "invalid_api_key"


def test_a_key_of_the_folder_is_found_with_its_name_and_limits(folder: KeyFolder) -> None:
    limits = KeyLimits(jobs=1)
    bob, eve = folder.add("bob", limits), folder.add("eve")
    keys = Keys(folder, OWNERS)
    assert (keys.find(bob).name, keys.find(bob).limits) == ("bob", limits)
    assert keys.find(eve).name == "eve"
    assert keys.find(bob) != keys.find(eve)
    assert keys.find(OWNERS) is OWNER
    with pytest.raises(InvalidKey):
        keys.find(None)


def test_a_server_that_names_a_folder_wants_keys_also_while_it_is_empty(folder: KeyFolder) -> None:
    keys = Keys(folder, None, always=True)
    assert keys.required
    with pytest.raises(InvalidKey, match="requires an API key"):
        keys.find(None)


def test_with_only_revoked_keys_the_server_is_closed(folder: KeyFolder) -> None:
    bob = folder.add("bob")
    folder.revoke("bob")
    keys = Keys(folder, None)
    assert keys.required
    with pytest.raises(KeyRevoked) as refused:
        keys.find(bob)
    assert refused.value.code == "key_revoked"
    with pytest.raises(InvalidKey):
        keys.find(None)


# ---- while it runs ----


def test_the_first_key_closes_a_server_that_runs(folder: KeyFolder) -> None:
    keys = Keys(folder, None)
    keys.find(None)
    bob = folder.add("bob")
    with pytest.raises(InvalidKey):
        keys.find(None)
    assert keys.find(bob).name == "bob"


def test_changes_that_follow_each_other_at_once_are_all_seen(folder: KeyFolder) -> None:
    keys = Keys(folder, OWNERS)
    for name in ("a", "b", "c"):
        key = folder.add(name)
        assert keys.find(key).name == name
        folder.revoke(name)
        with pytest.raises(KeyRevoked):
            keys.find(key)


def test_a_folder_at_rest_is_not_read_again(folder: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    bob = folder.add("bob")
    at_rest(folder)
    keys = Keys(folder, None)
    monkeypatch.setattr(KeyFolder, "contents", lambda self: pytest.fail("read again"))
    assert keys.find(bob).name == "bob"


def test_who_is_revoked_is_told_once_and_checked_once_more(folder: KeyFolder) -> None:
    output: list[Caller] = []
    bob, eve = folder.add("bob"), folder.add("eve")
    keys = Keys(folder, None, on_revoked=output.append)
    callers = keys.find(bob), keys.find(eve)
    folder.revoke("bob")
    with pytest.raises(KeyRevoked, match="'bob' is no longer valid"):
        keys.check(callers[0])  # nobody looked since
    keys.refresh()
    assert output == [callers[0]]
    keys.check(callers[1])
    keys.check(OWNER)


def test_a_watch_sees_a_revoked_key_while_nobody_asks(folder: KeyFolder) -> None:
    bob = folder.add("bob")

    async def scene() -> Caller:
        output: asyncio.Future[Caller] = asyncio.get_running_loop().create_future()
        keys = Keys(folder, None, on_revoked=output.set_result)
        keys.find(bob)
        watch = asyncio.create_task(keys.watch())
        folder.revoke("bob")
        try:
            return await asyncio.wait_for(output, 30)
        finally:
            watch.cancel()

    assert asyncio.run(scene()).name == "bob"


def test_keys_that_vanish_close_the_server_and_never_open_it(folder: KeyFolder) -> None:
    output: list[Caller] = []
    bob = folder.add("bob")
    keys = Keys(folder, None, on_revoked=output.append)
    shutil.rmtree(folder.path)
    for given in (None, bob):
        with pytest.raises(InvalidKey):
            keys.find(given)
    assert [caller.name for caller in output] == ["bob"]
    assert keys.required


def test_who_gets_a_name_after_another_is_somebody_else(folder: KeyFolder) -> None:
    keys = Keys(folder, None)
    before = keys.find(folder.add("bob"))
    (folder.path / "bob.json").unlink()
    after = keys.find(folder.add("bob"))
    assert before != after
    with pytest.raises(KeyRevoked):
        keys.check(before)
    keys.check(after)
    assert before.owner != after.owner
    assert [keys.is_valid(one.owner) for one in (before, after, OWNER)] == [None, True, True]


def test_what_somebody_asked_for_once_keeps_to_the_models_of_their_key(folder: KeyFolder) -> None:
    keys = Keys(folder, None)
    bob = keys.find(folder.add("bob", KeyLimits(models=("small",))))
    canonical = ModelCatalog({}).canonical
    keys.check_model(bob.owner, "small", canonical)
    keys.check_model(None, "large", canonical)
    with pytest.raises(KeyForbids, match="'bob' is not for the model 'large'"):
        keys.check_model(bob.owner, "large", canonical)


# ---- damage ----


def test_a_damaged_record_keeps_a_server_from_starting(folder: KeyFolder) -> None:
    folder.add("bob")
    (folder.path / "bob.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"bob\.json"):
        Keys(folder, OWNERS)


def test_a_record_that_is_damaged_while_the_server_runs_is_nobodys_key_and_logged_once(
    folder: KeyFolder, caplog: pytest.LogCaptureFixture
) -> None:
    bob, eve = folder.add("bob"), folder.add("eve")
    keys = Keys(folder, None)
    whole = (folder.path / "bob.json").read_bytes()
    (folder.path / "bob.json").write_bytes(whole[:20])
    at_rest(folder)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(InvalidKey):
                keys.find(bob)
            assert keys.find(eve).name == "eve"
    assert [record.getMessage() for record in caplog.records if "bob.json" in record.getMessage()] == [caplog.messages[0]]
    (folder.path / "bob.json").write_bytes(whole)
    assert keys.find(bob).name == "bob"


def test_a_record_that_is_damaged_in_place_long_after_it_was_made_is_nobodys_key(folder: KeyFolder) -> None:
    bob = folder.add("bob")
    at_rest(folder)
    keys = Keys(folder, None)
    assert keys.find(bob).name == "bob"
    (folder.path / "bob.json").write_bytes(b"{")
    os.utime(folder.path, (1, 1))  # nothing of it shows in the folder itself
    with pytest.raises(InvalidKey):
        keys.find(bob)


def test_a_damaged_record_alone_closes_a_server_that_runs(folder: KeyFolder) -> None:
    folder.path.mkdir(mode=0o700)
    keys = Keys(folder, None)
    (folder.path / "bob.json").write_bytes(b"{")
    with pytest.raises(InvalidKey):
        keys.find(None)


def test_a_folder_that_cannot_be_read_for_a_while_changes_nothing(folder: KeyFolder, caplog: pytest.LogCaptureFixture) -> None:
    bob = folder.add("bob")
    keys = Keys(folder, None)
    folder.path.chmod(0o777)  # refused, whoever runs this
    just_changed(folder)
    with caplog.at_level(logging.ERROR):
        assert keys.find(bob).name == keys.find(bob).name == "bob"
    assert len(caplog.records) == 1
    folder.path.chmod(0o700)
    folder.revoke("bob")
    with pytest.raises(KeyRevoked):
        keys.find(bob)


# ---- what a key forbids ----


@pytest.mark.parametrize(
    "ceiling, asked, expected", [(None, None, 0), (None, 10, 10), (5, None, 0), (5, 5, 5), (-3, None, -3), (-3, -10, -10)]
)
def test_a_priority_up_to_the_ceiling_is_given(ceiling: int | None, asked: int | None, expected: int) -> None:
    assert Caller("", "bob", KeyLimits(priority=ceiling)).priority(asked) == expected


def test_a_priority_beyond_the_ceiling_is_refused_with_the_ceiling() -> None:
    with pytest.raises(KeyForbids, match="'bob' may ask for a priority up to -3, and this request asks for 0"):
        Caller("", "bob", KeyLimits(priority=-3)).priority(0)


def test_a_model_may_be_allowed_by_any_of_its_names() -> None:
    canonical = ModelCatalog({"tiny": 1, "big": 2}, {"gpt-4o": "big"}).canonical
    for allowed in ("gpt-4o", "big", "GPT-4o:latest"):
        caller = Caller("", "bob", KeyLimits(models=(allowed,)))
        assert [caller.may_use(name, canonical) for name in ("big", "gpt-4o", "big:latest", "tiny", "other")] == [
            *(True, True, True),
            *(False, False),
        ]
        assert OWNER.may_use("tiny", canonical)
        with pytest.raises(KeyForbids, match=rf"'bob' is not for the model 'tiny'\. It may use: {allowed}"):
            caller.check_model("tiny", canonical)
