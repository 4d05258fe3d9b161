"""What only the machine that created a network can do: invite nodes, revoke their certificates, and vouch for weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509

from penstock.config import files
from penstock.config.home import RESERVED, Home, JoinedNetwork
from penstock.config.network import NAME
from penstock.errors import ConfigError, Untrusted
from penstock.network.joining import invitation_book
from penstock.network.joining.invitation import Invitation
from penstock.network.trust import revocations, trusted_models
from penstock.network.trust.certificates import NODE_DAYS, Identity, create_authority, issue, load_identity
from penstock.network.trust.expiry import expires_soon
from penstock.network.trust.listening import check_hosts, check_listen, free_endpoint, reachable_endpoints
from penstock.network.trust.revocation_stamp import NO_STAMP, RevocationStamp, is_due, read_stamp, sign_stamp
from penstock.network.trust.trusted_models import NO_TRUSTED_MODELS, TrustedModel, TrustedModels


class Issued(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A certificate that was issued. `serial` is in hexadecimal: it is too large for a number in JSON."""

    serial: str
    until: datetime


Register = dict[str, list[Issued]]  # by the name of the node


@dataclass(frozen=True, slots=True)
class IssuedMember:
    """A node that was invited. `until` is when its last certificate expires; `revoked` means that all of them are revoked."""

    node: str
    until: datetime
    revoked: bool


def create(home: Home, name: str, *, node: str, listen: str | None = None, extra_hosts: Iterable[str] = ()) -> JoinedNetwork:
    """Create a network with this machine as its first node.

    extra_hosts: names or addresses of this machine that it cannot find out itself.
    """
    if not NAME.fullmatch(name) or name in RESERVED:
        raise ConfigError(
            f"'{name}' cannot be the name of a network.",
            hint=f"Use up to 64 letters, digits, dots, dashes and underscores, but not {' or '.join(RESERVED)}.",
        )
    if listen is not None:
        check_listen(listen)
    authority = create_authority(name)
    identity = issue(authority, node)
    network = JoinedNetwork(
        folder=home.folder(name),
        name=name,
        node=node,
        listen=(listen or free_endpoint(home),),
        connect=(),
        addresses=tuple(extra_hosts),
        created=f"{datetime.now(UTC):%Y-%m-%d}",
    )
    check_hosts(network.listen, network.addresses)
    contents = {
        "network.json": network.contents(),
        "ca.pem": authority.certificate_pem(),
        "ca.key": authority.key_pem(),
        "node.pem": identity.certificate_pem(),
        "node.key": identity.key_pem(),
        "revoked.bin": revocations.NO_REVOCATIONS.encode(),
        "revoked.stamp": sign_stamp(revocations.NO_REVOCATIONS, NO_STAMP, authority).encode(),
        "trusted.bin": NO_TRUSTED_MODELS.encode(),
        "issued.json": _register_json(_with_issued({}, node, identity.certificate)),
    }
    with files.wrap_os_errors(network.folder, "made"):
        try:
            files.make_folder(network.folder, contents)
        except FileExistsError:
            raise ConfigError(
                f"This machine already has a network '{name}'.",
                hint=f"Choose another name, or leave that network first: penstock network leave {name}",
            ) from None
    return network


def invite(network: JoinedNetwork, node: str, *, days: float = NODE_DAYS, extra_hosts: Iterable[str] = ()) -> Invitation:
    """Issue a new certificate with its private key to a node. Its earlier certificates stay valid."""
    refuse_own_name(network, node)
    extra_hosts = (*network.addresses, *extra_hosts)
    check_hosts(network.listen, extra_hosts)
    with files.locked_folder(network.folder):
        authority = signing_identity(network)
        identity = issue(authority, node, days=days)
        files.replace(network.folder, {"issued.json": registered(network, node, identity.certificate)})
        revoked = files.read(network.revocations_file)
        trusted = signed_models(network, authority).encode()
    endpoints = reachable_endpoints(network.listen, extra_hosts)
    return Invitation(network.name, authority.certificate, identity, endpoints, revoked, trusted)


def refuse_own_name(network: JoinedNetwork, node: str) -> None:
    if node == network.node:
        raise ConfigError(f"'{node}' is the name of this machine.", hint="Give the other machine another name.")


def revoke(network: JoinedNetwork, node: str) -> int:
    """Revoke all certificates of a node, and withdraw its invitations. Returns how many certificates were not revoked before."""
    if node == network.node:
        raise ConfigError(
            f"'{node}' is this machine, which created the network: it cannot be revoked.",
            hint=f"To end the network, run this on every machine: penstock network leave {network.name}",
        )
    with files.locked_folder(network.folder):
        authority, register, book = signing_identity(network), _register(network), invitation_book.read(network)
        left = book.withdraw(node)
        if node not in register and all(one.node != node for one in book.invitations):
            known = ", ".join(sorted(register.keys() - {network.node}))
            raise ConfigError(
                f"No node '{node}' was invited to '{network.name}'.",
                hint=f"Invited nodes: {known}." if known else "No node was invited yet.",
            )
        before = revocations.read(files.read(network.revocations_file), authority.certificate)
        new = {int(issued.serial, 16) for issued in register.get(node, [])} - before.records.keys()
        changed = {} if left == book else {invitation_book.FILE: left.encode()}
        if new:
            after = before | revocations.sign(dict.fromkeys(new, node), authority)
            stamp = sign_stamp(after, last_stamp(network, authority), authority)
            changed |= {"revoked.bin": after.encode(), "revoked.stamp": stamp.encode()}
        if changed:
            files.replace(network.folder, changed)
    return len(new)


def stamp_revocations_if_due(network: JoinedNetwork) -> bool:
    """Sign the list of revocations with today's date, unless that was done within a day. Returns whether it was due."""
    with files.locked_folder(network.folder):
        authority = signing_identity(network)
        revoked = revocations.read(files.read(network.revocations_file), authority.certificate)
        before = last_stamp(network, authority)
        if not is_due(before, revoked):
            return False
        files.replace(network.folder, {"revoked.stamp": sign_stamp(revoked, before, authority).encode()})
    return True


def trust(network: JoinedNetwork, model: str, manifest: str, *, replace: bool = True) -> TrustedModel:
    """Vouch for a model's weights by the hash of their manifest; an empty one withdraws what was signed before.

    Returns the record in force: an earlier one if there is one and it says the same or `replace` is false.
    """
    with files.locked_folder(network.folder):
        authority = signing_identity(network)
        before = signed_models(network, authority)
        known = before.records.get(model)
        if known is not None and (known.manifest == manifest or not replace):
            return known
        after = before | trusted_models.sign(model, manifest, before, authority)
        files.replace(network.folder, {"trusted.bin": after.encode()})
    return after.records[model]


def trusted(network: JoinedNetwork) -> list[TrustedModel]:
    """List the models that this machine vouches for, with those that were withdrawn."""
    return [record for _, record in sorted(signed_models(network, signing_identity(network)).records.items())]


def members(network: JoinedNetwork) -> list[IssuedMember]:
    revoked = revocations.read(files.read(network.revocations_file), signing_identity(network).certificate)
    return [
        IssuedMember(node, max(one.until for one in issued), all(int(one.serial, 16) in revoked for one in issued))
        for node, issued in sorted(_register(network).items())
        if node != network.node and issued
    ]


def renew_if_due(folder: Path) -> bool:
    """Renew this machine's own certificate if it is the authority, and the certificate expires soon or is unusable."""
    if not (folder / "ca.key").exists() or not (folder / "network.json").exists():
        return False  # only the authority can renew it
    network = Home(folder.parents[1]).network(folder.name)
    with files.locked_folder(folder):
        if _is_current(network):
            return False
        identity = issue(signing_identity(network), network.node)
        register = registered(network, network.node, identity.certificate)
        files.replace(folder, {"issued.json": register, "node.pem": identity.certificate_pem(), "node.key": identity.key_pem()})
    return True


# ---- its files ----


def signing_identity(network: JoinedNetwork) -> Identity:
    """Return the authority's certificate and key. Raises ConfigError on other machines."""
    if not network.is_authority:
        raise ConfigError(f"The network '{network.name}' was created on another machine.", hint="Run this command there.")
    return load_identity(files.read(network.ca_file), files.read(network.authority_key_file))


def signed_models(network: JoinedNetwork, authority: Identity) -> TrustedModels:
    if not network.trusted_file.exists():  # a network that was created before there was such a list
        return NO_TRUSTED_MODELS
    return trusted_models.read(files.read(network.trusted_file), authority.certificate)


def last_stamp(network: JoinedNetwork, authority: Identity) -> RevocationStamp:
    try:
        return read_stamp(files.read(network.stamp_file), authority.certificate)
    except (Untrusted, ConfigError):  # damaged, or missing because the network is older than stamps: sign a new one
        return NO_STAMP


def _is_current(network: JoinedNetwork) -> bool:
    try:
        identity = load_identity(files.read(network.certificate_file), files.read(network.key_file))
    except (Untrusted, ConfigError):  # a renewal that a power cut interrupted
        return False
    return not expires_soon(identity.certificate.not_valid_after_utc)


def _register(network: JoinedNetwork) -> Register:
    try:
        return msgspec.json.decode(files.read(network.issued_file), type=Register)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{network.issued_file} is damaged: {error}.", hint="Restore it from a backup.") from None


def registered(network: JoinedNetwork, node: str, certificate: x509.Certificate) -> bytes:
    """Return the contents of the register with one more certificate."""
    return _register_json(_with_issued(_register(network), node, certificate))


def _with_issued(register: Mapping[str, list[Issued]], node: str, certificate: x509.Certificate) -> Register:
    issued = Issued(f"{certificate.serial_number:x}", certificate.not_valid_after_utc)
    return {**register, node: [*register.get(node, []), issued]}


def _register_json(register: Register) -> bytes:
    return msgspec.json.format(msgspec.json.encode(register), indent=2) + b"\n"
