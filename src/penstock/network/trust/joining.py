"""Networks of this machine: join one with an invitation, choose the one to take part in, leave one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cryptography.hazmat.primitives.serialization import Encoding

from penstock.config import files
from penstock.config.home import Home, JoinedNetwork
from penstock.errors import ConfigError, Untrusted
from penstock.network.trust import addresses, revocations
from penstock.network.trust.certificates import load_certificate, node_name
from penstock.network.trust.invitation import Invitation
from penstock.network.trust.listening import EVERYWHERE, check_listen, free_endpoint, is_loopback, split
from penstock.network.trust.revocations import Revocations


@dataclass(frozen=True, slots=True)
class Joined:
    """`before` is the name that this machine had in the network, None when it was not in it."""

    network: JoinedNetwork
    before: str | None


def join(home: Home, invitation: Invitation, *, listen: str | None = None) -> Joined:
    """Become the node that the invitation is for. In a network that the machine is in already, the certificate is replaced."""
    if listen is not None:
        check_listen(listen)
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
            files.make_folder(network.folder, _contents(network, invitation, brought))
        return Joined(network, None)
    there = home.network(name)
    with files.locked_folder(there.folder):
        _refuse_other_network(there, invitation)
        _refuse_older(there, invitation)
        revoked = _all_revoked(there, invitation)
        _refuse_revoked(invitation, revoked)
        network = replace(there, node=node, listen=(listen,) if listen else there.listen, connect=invitation.endpoints)
        files.replace(network.folder, _contents(network, invitation, revoked))
    return Joined(network, there.node)


def use(home: Home, name: str) -> None:
    """Let `penstock serve` join this one."""
    home.network(name)  # or it says what is wrong with it
    files.replace(home.networks, {home.current_file.name: f"{name}\n".encode()})


def leave(home: Home, name: str) -> None:
    """Remove all that this machine has of a network, its key first of all."""
    with files.wrap_os_errors(home.current_file, "removed"):
        if home.current_name() == name:
            home.current_file.unlink()
    files.remove_folder(home.folder(name))


def _contents(network: JoinedNetwork, invitation: Invitation, revoked: Revocations) -> dict[str, bytes]:
    return {
        "network.json": network.contents(),
        "ca.pem": invitation.authority.public_bytes(Encoding.PEM),
        "revoked.bin": revoked.encode(),
        "node.pem": invitation.identity.certificate_pem(),
        "node.key": invitation.identity.key_pem(),
    }


def _free_endpoint(home: Home, endpoints: tuple[str, ...]) -> str:
    """Not the port of a node on this same machine, which may just not be running."""
    places = [split(endpoint) for endpoint in endpoints]
    own = addresses.own_hosts()
    here = [port for _, host, port in places if is_loopback(host) or host in own]
    local = all(is_loopback(host) for _, host, _ in places)
    return free_endpoint(home, host=addresses.LOOPBACK if local else EVERYWHERE, taken=here)


def _all_revoked(there: JoinedNetwork, invitation: Invitation) -> Revocations:
    """In both lists, so that an invitation that lay around brings nobody back."""
    brought = revocations.read(invitation.revocations, invitation.authority)
    try:
        stored = revocations.read(files.read(there.revocations_file), invitation.authority)
    except (Untrusted, ConfigError):  # missing or damaged: the invitation's is sound
        return brought
    return stored | brought


def _refuse_other_network(there: JoinedNetwork, invitation: Invitation) -> None:
    if load_certificate(files.read(there.ca_file)) != invitation.authority:
        raise ConfigError(
            f"This machine is in another network that is also called '{there.name}'.",
            hint=f"Leave that one first (penstock network leave {there.name}), or make the new one with another name.",
        )
    if there.is_authority:
        raise ConfigError(
            f"This machine has made the network '{there.name}' and needs no invitation.",
            hint="Use the invitation on the machine that it is for.",
        )


def _refuse_older(there: JoinedNetwork, invitation: Invitation) -> None:
    try:
        present = load_certificate(files.read(there.certificate_file))
    except (Untrusted, ConfigError):  # then anything is better
        return
    brought = invitation.identity.certificate
    if node_name(present) == invitation.node and brought.not_valid_before_utc < present.not_valid_before_utc:
        raise ConfigError(
            f"The invitation is older than this machine's certificate ({present.not_valid_before_utc:%Y-%m-%d}).",
            hint=f"Ask for a new one: penstock network invite {invitation.node}",
        )


def _refuse_revoked(invitation: Invitation, revoked: Revocations) -> None:
    if invitation.identity.certificate.serial_number in revoked:
        raise Untrusted("The invitation was taken back.", hint=f"Ask for a new one: penstock network invite {invitation.node}")
