"""Lists of revocations: what the authority has signed counts for ever, and nothing else does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import files
from penstock.config.home import Home
from penstock.errors import ConfigError, Untrusted
from penstock.network.joining import authority as issuing
from penstock.network.members.blocklist import Blocklist
from penstock.network.trust import revocations
from penstock.network.trust.certificates import Identity, common_name, create_authority, issue
from penstock.network.trust.revocations import Revocations
from tests.network.certificates import Authority

AUTHORITY = create_authority("home")
NODE = issue(AUTHORITY, "laptop")
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True)
LIST = revocations.sign({NODE.certificate.serial_number: "laptop", 1: "desk"}, AUTHORITY)
SIGNED = LIST.encode()
serials = st.dictionaries(st.integers(1, 2**159), names, max_size=5)


@given(revoked=serials)
def test_a_signed_list_is_read_as_it_was(revoked: dict[int, str]) -> None:
    made = revocations.sign(revoked, AUTHORITY)
    assert revocations.read(made.encode(), AUTHORITY.certificate) == made
    assert made.common_names() == {f"{node}/{serial:x}" for serial, node in revoked.items()}


@given(one=serials, other=serials)
def test_of_two_lists_everything_counts_whichever_comes_first(one: dict[int, str], other: dict[int, str]) -> None:
    lists = [revocations.sign(revoked, AUTHORITY) for revoked in (one, other)]
    for first, second in (lists, reversed(lists)):
        both = revocations.read((first | second).encode(), AUTHORITY.certificate)
        assert both.records.keys() == one.keys() | other.keys()
        assert both | first == both | second == both, "what is known already changes nothing"


def test_a_list_names_the_certificates_that_are_out() -> None:
    assert LIST.common_names() == {common_name(NODE.certificate), "desk/1"}
    assert NODE.certificate.serial_number in LIST
    assert 2 not in LIST


@given(place=st.integers(0, len(SIGNED) - 1), other=st.integers(1, 255))
def test_any_changed_byte_of_a_list_is_refused(place: int, other: int) -> None:
    changed = bytearray(SIGNED)
    changed[place] ^= other
    with pytest.raises(Untrusted):
        revocations.read(bytes(changed), AUTHORITY.certificate)


@given(length=st.integers(0, len(SIGNED) - 1), more=st.binary(max_size=3))
def test_a_list_that_was_cut_or_grew_is_refused(length: int, more: bytes) -> None:
    for data in (SIGNED[:length], SIGNED + more + b"x", more + b"x" + SIGNED):
        with pytest.raises(Untrusted):
            revocations.read(data, AUTHORITY.certificate)


def test_a_list_of_another_authority_another_network_or_a_node_is_refused() -> None:
    for signer in (create_authority("home"), NODE):
        with pytest.raises(Untrusted, match="not signed by this network's authority"):
            revocations.read(revocations.sign({1: "desk"}, signer).encode(), AUTHORITY.certificate)
    lab = Identity(create_authority("lab").certificate, AUTHORITY.key)  # the same key for two networks
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        revocations.read(revocations.sign({1: "desk"}, lab).encode(), AUTHORITY.certificate)


def test_one_record_that_the_authority_did_not_sign_spoils_the_list() -> None:
    rogue = revocations.sign({2: "phone"}, create_authority("home"))
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        revocations.read((LIST | rogue).encode(), AUTHORITY.certificate, LIST)


@pytest.mark.parametrize("change", [("serial", "2"), ("node", "phone")])
def test_a_signature_is_good_for_its_own_record_alone(change: tuple[str, str]) -> None:
    moved = msgspec.structs.replace(LIST.records[1], **dict([change]))
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        revocations.read(Revocations({1: moved}).encode(), AUTHORITY.certificate)


def test_a_list_is_never_larger_than_a_node_would_read() -> None:
    largest = revocations.Record("f" * 40, "x" * 64, bytes(72))
    crowd = Revocations(dict.fromkeys(range(2, 2 + revocations.MAX_RECORDS), largest))
    assert len(crowd.encode()) <= revocations.MAX_LIST_BYTES
    with pytest.raises(ConfigError, match="can hold 4096 certificates"):
        _ = crowd | LIST
    with pytest.raises(Untrusted, match="the limit is"):
        revocations.read(SIGNED + bytes(1 << 20), AUTHORITY.certificate)


# ---- what a node knows ----


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def blocklist(authority: Authority) -> Blocklist:
    return Blocklist(authority.folder / "a.revoked", authority.identity.certificate)


def test_a_forged_or_older_list_changes_nothing(authority: Authority, blocklist: Blocklist, tmp_path: Path) -> None:
    for name in "bc":
        authority.invite(name)
    first, second = authority.revoke("b"), authority.revoke("c")
    stranger = Authority(tmp_path, "stranger")
    stranger.invite("b")
    assert blocklist.merge(second)
    assert not blocklist.merge(first)
    assert not blocklist.merge(second)
    assert not blocklist.merge(second[:-1] + bytes([second[-1] ^ 1])), "what is known is not checked again, nor taken again"
    for forged in (stranger.revoke("b"), second[:-1], b"nonsense"):
        with pytest.raises(Untrusted):
            blocklist.merge(forged)
    assert blocklist.data == second
    assert (authority.folder / "a.revoked").read_bytes() == second


def test_a_file_that_knows_less_adds_to_what_is_known_and_is_made_whole(authority: Authority, blocklist: Blocklist) -> None:
    for name in "bcd":
        authority.invite(name)
    blocklist.merge(authority.revoke("b", "c"))
    known = blocklist.current
    authority.forget()
    (authority.folder / "a.revoked").write_bytes(authority.revoke("d"))
    assert blocklist.reload()
    assert known.common_names() < blocklist.current.common_names()
    assert (authority.folder / "a.revoked").read_bytes() == blocklist.data
    assert not blocklist.reload()


def test_what_is_revoked_while_a_list_of_others_is_kept_is_not_written_over(
    authority: Authority, blocklist: Blocklist, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "bc":
        authority.invite(name)
    of_others = authority.revoke("b")
    authority.forget()
    of_a_command = authority.revoke("c")
    locked_folder = files.locked_folder

    def after_a_command(folder: Path) -> contextlib.AbstractContextManager[None]:
        (folder / "a.revoked").write_bytes(of_a_command)
        return locked_folder(folder)

    monkeypatch.setattr(files, "locked_folder", after_a_command)
    assert blocklist.merge(of_others)
    assert {record.node for record in blocklist.current.records.values()} == {"b", "c"}
    assert (authority.folder / "a.revoked").read_bytes() == blocklist.data


def test_two_nodes_that_share_a_file_and_got_different_signatures_leave_it_alone(
    authority: Authority, blocklist: Blocklist
) -> None:
    authority.invite("b")
    other = Blocklist(None, blocklist._authority)
    blocklist.merge(authority.revoke("b"))
    authority.forget()
    other.merge(authority.revoke("b"))
    other._file = blocklist._file
    assert other.data != blocklist.data
    assert not other.reload()
    assert (authority.folder / "a.revoked").read_bytes() == blocklist.data


def test_what_an_authority_revokes_counts_also_after_it_was_restored_from_a_copy(tmp_path: Path) -> None:
    network = issuing.create(Home(tmp_path), "home", node="desk", listen="tls/192.0.2.7:7447")
    invited = {node: issuing.invite(network, node) for node in ("laptop", "phone", "tablet")}
    copy = {path.name: path.read_bytes() for path in network.folder.iterdir()}
    issuing.revoke(network, "laptop")
    issuing.revoke(network, "phone")
    vouching = invited["laptop"].authority
    member = Blocklist(tmp_path / "member.bin", vouching)
    assert member.merge(network.revocations_file.read_bytes())

    files.replace(network.folder, copy)
    assert issuing.revoke(network, "tablet") == 1
    restored = Blocklist(network.revocations_file, vouching)
    assert member.merge(restored.data)
    assert restored.merge(member.data)
    out = {one.identity.certificate.serial_number for one in invited.values()}
    assert member.current.records.keys() == restored.current.records.keys() == out
    assert all(member.revoked for member in issuing.members(network)), "what the others knew is back on the disk"
