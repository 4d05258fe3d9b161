"""The networks of this machine: join one with an invitation, choose the current one, leave one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from penstock.config import files
from penstock.config.home import Home, JoinedNetwork
from penstock.errors import ConfigError, Untrusted
from penstock.network.joining.invitation import Invitation
from penstock.network.trust import addresses, revocations, trusted_models
from penstock.network.trust.certificates import common_name, load_certificate, node_name
from penstock.network.trust.listening import ANY_IPV4, check_listen, free_endpoint, is_loopback, split
from penstock.network.trust.revocation_stamp import RevocationStamp, read_stamp
from penstock.network.trust.revocations import Revocations
from penstock.network.trust.trusted_models import TrustedModels

Signed = TypeVar("Signed", Revocations, RevocationStamp, TrustedModels)


@dataclass(frozen=True, slots=True)
class Joined:
    """A network that was joined. `previous_node` is this machine's earlier name in it, None if it was not a member."""

    network: JoinedNetwork
    previous_node: str | None


def check_joinable(home: Home, authority: x509.Certificate, *, listen: str | None = None) -> None:
    """Raise ConfigError if this machine cannot join this authority's network, before a single-use token is used up."""
    if listen is not None:
        check_listen(listen)
    name = common_name(authority)
    if name in home.names():
        _refuse_other_network(home.network(name), authority)


def join(home: Home, invitation: Invitation, *, listen: str | None = None) -> Joined:
    """Join as the node that the invitation is for. If this machine is a member already, its certificate is replaced."""
    check_joinable(home, invitation.authority, listen=listen)
    name, node = invitation.network, invitation.node
    if name not in home.names():
        network = JoinedNetwork(
            folder=home.folder(name),
            name=name,
            node=node,
            listen=(listen or _free_endpoint(home, invitation.endpoints),),
            connect=invitation.endpoints,
            addresses=(),
            created=f"{datetime.now(UTC):%Y-%m-%d}",
        )
        brought = revocations.read(invitation.revocations, invitation.authority)
        _refuse_revoked(invitation, brought)
        with files.wrap_os_errors(network.folder, "made"):
            trusted = trusted_models.read(invitation.trusted, invitation.authority)
            stamp = read_stamp(invitation.stamp, invitation.authority)
            files.make_folder(network.folder, _contents(network, invitation, brought, stamp, trusted))
        return Joined(network, None)
    current = home.network(name)
    with files.locked_folder(current.folder):
        _refuse_other_network(current, invitation.authority)
        _refuse_older(current, invitation)
        revoked = _merged(revocations.read, current.revocations_file, invitation.revocations, invitation.authority)
        _refuse_revoked(invitation, revoked)
        network = replace(current, node=node, listen=(listen,) if listen else current.listen, connect=invitation.endpoints)
        stamp = _merged(read_stamp, current.stamp_file, invitation.stamp, invitation.authority)
        trusted = _merged(trusted_models.read, current.trusted_file, invitation.trusted, invitation.authority)
        files.replace(network.folder, _contents(network, invitation, revoked, stamp, trusted))
    return Joined(network, current.node)


def use(home: Home, name: str) -> None:
    """Make this the network that `penstock serve` joins."""
    home.network(name)  # raises if it cannot be used
    files.replace(home.networks, {home.current_file.name: f"{name}\n".encode()})


def leave(home: Home, name: str) -> None:
    """Remove all files of a network from this machine, its key first."""
    with files.wrap_os_errors(home.current_file, "removed"):
        if home.current_name() == name:
            home.current_file.unlink()
    files.remove_folder(home.folder(name))


def _contents(
    network: JoinedNetwork, invitation: Invitation, revoked: Revocations, stamp: RevocationStamp, trusted: TrustedModels
) -> dict[str, bytes]:
    return {
        "network.json": network.contents(),
        "ca.pem": invitation.authority.public_bytes(Encoding.PEM),
        "revoked.bin": revoked.encode(),
        "revoked.stamp": stamp.encode(),
        "trusted.bin": trusted.encode(),
        "node.pem": invitation.identity.certificate_pem(),
        "node.key": invitation.identity.key_pem(),
    }


def _free_endpoint(home: Home, endpoints: tuple[str, ...]) -> str:
    """Choose where to listen, avoiding the ports of other nodes on this machine, even of stopped ones."""
    members = [split(endpoint) for endpoint in endpoints]
    own = addresses.own_hosts()
    taken = [port for _, host, port in members if is_loopback(host) or host in own]
    local = all(is_loopback(host) for _, host, _ in members)
    return free_endpoint(home, host=addresses.LOOPBACK if local else ANY_IPV4, taken=taken)


def _merged(
    read: Callable[[bytes, x509.Certificate], Signed], stored: Path, brought: bytes, authority: x509.Certificate
) -> Signed:
    """Merge what is stored with what an invitation brings, so that an old invitation undoes nothing."""
    found = read(brought, authority)
    try:
        return read(files.read(stored), authority) | found
    except (Untrusted, ConfigError):  # missing or damaged: use the invitation's
        return found


def _refuse_other_network(current: JoinedNetwork, authority: x509.Certificate) -> None:
    if load_certificate(files.read(current.ca_file)) != authority:
        raise ConfigError(
            f"This machine is in another network that is also called '{current.name}'.",
            hint=f"Leave that one first (penstock network leave {current.name}), or create the new one with another name.",
        )
    if current.is_authority:
        raise ConfigError(
            f"This machine created the network '{current.name}' and needs no invitation.",
            hint="Use the invitation on the machine that it is for.",
        )


def _refuse_older(current: JoinedNetwork, invitation: Invitation) -> None:
    try:
        present = load_certificate(files.read(current.certificate_file))
    except (Untrusted, ConfigError):  # an unusable certificate may be replaced by any
        return
    brought = invitation.identity.certificate
    if node_name(present) == invitation.node and brought.not_valid_before_utc < present.not_valid_before_utc:
        raise ConfigError(
            f"The invitation is older than this machine's certificate ({present.not_valid_before_utc:%Y-%m-%d}).",
            hint=f"Ask for a new one: penstock network invite {invitation.node}",
        )


def _refuse_revoked(invitation: Invitation, revoked: Revocations) -> None:
    if invitation.identity.certificate.serial_number in revoked:
        raise Untrusted("The invitation was revoked.", hint=f"Ask for a new one: penstock network invite {invitation.node}")
