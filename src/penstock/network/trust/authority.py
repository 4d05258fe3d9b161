"""What the machine that made a network does for it: invite nodes, take certificates back, and keep its own one fresh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.config import files
from penstock.config.home import RESERVED, Home, JoinedNetwork
from penstock.config.network import NAME
from penstock.errors import ConfigError, Untrusted
from penstock.network.trust import revocations
from penstock.network.trust.certificates import NODE_DAYS, Identity, create_authority, issue, load_identity
from penstock.network.trust.expiry import ends_soon
from penstock.network.trust.invitation import Invitation
from penstock.network.trust.listening import check_further, check_listen, free_endpoint, reachable


class Issued(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A certificate that was given out; JSON has no numbers as large as `serial`."""

    serial: str
    until: datetime


Register = dict[str, list[Issued]]  # by the name of the node


@dataclass(frozen=True, slots=True)
class IssuedMember:
    """A node that was ever invited. `until` is when its last certificate ends, or ended; `revoked` when none of its is good."""

    node: str
    until: datetime
    revoked: bool


def create(home: Home, name: str, *, node: str, listen: str | None = None, further: Iterable[str] = ()) -> JoinedNetwork:
    """A new network with this machine as its first node. `further` are names under which others reach it."""
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
        addresses=tuple(further),
        created=f"{datetime.now(UTC):%Y-%m-%d}",
    )
    check_further(network.listen, network.addresses)
    contents = {
        "network.json": network.contents(),
        "ca.pem": authority.certificate_pem(),
        "ca.key": authority.key_pem(),
        "node.pem": identity.certificate_pem(),
        "node.key": identity.key_pem(),
        "revoked.bin": revocations.NOBODY.encode(),
        "issued.json": _register_json(_with({}, node, identity)),
    }
    with files.wrap_os_errors(network.folder, "made"):
        try:
            files.make_folder(network.folder, contents)
        except FileExistsError:
            raise ConfigError(
                f"This machine already has a network '{name}'.",
                hint=f"Take another name, or leave that one first: penstock network leave {name}",
            ) from None
    return network


def invite(network: JoinedNetwork, node: str, *, days: float = NODE_DAYS, further: Iterable[str] = ()) -> Invitation:
    """A new certificate for a node. One that it has already stays good."""
    if node == network.node:
        raise ConfigError(f"'{node}' is the name of this machine itself.", hint="Give the other machine a name of its own.")
    further = (*network.addresses, *further)
    check_further(network.listen, further)
    with files.locked_folder(network.folder):
        authority = _authority(network)
        identity = issue(authority, node, days=days)
        files.replace(network.folder, {"issued.json": _register_json(_with(_register(network), node, identity))})
        revoked = files.read(network.revocations_file)
    endpoints = reachable(network.listen, further)
    return Invitation(network.name, authority.certificate, identity, endpoints, revoked)


def revoke(network: JoinedNetwork, node: str) -> int:
    """Take back all certificates of a node; how many there were that nobody had taken back before."""
    if node == network.node:
        raise ConfigError(
            f"'{node}' is this machine, whose key stands for the whole network.",
            hint=f"To end the network, let every machine leave it: penstock network leave {network.name}",
        )
    with files.locked_folder(network.folder):
        authority, register = _authority(network), _register(network)
        if node not in register:
            known = ", ".join(sorted(register.keys() - {network.node}))
            raise ConfigError(
                f"No node '{node}' was ever invited to '{network.name}'.",
                hint=f"These were: {known}." if known else "Nobody was invited yet.",
            )
        before = revocations.read(files.read(network.revocations_file), authority.certificate)
        new = {int(issued.serial, 16) for issued in register[node]} - before.records.keys()
        if new:
            after = before | revocations.sign(dict.fromkeys(new, node), authority)
            files.replace(network.folder, {"revoked.bin": after.encode()})
    return len(new)


def members(network: JoinedNetwork) -> list[IssuedMember]:
    revoked = revocations.read(files.read(network.revocations_file), _authority(network).certificate)
    return [
        IssuedMember(node, max(one.until for one in issued), all(int(one.serial, 16) in revoked for one in issued))
        for node, issued in sorted(_register(network).items())
        if node != network.node and issued
    ]


def renew_if_due(folder: Path) -> bool:
    """Whether this machine is the authority and gave itself a new certificate, because its own ends soon or is unusable."""
    if not (folder / "ca.key").exists() or not (folder / "network.json").exists():
        return False  # somebody else's to renew
    network = Home(folder.parents[1]).network(folder.name)
    with files.locked_folder(folder):
        if _is_fresh(network):
            return False
        identity = issue(_authority(network), network.node)
        register = _with(_register(network), network.node, identity)
        files.replace(
            folder,
            {"issued.json": _register_json(register), "node.pem": identity.certificate_pem(), "node.key": identity.key_pem()},
        )
    return True


# ---- what it keeps ----


def _authority(network: JoinedNetwork) -> Identity:
    if not network.is_authority:
        raise ConfigError(
            f"The network '{network.name}' was made on another machine.", hint="Run this there: only that machine can do it."
        )
    return load_identity(files.read(network.ca_file), files.read(network.authority_key_file))


def _is_fresh(network: JoinedNetwork) -> bool:
    try:
        identity = load_identity(files.read(network.certificate_file), files.read(network.key_file))
    except (Untrusted, ConfigError):  # a renewal that a power cut has halved
        return False
    return not ends_soon(identity.certificate.not_valid_after_utc)


def _register(network: JoinedNetwork) -> Register:
    try:
        return msgspec.json.decode(files.read(network.issued_file), type=Register)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{network.issued_file} does not hold what it should: {error}.", hint="Restore it from a copy."
        ) from None


def _with(register: Mapping[str, list[Issued]], node: str, identity: Identity) -> Register:
    certificate = identity.certificate
    issued = Issued(f"{certificate.serial_number:x}", certificate.not_valid_after_utc)
    return {**register, node: [*register.get(node, []), issued]}


def _register_json(register: Register) -> bytes:
    return msgspec.json.format(msgspec.json.encode(register), indent=2) + b"\n"
