"""How old a node's list of revocations is: it is shown and logged when newer ones may be withheld, and stops nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.config.network import NetworkConfig
from penstock.network.trust import revocations
from penstock.network.trust.certificates import create_authority
from penstock.network.trust.revocation_stamp import NO_STAMP, RevocationStamp, sign_stamp, stamp_file
from penstock.peers.revocation_age import MAX_AGE_S, MAX_INCOMPLETE_S, RevocationAge
from tests.network.certificates import Authority

DAY = 24 * 3600.0


class Member:
    """A node with a clock that is set by hand."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.config: NetworkConfig = authority.invite("b").config(listen=("tls/127.0.0.1:1",))
        self.now = 0.0
        self.age = self.opened()

    def opened(self) -> RevocationAge:
        age = RevocationAge(self.config, lambda: self.now)
        age.open()
        return age

    def stamp(self, before: RevocationStamp = NO_STAMP, revoked: revocations.Revocations | None = None) -> RevocationStamp:
        return sign_stamp(revoked or revocations.NO_REVOCATIONS, before, self.authority.identity)

    def take(self, stamp: RevocationStamp) -> None:
        self.now = max(self.now, float(stamp.signed_at))
        self.age.merge("a", stamp.encode())
        self.age.reload()


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(Authority(tmp_path))


def test_a_list_that_is_older_than_a_week_is_shown_and_logged_once_a_day(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    assert (member.age.date, member.age.warning()) == ("", None), "a network whose authority never stamps is not suspicious"
    stamp = member.stamp()
    member.take(stamp)
    assert member.age.date == f"{stamp.date:%Y-%m-%dT%H:%M:%SZ}"
    member.now += MAX_AGE_S
    member.age.reload()
    assert member.age.warning() is None
    member.now += 1.5 * DAY
    for _ in range(3):
        member.age.reload()
    assert str(member.age.warning()).startswith("The revocation list is 8 days old: ")
    assert caplog.text.count("The revocation list is 8 days old") == 1
    member.now += DAY
    member.age.reload()
    assert "9 days old" in caplog.text
    again = member.opened()
    assert "9 days old" in str(again.warning()), "a restart forgets nothing"


def test_a_newer_stamp_ends_the_warning_and_an_older_or_forged_one_changes_nothing(
    member: Member, caplog: pytest.LogCaptureFixture
) -> None:
    old = member.stamp()
    new = member.stamp(old)
    member.take(new)
    kept = member.age.data
    assert kept == new.encode()
    member.age.merge("c", old.encode())
    assert member.age.data == kept
    forged = sign_stamp(revocations.NO_REVOCATIONS, new, create_authority("home"))
    member.age.merge("c", forged.encode())
    assert member.age.data == kept
    assert "the stamp of revocations of node c is ignored" in caplog.text
    assert member.config.revocations_file is not None
    assert stamp_file(member.config.revocations_file).read_bytes() == kept


def test_a_list_that_is_withheld_while_its_stamp_is_passed_on_is_noticed(member: Member) -> None:
    revoked = revocations.sign({5: "thief"}, member.authority.identity)
    member.take(member.stamp(revoked=revoked))
    assert member.age.warning() is None, "the list may be on its way"
    member.now += MAX_INCOMPLETE_S
    member.age.reload()
    assert "lacks entries" in str(member.age.warning())
    assert member.config.revocations_file is not None
    member.config.revocations_file.write_bytes(revoked.encode())
    member.age.reload()
    assert member.age.warning() is None


def test_a_list_with_more_than_the_stamp_counts_is_not_suspicious(member: Member) -> None:
    assert member.config.revocations_file is not None
    member.config.revocations_file.write_bytes(revocations.sign({5: "thief"}, member.authority.identity).encode())
    member.take(member.stamp())
    member.now += 2 * MAX_INCOMPLETE_S
    member.age.reload()
    assert member.age.warning() is None


def test_a_file_that_cannot_be_used_leaves_the_last_stamp_in_force(member: Member, caplog: pytest.LogCaptureFixture) -> None:
    stamp = member.stamp()
    member.take(stamp)
    assert member.config.revocations_file is not None
    stamp_file(member.config.revocations_file).write_bytes(b"nonsense")
    member.age.reload()
    assert member.age.data == stamp.encode()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_open_network_has_no_list() -> None:
    age = RevocationAge(NetworkConfig(listen=("tcp/127.0.0.1:1",), open=True))
    age.open()
    age.reload()
    age.merge("b", b"anything")
    assert (age.data, age.date, age.warning()) == (b"", "", None)
