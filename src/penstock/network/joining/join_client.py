"""Join with a single-use token: make a key, and get a certificate for it from the authority's node."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import closing
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from penstock.errors import BadMessage, ConfigError, Unreachable, Untrusted
from penstock.network.joining.invitation import Invitation, checked
from penstock.network.joining.join_protocol import (
    JOIN_MARK,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Channel,
    JoinAnswer,
    JoinHello,
    JoinRefusal,
    JoinRequest,
    prove,
)
from penstock.network.joining.join_token import JoinToken
from penstock.network.trust.certificates import CLOCK_SKEW, load_der, new_key, node_name, signing_request
from penstock.network.trust.listening import check_connect, split

CONNECT_TIMEOUT_S = 3.0  # for each address of the authority's machine
CONVERSATION_S = 30.0
PATIENCE_S = 5.0  # the authority's node opens its port within a second or so of the invitation
RETRY_INTERVAL_S = 0.3
ASK_AGAIN = "Ask for a new one, on the machine that created the network: penstock network invite NAME"
NOT_YET_VALID, EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL
REFUSED = {
    JoinRefusal.INVALID: "The machine that created the network does not know this invitation.",
    JoinRefusal.USED: "The invitation has been used already; each is good for one machine.",
    JoinRefusal.EXPIRED: "The invitation has expired.",
    JoinRefusal.WITHDRAWN: "The invitation was withdrawn.",
    JoinRefusal.LOCKED: "The invitation was locked after too many attempts with a wrong secret.",
}


class _WrongServer(Exception):
    """The server that answered is not the authority's node."""


def request_certificate(token: JoinToken, *, patience: float | None = None) -> Invitation:
    """Redeem the token at the authority. Raises Untrusted if it refuses, and Unreachable if it does not answer.

    patience: seconds to try again, if nothing listens at any address; PATIENCE_S unless set.
    """
    key = new_key()
    until = time.monotonic() + (PATIENCE_S if patience is None else patience)
    while True:
        failures: dict[str, Exception] = {}
        for endpoint in token.endpoints:
            try:
                return _ask(token, key, endpoint)
            except (OSError, BadMessage, _WrongServer) as error:
                failures[endpoint] = error
        if time.monotonic() >= until or not any(isinstance(error, OSError) for error in failures.values()):
            raise _failed(token, failures)
        time.sleep(RETRY_INTERVAL_S)


def _ask(token: JoinToken, key: ec.EllipticCurvePrivateKey, endpoint: str) -> Invitation:
    _, host, port = split(endpoint)
    with closing(socket.create_connection((host.strip("[]"), port), CONNECT_TIMEOUT_S)) as connection:
        channel = Channel(
            connection, _context(token.authority), server_side=False, seconds=CONVERSATION_S, max_bytes=MAX_ANSWER_BYTES
        )
        try:
            channel.handshake()
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (NOT_YET_VALID, EXPIRED):
                reason = f"its certificate is not valid now ({error.verify_message}): check the clocks of both machines"
                raise _WrongServer(reason) from None
            raise _WrongServer("its certificate is not one of this network") from None
        server = channel.peer_certificate()
        if node_name(load_der(server)) != token.host:  # another member
            raise _WrongServer(f"it is not the node '{token.host}', which created the network")
        hello = channel.receive(JoinHello, MAX_REQUEST_BYTES)
        if hello.mark != JOIN_MARK:
            raise _WrongServer("it speaks another version: use the same version of Penstock on both machines")
        _refuse_slow_clock(hello.time)
        request = signing_request(key)
        proof = prove(token.secret, token.id, hello.challenge, server, request)
        channel.send(JoinRequest(token.id, request, proof))
        return _invitation(token, key, channel.receive(JoinAnswer, MAX_ANSWER_BYTES))


def _refuse_slow_clock(authority_time: int) -> None:
    """Raise if this machine's clock is so slow that a new certificate would not be valid yet, before the invitation is used."""
    behind = authority_time - time.time()
    if behind > CLOCK_SKEW.total_seconds():
        raise Untrusted(
            f"The clock of this machine is {behind / 3600:.1f} hours behind that of the machine that created the network.",
            hint="Set both clocks, and join again with the same token.",
        )


def _context(authority: x509.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # certificates hold no addresses; the name of the node is checked instead
    context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))
    return context


def _invitation(token: JoinToken, key: ec.EllipticCurvePrivateKey, answer: JoinAnswer) -> Invitation:
    if answer.refusal in REFUSED:
        raise Untrusted(REFUSED[JoinRefusal(answer.refusal)], hint=ASK_AGAIN)
    if answer.refusal:
        raise Untrusted(
            "The machine that created the network could not issue a certificate.",
            hint="Its log says why. The invitation can be used again.",
        )
    try:
        check_connect(answer.endpoints)
    except ConfigError:
        raise Untrusted("The machine that created the network gave addresses that cannot be used.", hint=ASK_AGAIN) from None
    return checked(
        token.authority,
        load_der(answer.certificate),
        key,
        answer.endpoints,
        answer.revocations,
        answer.trusted,
        answer.stamp,
    )


def _failed(token: JoinToken, failures: dict[str, Exception]) -> Untrusted | Unreachable:
    wrong = {endpoint: error for endpoint, error in failures.items() if isinstance(error, _WrongServer)}
    if wrong and len(wrong) == len(failures):
        endpoint, error = next(iter(wrong.items()))
        return Untrusted(
            f"What answers at {_address(endpoint)} is not the machine that created '{token.network}': {error}.",
            hint="Nothing was sent to it. Check the address, or ask for an invitation with another one: penstock network invite "
            "NAME --address HOST",
        )
    found = "; ".join(f"{_address(endpoint)}: {_reason(error)}" for endpoint, error in failures.items())
    message = f"The machine that created '{token.network}' does not answer ({found})."
    if datetime.now(UTC) >= token.expires:
        return Unreachable(f"{message} The invitation has expired since ({token.expires:%Y-%m-%d %H:%M} UTC).", hint=ASK_AGAIN)
    ports = ", ".join(sorted({str(split(endpoint)[2]) for endpoint in failures}))
    return Unreachable(
        message,
        hint=f"Start it there (penstock serve), let TCP port {ports} through its firewall, and join again with the same token. "
        "For a machine that cannot reach it, run there: penstock network invite NAME --offline",
    )


def _address(endpoint: str) -> str:
    return endpoint.partition("/")[2]


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)
