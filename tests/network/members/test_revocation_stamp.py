"""Stamps: when the authority last signed its list of revocations, so that a list that is withheld is noticed."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.home import Home, JoinedNetwork
from penstock.errors import Untrusted
from penstock.network.joining import authority
from penstock.network.members.revocation_stamps import RevocationStamps
from penstock.network.trust import revocation_stamp, revocations
from penstock.network.trust.certificates import create_authority, issue
from penstock.network.trust.revocation_stamp import NO_STAMP, RevocationStamp, read_stamp, sign_stamp
from penstock.network.trust.revocations import NO_REVOCATIONS

AUTHORITY = create_authority("home")
LIST = revocations.sign({1: "desk", 2: "laptop"}, AUTHORITY)
STAMP = sign_stamp(LIST, NO_STAMP, AUTHORITY)
DAY = 24 * 3600


@pytest.fixture
def network(tmp_path: Path) -> JoinedNetwork:
    return authority.create(Home(tmp_path), "home", node="desk", listen="tls/192.0.2.7:7447")


def stamp_of(network: JoinedNetwork) -> RevocationStamp:
    return read_stamp(network.stamp_file.read_bytes(), authority.signing_identity(network).certificate)


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(revocation_stamp, "time", SimpleNamespace(time=lambda: seconds))


def test_a_stamp_is_read_as_it_was_and_says_what_is_on_the_list() -> None:
    found = read_stamp(STAMP.encode(), AUTHORITY.certificate)
    assert found == STAMP
    assert found.covers(LIST)
    fewer, more = revocations.sign({1: "desk"}, AUTHORITY), LIST | revocations.sign({3: "phone"}, AUTHORITY)
    others = revocations.sign({1: "desk", 3: "phone"}, AUTHORITY)
    assert [found.lacks(one) for one in (LIST, fewer, others, more)] == [False, True, True, False]
    assert read_stamp(b"", AUTHORITY.certificate) is NO_STAMP


@given(place=st.integers(0, len(STAMP.encode()) - 1), other=st.integers(1, 255))
def test_any_changed_byte_of_a_stamp_is_refused(place: int, other: int) -> None:
    changed = bytearray(STAMP.encode())
    changed[place] ^= other
    with pytest.raises(Untrusted):
        read_stamp(bytes(changed), AUTHORITY.certificate)


def test_a_stamp_of_a_node_or_of_another_network_is_refused() -> None:
    for signer in (issue(AUTHORITY, "laptop"), create_authority("home"), create_authority("lab")):
        with pytest.raises(Untrusted, match="not signed by this network's authority"):
            read_stamp(sign_stamp(LIST, NO_STAMP, signer).encode(), AUTHORITY.certificate)
    with pytest.raises(Untrusted, match="not the stamp"):
        read_stamp(STAMP.encode() + bytes(256), AUTHORITY.certificate)


@given(order=st.permutations(range(4)))
def test_the_newest_stamp_counts_in_whatever_order_they_arrive(order: list[int]) -> None:
    made = [STAMP]
    for _ in range(3):
        made.append(sign_stamp(LIST, made[-1], AUTHORITY))
    stamps = RevocationStamps(None, AUTHORITY.certificate)
    for number in order:
        stamps.merge(made[number].encode())
        assert stamps.current == max(made[: max(order[: order.index(number) + 1]) + 1], key=lambda stamp: stamp.serial)
        assert stamps.data == stamps.current.encode()


def test_a_file_that_was_restored_from_an_older_copy_is_made_new_again(tmp_path: Path) -> None:
    newer, file = sign_stamp(LIST, STAMP, AUTHORITY), tmp_path / "revoked.stamp"
    stamps = RevocationStamps(file, AUTHORITY.certificate)
    stamps.merge(newer.encode())
    file.write_bytes(STAMP.encode())
    assert not stamps.reload()
    assert file.read_bytes() == newer.encode()


def test_a_network_is_stamped_from_its_first_day_and_with_every_revocation(network: JoinedNetwork) -> None:
    first = stamp_of(network)
    assert first.covers(NO_REVOCATIONS)
    authority.invite(network, "laptop")
    authority.revoke(network, "laptop")
    second = stamp_of(network)
    assert second.serial > first.serial
    assert second.covers(revocations.read(network.revocations_file.read_bytes(), authority.signing_identity(network).certificate))


def test_the_authority_stamps_its_list_once_a_day(network: JoinedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    first, now = stamp_of(network), time.time()
    assert not authority.stamp_revocations_if_due(network)
    set_clock(monkeypatch, now + DAY - 60)
    assert not authority.stamp_revocations_if_due(network)
    set_clock(monkeypatch, now + DAY + 60)
    assert authority.stamp_revocations_if_due(network)
    second = stamp_of(network)
    assert second.serial > first.serial
    assert second.signed_at - first.signed_at >= DAY
    set_clock(monkeypatch, now)  # the clock was set back: the next stamp has the right time and still the higher serial
    assert authority.stamp_revocations_if_due(network)
    assert stamp_of(network).serial > second.serial
    assert stamp_of(network).signed_at == int(now)


def test_a_network_from_before_there_were_stamps_gets_one(network: JoinedNetwork) -> None:
    network.stamp_file.unlink()
    assert authority.stamp_revocations_if_due(network)
    assert stamp_of(network).covers(NO_REVOCATIONS)


def test_a_list_that_grew_by_what_others_knew_is_stamped_at_once(network: JoinedNetwork) -> None:
    signing = authority.signing_identity(network)
    network.revocations_file.write_bytes(revocations.sign({7: "laptop"}, signing).encode())
    assert authority.stamp_revocations_if_due(network)
    assert stamp_of(network).count == 1


def test_a_stamp_is_small_enough_for_every_record() -> None:
    largest = RevocationStamp(1 << 53, revocation_stamp.MAX_TIME, revocations.MAX_RECORDS, bytes(32), bytes(72))
    assert len(largest.encode()) <= revocation_stamp.MAX_STAMP_BYTES
    assert msgspec.msgpack.decode(largest.encode()[len(revocation_stamp.STAMP_MARK) :], type=RevocationStamp) == largest
