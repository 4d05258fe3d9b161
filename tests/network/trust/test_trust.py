"""Certificates and invitations: what is sound passes, and whatever is not is refused."""

from __future__ import annotations

import base64
import socket
import ssl
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import assume, example, given
from hypothesis import strategies as st

from penstock.config import files
from penstock.config.home import Home, JoinedNetwork
from penstock.errors import ConfigError, PenstockError, Untrusted
from penstock.network.joining import authority, invitation, joining, token_text
from penstock.network.joining.invitation import Invitation
from penstock.network.trust import listening, revocations
from penstock.network.trust.addresses import DEFAULT_PORT, free_port, own_hosts
from penstock.network.trust.certificates import (
    MAX_NODE_NAME,
    Identity,
    common_name,
    create_authority,
    issue,
    load_certificate,
    load_der,
    load_identity,
    node_name,
    public_key,
    verify,
)
from penstock.network.trust.expiry import expiry_warning
from tests.network.certificates import mutated

AUTHORITY = create_authority("home")
NODE = issue(AUTHORITY, "laptop")
DAY = timedelta(days=1)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True)


def made_by_hand(common: str, issuer: Identity, *extensions: x509.ExtensionType) -> x509.Certificate:
    """A certificate that `issue` would not make, signed by that authority all the same."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer.certificate.subject,
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]),
        public_key=ec.generate_private_key(ec.SECP256R1()).public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - DAY,
        not_valid_after=now + DAY,
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer.key, hashes.SHA256())


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.DER)


# ---- certificates ----


@given(node=names)
def test_a_certificate_names_its_node_and_is_the_only_one_of_its_name(node: str) -> None:
    first, second = issue(AUTHORITY, node).certificate, issue(AUTHORITY, node).certificate
    assert node_name(first) == node_name(second) == node
    assert common_name(first) == f"{node}/{first.serial_number:x}" != common_name(second)
    verify(first, AUTHORITY.certificate)


def test_a_common_name_without_a_serial_is_the_name_itself() -> None:
    assert node_name(made_by_hand("laptop", AUTHORITY)) == "laptop"


def test_an_identity_is_read_back_from_its_files() -> None:
    again = load_identity(NODE.certificate_pem(), NODE.key_pem())
    assert again.certificate == NODE.certificate
    assert again.key_pem() == NODE.key_pem()


@pytest.mark.parametrize("node", ["", "a b", "a/b", "-a", "*", "ü", "x" * (MAX_NODE_NAME + 1)])
def test_a_name_that_no_certificate_can_carry_is_refused(node: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a node"):
        issue(AUTHORITY, node)


@pytest.mark.parametrize("days", [0, -1, 4000])
def test_an_impossible_lifetime_is_refused(days: float) -> None:
    with pytest.raises(ConfigError, match="cannot be valid for"):
        issue(AUTHORITY, "laptop", days=days)


@pytest.mark.parametrize(
    "certificate, reason",
    [
        (issue(create_authority("home"), "laptop").certificate, "not signed by this network's authority"),
        (AUTHORITY.certificate, "belongs to an authority"),
        (NODE.certificate, "not signed by this network's authority"),  # by a node, see below
        (made_by_hand("laptop", AUTHORITY), "does not allow client authentication"),
    ],
)
def test_a_certificate_that_no_node_should_have_is_refused(certificate: x509.Certificate, reason: str) -> None:
    signer = NODE if certificate == NODE.certificate else AUTHORITY
    with pytest.raises(Untrusted, match=reason):
        verify(certificate, signer.certificate)


def test_what_a_node_has_signed_is_refused() -> None:
    with pytest.raises(Untrusted, match="not signed by this network's authority"):
        verify(issue(NODE, "friend").certificate, AUTHORITY.certificate)


def test_a_certificate_is_refused_outside_its_time() -> None:
    begins, ends = NODE.certificate.not_valid_before_utc, NODE.certificate.not_valid_after_utc
    for now in (begins, ends - timedelta(seconds=1)):
        verify(NODE.certificate, AUTHORITY.certificate, now=now)
    with pytest.raises(Untrusted, match="expired on"):
        verify(NODE.certificate, AUTHORITY.certificate, now=ends)
    with pytest.raises(Untrusted, match="not valid before"):
        verify(NODE.certificate, AUTHORITY.certificate, now=begins - timedelta(seconds=1))


def test_a_new_certificate_is_good_where_the_clock_is_an_hour_late() -> None:
    verify(NODE.certificate, AUTHORITY.certificate, now=datetime.now(UTC) - timedelta(minutes=55))


def test_a_key_that_belongs_to_another_certificate_or_is_none_is_refused() -> None:
    other = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for key, reason in [(AUTHORITY.key_pem(), "does not match"), (b"none", "cannot be read"), (other, "not of the kind")]:
        with pytest.raises(Untrusted, match=reason):
            load_identity(NODE.certificate_pem(), key)


@given(st.binary(max_size=200))
def test_nonsense_is_no_certificate(data: bytes) -> None:
    with pytest.raises(Untrusted, match="not a certificate"):
        load_certificate(data)


STRANGE_VERSION = der(NODE.certificate).replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07", 1)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@example(STRANGE_VERSION)
@given(mutated(der(NODE.certificate)))
def test_a_certificate_that_somebody_changed_is_refused_by_name_or_is_the_same(data: bytes) -> None:
    with suppress(Untrusted):
        certificate = load_der(data)
        node_name(certificate)
        public_key(certificate)
        verify(certificate, AUTHORITY.certificate)
        assert certificate.tbs_certificate_bytes == NODE.certificate.tbs_certificate_bytes


def test_a_certificate_of_a_strange_version_is_refused() -> None:
    assert der(NODE.certificate) != STRANGE_VERSION
    with pytest.raises(Untrusted, match="not a certificate"):
        load_der(STRANGE_VERSION)


# ---- invitations ----

SIGNED = revocations.sign({1: "desk"}, AUTHORITY).encode()
INVITATION = Invitation("home", AUTHORITY.certificate, NODE, ("tls/192.0.2.7:7447", "tls/[2001:db8::7]:7447"), SIGNED)
TOKEN = invitation.encode(INVITATION)


def same(one: Invitation, other: Invitation) -> bool:
    return one.identity.key_pem() == other.identity.key_pem() and invitation.encode(one) == invitation.encode(other)


def test_a_token_brings_what_was_put_in() -> None:
    found = invitation.decode(TOKEN)
    assert same(found, INVITATION)
    assert (found.network, found.node, found.endpoints) == ("home", "laptop", INVITATION.endpoints)
    assert TOKEN.startswith("penstock1:")


def test_a_token_survives_the_line_breaks_of_a_mail() -> None:
    broken = "\r\n".join(TOKEN[start : start + 64] for start in range(0, len(TOKEN), 64))
    assert same(invitation.decode(f"  {broken}\n"), INVITATION)


@given(place=st.integers(0, len(TOKEN) - 1), length=st.integers(0, 3), put=st.text(max_size=4))
def test_a_token_with_any_mistake_is_refused_or_still_means_the_same(place: int, length: int, put: str) -> None:
    changed = TOKEN[:place] + put + TOKEN[place + length :]
    assume(changed != TOKEN)
    with suppress(Untrusted):
        assert same(invitation.decode(changed), INVITATION)


@given(length=st.integers(0, len(TOKEN) - 1))
def test_a_token_that_is_cut_off_is_told_as_such(length: int) -> None:
    with pytest.raises(Untrusted, match=r"incomplete or mistyped|does not start with penstock1:"):
        invitation.decode(TOKEN[:length])


def token_of(**changes: Any) -> str:
    """A token whose checksum is right, with other contents."""
    packed = base64.urlsafe_b64decode(TOKEN.removeprefix("penstock1:") + "==")[: -token_text.CHECKSUM_BYTES]
    fields = ["network", "authority", "certificate", "key", "endpoints", "revocations", "trusted"]
    contents = dict(zip(fields, msgspec.msgpack.decode(zlib.decompress(packed)), strict=True)) | changes
    return packed_token(msgspec.msgpack.encode(list(contents.values())))


def test_a_token_that_is_older_than_trusted_models_is_accepted() -> None:
    packed = base64.urlsafe_b64decode(TOKEN.removeprefix("penstock1:") + "==")[: -token_text.CHECKSUM_BYTES]
    contents = msgspec.msgpack.decode(zlib.decompress(packed))
    assert same(invitation.decode(packed_token(msgspec.msgpack.encode(contents[:-1]))), INVITATION)


def packed_token(data: bytes) -> str:
    packed = zlib.compress(data)
    return token_text.to_text("penstock1:", packed)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"network": "lab"}, "name different networks"),
        ({"certificate": der(issue(create_authority("home"), "laptop").certificate)}, "not signed by this network's authority"),
        ({"certificate": der(AUTHORITY.certificate)}, "belongs to an authority"),
        ({"certificate": der(issue(AUTHORITY, "laptop").certificate)}, "does not match the certificate"),
        ({"certificate": b"none"}, "cannot be read, although"),
        ({"key": b"short"}, "cannot be read, although"),
        ({"key": bytes(32)}, "cannot be read, although"),
        ({"key": b"\xff" * 32}, "cannot be read, although"),
        ({"endpoints": []}, "cannot be read, although"),
        ({"endpoints": ["tcp/192.0.2.7:7447"]}, "cannot be read, although"),
        ({"endpoints": ["tls/192.0.2.7:7447"] * 65}, "cannot be read, although"),
        ({"endpoints": ["tls/192.0.2.7:7447#iface=eth0"]}, "cannot be read, although"),
        ({"revocations": b"none"}, "not a list of revocations"),
        ({"trusted": b"none"}, "not a list of trusted models"),
        ({"more": 1}, "cannot be read, although"),
    ],
)
def test_a_whole_token_with_contents_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Untrusted, match=reason):
        invitation.decode(token_of(**changes))


def test_a_token_that_would_unpack_to_gigabytes_is_refused() -> None:
    with pytest.raises(Untrusted, match="cannot be read, although"):
        invitation.decode(packed_token(bytes(100 << 20)))
    with pytest.raises(Untrusted, match="not an invitation"):
        invitation.decode("penstock1:" + "A" * invitation.MAX_TOKEN_CHARS)


@pytest.mark.parametrize("name", ["none", "current", "..", "a/b", "", "a b"])
def test_an_invitation_to_a_network_that_cannot_be_called_so_is_refused(name: str) -> None:
    rogue = create_authority(name or "home").certificate
    with pytest.raises(Untrusted, match="not a valid name"):
        invitation.decode(token_of(network=name, authority=der(rogue)))


def test_a_name_that_is_no_text_is_refused() -> None:
    packed = base64.urlsafe_b64decode(TOKEN.removeprefix("penstock1:") + "==")[: -token_text.CHECKSUM_BYTES]
    with pytest.raises(Untrusted, match="cannot be read, although"):
        invitation.decode(packed_token(zlib.decompress(packed).replace(b"\xa4home", b"\xa4hom\xff", 1)))


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@given(which=st.sampled_from(["authority", "certificate"]), changed=mutated(der(NODE.certificate)))
def test_an_invitation_with_a_changed_certificate_is_refused_by_name(which: str, changed: bytes) -> None:
    with suppress(Untrusted):
        assert same(invitation.decode(token_of(**{which: changed})), INVITATION)


@given(st.binary(max_size=300))
def test_whatever_a_whole_token_holds_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(Untrusted):
        invitation.decode(packed_token(data))


def test_an_invitation_that_has_ended_is_refused() -> None:
    ended = issue(AUTHORITY, "laptop", days=1e-9)
    with pytest.raises(Untrusted, match="expired on"):
        invitation.decode(invitation.encode(Invitation("home", AUTHORITY.certificate, ended, INVITATION.endpoints, SIGNED)))


def test_nothing_of_a_key_or_a_token_is_in_a_repr_or_a_message() -> None:
    number = NODE.key.private_numbers().private_value
    secrets = [TOKEN[20:60], f"{number:x}"[:16], str(number)[:16], repr(number.to_bytes(32, "big"))[2:20]]
    secrets.append(NODE.key_pem().decode().splitlines()[1])
    shown = [
        repr(INVITATION),
        repr(NODE),
        repr(invitation._contents(token_text.from_text("penstock1:", TOKEN, invitation.MAX_TOKEN_CHARS))),
    ]
    for broken in (TOKEN[:-1], TOKEN[9:], token_of(network="lab"), token_of(endpoints=[]), TOKEN.replace("1:", "2:", 1)):
        with pytest.raises(Untrusted) as refused:
            invitation.decode(broken)
        shown += [str(refused.value), repr(refused.value)]
    assert [secret for secret in secrets if any(secret in text for text in shown)] == []


# ---- the authority's machine, and those that it lets in ----


@pytest.fixture
def network(tmp_path: Path) -> JoinedNetwork:
    return authority.create(Home(tmp_path / "a"), "home", node="desk", listen="tls/192.0.2.7:7447", extra_hosts=["cellar"])


def test_a_file_is_its_owners_alone_from_the_first_byte(network: JoinedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in [network.folder.parent, network.folder, *network.folder.iterdir()]
    }
    assert {mode for name, mode in modes.items() if "." in name} == {0o600}
    assert {mode for name, mode in modes.items() if "." not in name} == {0o700}
    monkeypatch.setattr("os.chmod", lambda *_: pytest.fail("a mode that is set later was another one before"))
    authority.invite(network, "laptop")


def test_a_write_that_fails_leaves_everything_as_it_was(network: JoinedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in network.folder.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        authority.invite(network, "laptop")
    assert {path.name: path.read_bytes() for path in network.folder.iterdir()} == before


def test_a_network_that_cannot_be_written_is_not_made_by_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = files._write_new

    def third_fails(path: Path, data: bytes) -> None:
        if len(list(path.parent.iterdir())) == 2:
            raise OSError(28, "No space left on device")
        written(path, data)

    monkeypatch.setattr(files, "_write_new", third_fails)
    with pytest.raises(ConfigError, match="No space left on device"):
        authority.create(Home(tmp_path), "home", node="desk")
    assert list((tmp_path / "networks").iterdir()) == []


def test_a_name_is_used_for_one_network_of_a_machine(network: JoinedNetwork) -> None:
    key = network.authority_key_file.read_bytes()
    with pytest.raises(ConfigError, match="already has a network 'home'"):
        authority.create(Home(network.folder.parents[1]), "home", node="desk")
    assert network.authority_key_file.read_bytes() == key


@pytest.mark.parametrize("name", ["none", "current", "a/b", "..", "", "a b"])
def test_a_name_that_no_network_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a network"):
        authority.create(Home(tmp_path), name, node="desk")
    assert list(tmp_path.iterdir()) == []


def test_an_invitation_leads_to_all_that_was_named(network: JoinedNetwork) -> None:
    found = authority.invite(network, "laptop", extra_hosts=["2001:db8::1"])
    assert found.endpoints == ("tls/192.0.2.7:7447", "tls/cellar:7447", "tls/[2001:db8::1]:7447")
    assert same(invitation.decode(invitation.encode(found)), found)


def test_revoking_takes_back_every_certificate_of_that_name_and_no_other(network: JoinedNetwork) -> None:
    first, second, other = (authority.invite(network, node) for node in ("laptop", "laptop", "phone"))
    assert authority.revoke(network, "laptop") == 2
    assert authority.revoke(network, "laptop") == 0
    found = revocations.read(network.revocations_file.read_bytes(), first.authority)
    assert found.records.keys() == {one.identity.certificate.serial_number for one in (first, second)}
    again = authority.invite(network, "laptop")
    assert again.identity.certificate.serial_number not in found
    assert [(member.node, member.revoked) for member in authority.members(network)] == [("laptop", False), ("phone", False)]
    authority.revoke(network, "phone")
    later = revocations.read(network.revocations_file.read_bytes(), other.authority)
    assert later.records.keys() == {*found.records, other.identity.certificate.serial_number}


def test_commands_at_the_same_time_lose_nothing(network: JoinedNetwork) -> None:
    names = [f"node-{number}" for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: authority.invite(network, name), names))
        list(threads.map(lambda name: authority.revoke(network, name), names))
    assert {member.node: member.revoked for member in authority.members(network)} == dict.fromkeys(names, True)


def test_who_can_be_invited_and_revoked_is_told(network: JoinedNetwork) -> None:
    with pytest.raises(ConfigError, match="the name of this machine"):
        authority.invite(network, "desk")
    with pytest.raises(ConfigError, match="cannot be revoked"):
        authority.revoke(network, "desk")
    with pytest.raises(ConfigError, match="No node was invited yet"):
        authority.revoke(network, "laptop")


def other_machine(network: JoinedNetwork) -> Home:
    return Home(network.folder.parents[2] / "b")


def test_joining_again_takes_the_newer_certificate_and_keeps_the_place(network: JoinedNetwork) -> None:
    home = other_machine(network)
    first = joining.join(home, authority.invite(network, "laptop"), listen="tls/0.0.0.0:7000")
    assert (first.previous_node, first.network.node, first.network.is_authority) == (None, "laptop", False)
    newer = authority.invite(network, "laptop", extra_hosts=["attic"])
    second = joining.join(home, newer)
    assert (second.previous_node, second.network.listen) == ("laptop", ("tls/0.0.0.0:7000",))
    assert "tls/attic:7447" in home.network("home").connect
    assert second.network.certificate_file.read_bytes() == newer.identity.certificate_pem()
    assert joining.join(home, authority.invite(network, "phone")).previous_node == "laptop"
    assert home.network("home").node == "phone"


def test_an_invitation_that_was_revoked_meanwhile_brings_nobody_back(network: JoinedNetwork) -> None:
    home, lying_around = other_machine(network), authority.invite(network, "laptop")
    authority.revoke(network, "laptop")
    joining.join(home, authority.invite(network, "phone"))  # this one knows of it
    with pytest.raises(Untrusted, match="was revoked"):
        joining.join(home, lying_around)
    assert home.network("home").node == "phone"


def test_a_network_of_the_same_name_and_another_authority_is_refused(network: JoinedNetwork, tmp_path: Path) -> None:
    other = authority.create(Home(tmp_path / "c"), "home", node="desk", listen="tls/192.0.2.8:7447")
    home = other_machine(network)
    joining.join(home, authority.invite(network, "laptop"))
    with pytest.raises(ConfigError, match="another network that is also called 'home'") as refused:
        joining.join(home, authority.invite(other, "laptop"))
    assert "penstock network leave home" in refused.value.hint
    with pytest.raises(ConfigError, match="needs no invitation"):
        joining.join(Home(network.folder.parents[1]), authority.invite(network, "laptop"))


def test_only_the_machine_that_made_a_network_invites(network: JoinedNetwork) -> None:
    joined = joining.join(other_machine(network), authority.invite(network, "laptop")).network
    for action in (authority.invite, authority.revoke):
        with pytest.raises(ConfigError, match="created on another machine"):
            action(joined, "phone")


def handshake(one: JoinedNetwork, other: JoinedNetwork) -> None:
    """TLS between two nodes, both of which show their certificate; raises ssl.SSLError when one refuses the other's."""
    ends = []
    for network, purpose in ((one, ssl.PROTOCOL_TLS_SERVER), (other, ssl.PROTOCOL_TLS_CLIENT)):
        context = ssl.SSLContext(purpose)
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cafile=network.ca_file)
        context.load_cert_chain(network.certificate_file, network.key_file)
        came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends.append((context.wrap_bio(came, goes, server_side=network is one), came, goes))
    for _ in range(4):  # each way as often as TLS 1.3 needs
        for (speaker, _, goes), (_, came, _) in (ends[::-1], ends):
            with suppress(ssl.SSLWantReadError):
                speaker.do_handshake()
            came.write(goes.read())


def test_nodes_of_a_network_meet_over_tls_and_strangers_do_not(network: JoinedNetwork, tmp_path: Path) -> None:
    joined = joining.join(other_machine(network), authority.invite(network, "laptop_2.b")).network
    handshake(network, joined)
    handshake(joined, network)
    stranger = authority.create(Home(tmp_path / "c"), "home", node="desk", listen="tls/192.0.2.8:7447")
    for pair in ((network, stranger), (stranger, network)):
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
            handshake(*pair)


# ---- time ----


def age(network: JoinedNetwork, days: float) -> None:
    """Give the authority's node a certificate that ends so soon."""
    vouching = load_identity(network.ca_file.read_bytes(), network.authority_key_file.read_bytes())
    identity = issue(vouching, network.node, days=days)
    files.replace(network.folder, {"node.pem": identity.certificate_pem(), "node.key": identity.key_pem()})


def test_the_authority_renews_its_own_certificate_in_time_and_not_before(network: JoinedNetwork) -> None:
    assert not authority.renew_if_due(network.folder)
    age(network, 29)
    assert "renews it" in str(expiry_warning(network.certificate_file))
    assert authority.renew_if_due(network.folder)
    assert expiry_warning(network.certificate_file) is None
    load_identity(network.certificate_file.read_bytes(), network.key_file.read_bytes())
    assert not authority.renew_if_due(network.folder)


def test_a_renewal_that_was_halved_is_made_whole(network: JoinedNetwork) -> None:
    network.key_file.unlink()
    assert authority.renew_if_due(network.folder)
    load_identity(network.certificate_file.read_bytes(), network.key_file.read_bytes())


def test_nobody_else_renews(network: JoinedNetwork, tmp_path: Path) -> None:
    joined = joining.join(other_machine(network), authority.invite(network, "laptop", days=1)).network
    assert not authority.renew_if_due(joined.folder)
    assert not authority.renew_if_due(tmp_path)  # a folder of files that somebody made by hand


def test_the_end_of_a_certificate_is_told_thirty_days_before(tmp_path: Path) -> None:
    file = tmp_path / "node.pem"
    file.write_bytes(NODE.certificate_pem())
    ends = NODE.certificate.not_valid_after_utc
    assert expiry_warning(file) is None
    assert expiry_warning(file, ends - 30 * DAY) is None
    assert expiry_warning(file, ends - 12 * DAY - timedelta(hours=1)) == (
        f"The certificate of this node expires in 12 days ({ends:%Y-%m-%d}). "
        "To renew it, run on the machine that created the network: "
        "penstock network invite laptop; then here: penstock network join TOKEN"
    )
    assert "expires in 1 day (" in str(expiry_warning(file, ends - DAY))
    assert f"expired on {ends:%Y-%m-%d}" in str(expiry_warning(file, ends))


# ---- addresses ----


def test_a_port_that_is_taken_is_not_chosen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        assert free_port("127.0.0.1", {DEFAULT_PORT}) not in {DEFAULT_PORT, somebody.getsockname()[1]}


def test_own_addresses_can_be_bound_and_come_once() -> None:
    found = own_hosts()
    assert len(found) == len(set(found)) > 0
    for host in found:
        with socket.create_server((host, 0)):
            pass


def test_an_endpoint_for_this_machine_alone_is_told_alone(tmp_path: Path) -> None:
    local = ("tls/127.0.0.1:7447",)
    assert listening.reachable_endpoints(local, []) == local
    with pytest.raises(ConfigError, match="which only this machine can reach"):
        authority.create(Home(tmp_path), "home", node="desk", listen=local[0], extra_hosts=["cellar"])
    everywhere = listening.reachable_endpoints(["tls/0.0.0.0:7447"], ["cellar"])
    assert everywhere == (*(f"tls/{host}:7447" for host in own_hosts()), "tls/cellar:7447")


@pytest.mark.parametrize("endpoint", ["tcp/0.0.0.0:7447", "tls/0.0.0.0:0", "0.0.0.0:7447", "tls/0.0.0.0"])
def test_a_place_to_listen_that_would_not_do_is_refused(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(PenstockError) as refused:
        authority.create(Home(tmp_path), "home", node="desk", listen=endpoint)
    assert refused.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_node_on_the_same_machine_listens_somewhere_else(network: JoinedNetwork) -> None:
    here = Invitation("home", AUTHORITY.certificate, NODE, (f"tls/127.0.0.1:{DEFAULT_PORT}",), SIGNED)
    protocol, host, port = listening.split(joining._free_endpoint(other_machine(network), here.endpoints))
    assert (protocol, host) == ("tls", "127.0.0.1")
    assert port != DEFAULT_PORT
