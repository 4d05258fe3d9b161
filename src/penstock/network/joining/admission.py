"""Admission: how the authority invites a machine with a single-use token, and admits the one that uses it."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.config import files
from penstock.config.home import Home, JoinedNetwork
from penstock.errors import ConfigError
from penstock.network.joining import authority, invitation_book
from penstock.network.joining.invitation_book import BookedInvitation, InvitationBook, InvitationState, Use, new_invitation
from penstock.network.joining.join_protocol import JoinAnswer, JoinRefusal, JoinRequest, prove
from penstock.network.joining.join_token import JoinToken
from penstock.network.trust.addresses import DEFAULT_PORT, LOOPBACK, free_port
from penstock.network.trust.certificates import NODE_DAYS, check_issuable, issue_to, requested_key
from penstock.network.trust.listening import ANY_IPV4, check_hosts, is_loopback, reachable_endpoints, split

logger = logging.getLogger("penstock.network")

JOIN_PORT = DEFAULT_PORT + 1
PAIRING_PORT = DEFAULT_PORT + 2
LIFETIME = timedelta(hours=6)
MIN_LIFETIME = timedelta(minutes=1)
MAX_LIFETIME = timedelta(days=7)
REFUSALS = {
    InvitationState.USED: JoinRefusal.USED,
    InvitationState.EXPIRED: JoinRefusal.EXPIRED,
    InvitationState.WITHDRAWN: JoinRefusal.WITHDRAWN,
    InvitationState.LOCKED: JoinRefusal.LOCKED,
}


def invite_once(
    network: JoinedNetwork,
    node: str,
    *,
    days: float = NODE_DAYS,
    lifetime: timedelta = LIFETIME,
    extra_hosts: Iterable[str] = (),
    now: datetime | None = None,
) -> JoinToken:
    """Invite one machine. Earlier invitations of this kind for the same node are withdrawn.

    days: how long its certificate will be valid.
    lifetime: how long the token will be valid.
    """
    authority.refuse_own_name(network, node)
    check_issuable(node, days)
    if not MIN_LIFETIME <= lifetime <= MAX_LIFETIME:
        raise ConfigError(
            f"An invitation cannot be valid for {lifetime.total_seconds():g} seconds.",
            hint=f"Use 1 minute to {MAX_LIFETIME.days} days. For a longer time, use --offline.",
        )
    extra_hosts = (*network.addresses, *extra_hosts)
    check_hosts(network.listen, extra_hosts)
    now = now or datetime.now(UTC)
    with files.locked_folder(network.folder):
        certificate = authority.signing_identity(network).certificate
        book = invitation_book.read(network)
        port = _join_port(network, book, now)
        endpoints = reachable_endpoints(network.listen, extra_hosts)
        booked = new_invitation(node, days=days, endpoints=endpoints, made=now, lifetime=lifetime)
        files.replace(network.folder, {invitation_book.FILE: book.add(booked, port).encode()})
    where = reachable_endpoints([join_endpoint(network, port)], extra_hosts)
    return JoinToken(certificate, network.node, booked.id, booked.secret, where, booked.expires)


def join_endpoint(network: JoinedNetwork, port: int) -> str:
    """Where the authority's node listens for machines that join: at the host where it listens for nodes."""
    return f"tls/{split(network.listen[0])[1]}:{port}"


def pairing_endpoint(network: JoinedNetwork) -> str:
    """Where this machine listens for one that pairs."""
    host = split(network.listen[0])[1]
    return f"tls/{host}:{free_port(LOOPBACK if is_loopback(host) else ANY_IPV4, preferred=PAIRING_PORT)}"


def is_running(network: JoinedNetwork) -> bool:
    """Whether the node of this machine is running: then its port is in use."""
    _, host, port = split(network.listen[0])
    return free_port(LOOPBACK if is_loopback(host) else ANY_IPV4, preferred=port) != port


def invitations(network: JoinedNetwork) -> list[BookedInvitation]:
    """List all single-use invitations, including those that are over."""
    authority.signing_identity(network)  # raises on other machines
    return list(invitation_book.read(network).invitations)


def withdraw(network: JoinedNetwork, name: str, *, now: datetime | None = None) -> list[BookedInvitation]:
    """Withdraw the open invitations of a node, or the one with this id. Returns those that were open."""
    authority.signing_identity(network)
    now = now or datetime.now(UTC)
    with files.locked_folder(network.folder):
        book = invitation_book.read(network)
        found = [one for one in book.open(now) if name in (one.node, one.id)]
        if not found:
            names = ", ".join(one.node for one in book.open(now))
            raise ConfigError(
                f"'{name}' has no open invitation.",
                hint=f"Open invitations: {names}." if names else "To shut out a member, run: penstock network revoke NODE",
            )
        files.replace(network.folder, {invitation_book.FILE: book.withdraw(name).encode()})
    return found


def admit(
    network: JoinedNetwork,
    request: JoinRequest,
    *,
    challenge: bytes,
    server_certificate: bytes,
    address: str,
    now: datetime | None = None,
) -> JoinAnswer:
    """Answer a machine that wants to join: issue a certificate once for each invitation. Raises Untrusted or ConfigError.

    The same key gets the same certificate again: the first answer may not have arrived.
    """
    now = now or datetime.now(UTC)
    with files.locked_folder(network.folder):
        book = invitation_book.read(network)
        booked = book.find(request.id)
        if booked is None:
            return JoinAnswer(JoinRefusal.INVALID)
        expected = prove(booked.secret, booked.id, challenge, server_certificate, request.signing_request)
        if not hmac.compare_digest(expected, request.proof):
            if booked.state(now) is InvitationState.OPEN:
                files.replace(network.folder, {invitation_book.FILE: book.record_wrong_proof(booked.id).encode()})
            return JoinAnswer(JoinRefusal.INVALID)
        key = requested_key(request.signing_request)
        encoded = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        state = booked.state(now)
        if booked.use is not None and booked.use.key == encoded:
            return _answer(network, booked, booked.use.certificate)
        if state is not InvitationState.OPEN:
            logger.warning("refused a machine at %s: the invitation %s for %s is %s", address, booked.id, booked.node, state)
            return JoinAnswer(REFUSALS[state])
        certificate = issue_to(authority.signing_identity(network), booked.node, key, days=booked.days)
        der = certificate.public_bytes(Encoding.DER)
        after = book.record_use(booked.id, Use(now, address, encoded, der))
        # In this order: a certificate that leaves this machine is always in the register, where it can be revoked.
        files.replace(
            network.folder,
            {"issued.json": authority.registered(network, booked.node, certificate), invitation_book.FILE: after.encode()},
        )
    logger.info("a machine at %s has joined as node %s with the invitation %s", address, booked.node, booked.id)
    return _answer(network, booked, der)


def _answer(network: JoinedNetwork, booked: BookedInvitation, certificate: bytes) -> JoinAnswer:
    signing = authority.signing_identity(network)
    return JoinAnswer(
        refusal=JoinRefusal.NONE,
        certificate=certificate,
        endpoints=booked.endpoints,
        revocations=files.read(network.revocations_file),
        stamp=authority.last_stamp(network, signing).encode(),
        trusted=authority.signed_models(network, signing).encode(),
    )


def _join_port(network: JoinedNetwork, book: InvitationBook, now: datetime) -> int:
    """Choose the port for machines that join: the last one, if it is in use by our own node or free."""
    if book.port and book.is_answering(now):
        return book.port
    home = Home(network.folder.parents[1])
    others = [home.network(name) for name in home.names()]
    taken = {split(endpoint)[2] for other in others for endpoint in other.listen}
    taken |= {invitation_book.read(other).port for other in others if other.name != network.name}
    local = is_loopback(split(network.listen[0])[1])
    return free_port(LOOPBACK if local else ANY_IPV4, taken, preferred=book.port or JOIN_PORT)
