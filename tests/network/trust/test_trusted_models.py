"""Trusted models: signed by the authority alone, for one network, and never older than what a node has seen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.home import Home
from penstock.errors import ConfigError, Untrusted
from penstock.network.codec import limits
from penstock.network.joining import authority as issuing
from penstock.network.joining.invitation import decode, encode
from penstock.network.joining.joining import join
from penstock.network.members.trust_list import TrustList
from penstock.network.trust import trusted_models
from penstock.network.trust.certificates import Identity, create_authority, issue
from penstock.network.trust.trusted_models import NO_TRUSTED_MODELS, TrustedModel, TrustedModels, read, sign

AUTHORITY = create_authority("home")
NODE = issue(AUTHORITY, "laptop")
A, B, C = "a" * 64, "b" * 64, "c" * 64
FIRST = sign("org/one", A, NO_TRUSTED_MODELS, AUTHORITY)
LATER = sign("org/one", B, FIRST, AUTHORITY)
LIST = LATER | sign("org/two", A, LATER, AUTHORITY)
SIGNED = LIST.encode()


def signed_as(serial: int, model: str, manifest: str, signer: Identity = AUTHORITY, network: str = "home") -> TrustedModels:
    """A record with any serial, as an authority with a wrong clock might sign it."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    record = TrustedModel(model, manifest, serial, "2026-01-01", b"")
    signature = signer.key.sign(record.signed(network), ec.ECDSA(hashes.SHA256()))
    return TrustedModels({model: msgspec.structs.replace(record, signature=signature)})


def test_a_list_says_what_each_model_must_be_and_the_later_record_counts() -> None:
    found = read(SIGNED, AUTHORITY.certificate)
    assert (found.manifest("org/one"), found.manifest("org/two"), found.manifest("org/three")) == (B, A, "")
    assert FIRST | LATER == LATER | FIRST == LATER


steps = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["m", "n"]), st.sampled_from([A, B, ""])), max_size=6)


@given(steps=steps, order=st.randoms(use_true_random=False))
def test_lists_merge_to_the_same_in_any_order_and_no_replay_takes_anything_back(
    steps: list[tuple[int, str, str]], order: object
) -> None:
    lists = [signed_as(*step) for step in steps]
    shuffled = [*lists, *lists]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    known, serials = NO_TRUSTED_MODELS, {"m": 0, "n": 0}
    for one in shuffled:
        known |= read(one.encode(), AUTHORITY.certificate, known)
        now = {model: record.serial for model, record in known.records.items()}
        assert all(now.get(model, 0) >= serial for model, serial in serials.items()), "a serial went back"
        serials |= now
    for model in ("m", "n"):
        best = max(((serial, manifest) for serial, name, manifest in steps if name == model), default=(0, ""))
        assert known.manifest(model) == best[1]


@given(place=st.integers(0, len(SIGNED) - 1), other=st.integers(1, 255))
def test_any_changed_byte_of_a_list_is_refused(place: int, other: int) -> None:
    changed = bytearray(SIGNED)
    changed[place] ^= other
    for known in (NO_TRUSTED_MODELS, LIST):
        with pytest.raises(Untrusted):
            read(bytes(changed), AUTHORITY.certificate, known)


@given(length=st.integers(0, len(SIGNED) - 1), more=st.binary(max_size=3))
def test_a_list_that_was_cut_or_grew_is_refused(length: int, more: bytes) -> None:
    for data in (SIGNED[:length], SIGNED + more + b"x", more + b"x" + SIGNED):
        with pytest.raises(Untrusted):
            read(data, AUTHORITY.certificate)


def test_a_list_of_another_authority_another_network_or_a_member_is_refused() -> None:
    lab = Identity(create_authority("lab").certificate, AUTHORITY.key)  # the same key for two networks
    for signer in (create_authority("home"), NODE, lab):
        with pytest.raises(Untrusted, match="not signed by this network's authority"):
            read(sign("org/one", C, LIST, signer).encode(), AUTHORITY.certificate, LIST)


@pytest.mark.parametrize(
    "change", [{"model": "org/two"}, {"manifest": C}, {"manifest": ""}, {"serial": 1 << 50}, {"date": "2030-01-01"}]
)
def test_a_signature_is_good_for_its_own_record_alone(change: dict[str, object]) -> None:
    moved = msgspec.structs.replace(LIST.records["org/one"], **change)
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        read(TrustedModels({moved.model: moved}).encode(), AUTHORITY.certificate, LIST)


def test_two_records_for_one_model_are_refused() -> None:
    both = [FIRST.records["org/one"], LATER.records["org/one"]]
    with pytest.raises(Untrusted, match="two records for one model"):
        read(trusted_models.LIST_MARK + msgspec.msgpack.encode(both), AUTHORITY.certificate)


def test_a_list_is_never_larger_than_a_node_would_read() -> None:
    largest = TrustedModel("\U0001f600" * 512, A, trusted_models.MAX_SERIAL, "2026-01-01", bytes(72))
    crowd = TrustedModels({str(number): largest for number in range(trusted_models.MAX_RECORDS)})
    assert len(crowd.encode()) <= trusted_models.MAX_LIST_BYTES == limits.MAX_TRUSTED_BYTES
    with pytest.raises(ConfigError, match="can have 64 trusted models"):
        _ = crowd | LIST
    with pytest.raises(Untrusted, match="the limit is"):
        read(SIGNED + bytes(trusted_models.MAX_LIST_BYTES), AUTHORITY.certificate)


@pytest.mark.parametrize("model, manifest", [("", A), ("m" * 513, A), ("a\nb", A), ("m", "xyz"), ("m", A.upper())])
def test_what_no_node_would_read_is_not_signed(model: str, manifest: str) -> None:
    with pytest.raises(ConfigError, match="cannot be trusted"):
        sign(model, manifest, NO_TRUSTED_MODELS, AUTHORITY)


# ---- what a node knows, and the machine that created the network ----


def test_a_forged_or_older_list_changes_nothing_on_disk(tmp_path: Path) -> None:
    known = TrustList(tmp_path / "trusted.bin", AUTHORITY.certificate)
    assert known.merge(SIGNED)
    assert not known.merge(FIRST.encode()), "replayed"
    assert not known.merge(SIGNED)
    for forged in (sign("org/one", C, LIST, create_authority("home")).encode(), SIGNED[:-1], b"nonsense"):
        with pytest.raises(Untrusted):
            known.merge(forged)
    assert known.current.manifest("org/one") == B
    assert TrustList(tmp_path / "trusted.bin", AUTHORITY.certificate).current == LIST


def test_a_file_from_an_older_copy_is_made_whole_again(tmp_path: Path) -> None:
    file = tmp_path / "trusted.bin"
    known = TrustList(file, AUTHORITY.certificate)
    known.merge(SIGNED)
    file.write_bytes(FIRST.encode())
    assert not known.reload()
    assert file.read_bytes() == SIGNED


def test_a_restored_authority_signs_with_a_later_serial_than_before(tmp_path: Path) -> None:
    network = issuing.create(Home(tmp_path), "home", node="desk", listen="tls/192.0.2.7:7447")
    copy = network.trusted_file.read_bytes()
    first = issuing.trust(network, "m", A)
    member = TrustList(None, decode(encode(issuing.invite(network, "laptop"))).authority)
    member.merge(network.trusted_file.read_bytes())
    network.trusted_file.write_bytes(copy)
    again = issuing.trust(network, "m", B)
    assert again.serial >= first.serial
    member.merge(network.trusted_file.read_bytes())
    assert member.current.manifest("m") == B


def test_trust_is_given_once_replaced_when_told_and_withdrawn(tmp_path: Path) -> None:
    network = issuing.create(Home(tmp_path), "home", node="desk", listen="tls/192.0.2.7:7447")
    first = issuing.trust(network, "m", A)
    assert issuing.trust(network, "m", A) == first, "nothing new to say"
    assert issuing.trust(network, "m", B, replace=False) == first
    second = issuing.trust(network, "m", B)
    assert (second.manifest, second.serial > first.serial) == (B, True)
    assert issuing.trust(network, "m", "").manifest == ""
    assert [(record.model, record.manifest) for record in issuing.trusted(network)] == [("m", "")]


def test_an_invitation_brings_the_list_and_an_older_one_takes_nothing_back(tmp_path: Path) -> None:
    network = issuing.create(Home(tmp_path / "desk"), "home", node="desk", listen="tls/192.0.2.7:7447")
    issuing.trust(network, "m", A)
    home, old, older = Home(tmp_path / "laptop"), *(issuing.invite(network, "laptop") for _ in range(2))
    issuing.trust(network, "m", B)
    joined = join(home, decode(encode(issuing.invite(network, "laptop")))).network
    assert read(joined.trusted_file.read_bytes(), old.authority).manifest("m") == B
    for path in (joined.certificate_file, joined.key_file):  # so that an older invitation is accepted at all
        path.unlink()
    join(home, decode(encode(older)))
    assert read(joined.trusted_file.read_bytes(), old.authority).manifest("m") == B


def test_only_the_machine_that_created_the_network_signs_also_one_that_is_older_than_such_lists(tmp_path: Path) -> None:
    network = issuing.create(Home(tmp_path / "desk"), "home", node="desk", listen="tls/192.0.2.7:7447")
    network.trusted_file.unlink()
    joined = join(Home(tmp_path / "laptop"), decode(encode(issuing.invite(network, "laptop")))).network
    assert issuing.trusted(network) == []
    assert issuing.trust(network, "m", A).manifest == A
    with pytest.raises(ConfigError, match="was created on another machine"):
        issuing.trust(joined, "m", A)
