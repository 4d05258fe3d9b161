"""Pairing: hand an invitation to a machine in the same LAN, over a connection that people check by comparing four words.

    machine → authority   PairingCommitment: a hash of a random number of the machine's
    authority → machine   PairingNumber: a random number of the authority's
    machine → authority   PairingNumber: the number that was hashed
    authority → machine   PairingToken, once its owner has typed the words that the machine shows

The words are a hash of both numbers and of the certificate that the machine was shown in TLS. Anyone in between has to show
another certificate, and has to choose a number on either side before it knows what the words will be: so both machines show the
same words by chance once in 2^32 pairings, and each pairing is started by a person. Nothing secret is sent before.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta

from penstock.config import files
from penstock.config.home import JoinedNetwork
from penstock.errors import BadMessage, Unreachable, Untrusted
from penstock.network.trust.certificates import load_certificate
from penstock.network.trust.join_listener import listen_at
from penstock.network.trust.join_protocol import Channel
from penstock.network.trust.join_token import MAX_JOIN_TOKEN_CHARS
from penstock.network.trust.listening import split

PAIRING_MARK = b"penstock pair 1\n"
NUMBER_BYTES = 32
WORDS = 4
MAX_MESSAGE_BYTES = 1 << 10
CONNECT_TIMEOUT_S = 5.0
EXCHANGE_S = 10.0  # until both sides have the words; the machine waits twice as long, since one that stalls may be before it
COMPARE_S = 180.0  # for the person who compares them

Number = Annotated[bytes, Meta(min_length=NUMBER_BYTES, max_length=NUMBER_BYTES)]


class PairingCommitment(msgspec.Struct, array_like=True):
    mark: Annotated[bytes, Meta(max_length=32)]
    commitment: Number


class PairingNumber(msgspec.Struct, array_like=True):
    number: Number


class PairingToken(msgspec.Struct, array_like=True):
    token: Annotated[str, Meta(max_length=MAX_JOIN_TOKEN_CHARS)]


@cache
def word_list() -> tuple[str, ...]:
    """256 words, one for each value of a byte."""
    return tuple(Path(__file__).with_name("pairing_words.txt").read_text(encoding="utf-8").split())


def commit(number: bytes) -> bytes:
    return hashlib.sha256(PAIRING_MARK + number).digest()


def pairing_words(certificate: bytes, authority_number: bytes, machine_number: bytes) -> str:
    """The words that a person compares. certificate: the authority's, in DER, as the machine was shown it."""
    packed = msgspec.msgpack.encode([certificate, authority_number, machine_number])
    digest = hashlib.sha256(PAIRING_MARK + packed).digest()
    return " ".join(word_list()[value] for value in digest[:WORDS])


@dataclass(frozen=True, slots=True)
class Pairing:
    """Both sides have their words. The connection stays open while they are compared."""

    words: str
    address: str
    channel: Channel

    def matches(self, typed: str) -> bool:
        return typed.casefold().replace("-", " ").split() == self.words.split()

    def give(self, token: str) -> None:
        """Send the invitation, after the words were found to be the same. Raises Unreachable if the machine has gone."""
        try:
            self.channel.send(PairingToken(token))
        except OSError:
            raise Unreachable("The other machine has gone, or it took too long.", hint="Begin again on both machines.") from None

    def receive_token(self) -> str:
        """Wait for the invitation. Raises Untrusted if the connection ends instead."""
        try:
            return self.channel.receive(PairingToken, MAX_JOIN_TOKEN_CHARS).token
        except (OSError, BadMessage):
            raise Untrusted(
                "The other machine sent no invitation.",
                hint="Were the words typed there? Begin again: penstock network pair NAME",
            ) from None


class PairingListener:
    """The authority's side: listens from construction until it is closed, and pairs with one machine. Raises OSError."""

    def __init__(self, network: JoinedNetwork, endpoint: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.num_tickets = 0
        self._context.load_cert_chain(network.certificate_file, network.key_file)
        self._certificate = load_certificate(files.read(network.certificate_file)).public_bytes(Encoding.DER)
        self._socket = listen_at(endpoint)
        self._connection: socket.socket | None = None

    def __enter__(self) -> PairingListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self._connection is not None:
            self._connection.close()

    def wait(self, seconds: float) -> Pairing:
        """Wait for a machine that goes through with the exchange; others are dropped, one after the other."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, peer = self._socket.accept()
            except TimeoutError:
                break
            try:
                pairing = self._exchange(connection, str(peer[0]))
            except (OSError, BadMessage):
                connection.close()
            else:
                self._connection = connection
                return pairing
        raise Unreachable("No machine has come to pair.", hint="Begin again, and run the command that it prints in time.")

    def _exchange(self, connection: socket.socket, address: str) -> Pairing:
        channel = Channel(connection, self._context, server_side=True, seconds=EXCHANGE_S, max_bytes=MAX_MESSAGE_BYTES)
        channel.handshake()
        first = channel.receive(PairingCommitment, MAX_MESSAGE_BYTES)
        own = secrets.token_bytes(NUMBER_BYTES)
        channel.send(PairingNumber(own))
        other = channel.receive(PairingNumber, MAX_MESSAGE_BYTES).number
        if first.mark != PAIRING_MARK or not hmac.compare_digest(first.commitment, commit(other)):
            raise ConnectionAbortedError("the number is not the one that was committed to")
        channel.extend(COMPARE_S)
        return Pairing(pairing_words(self._certificate, own, other), address, channel)


def pair_with(endpoint: str) -> Pairing:
    """The machine's side. Raises Unreachable if no machine answers that is pairing."""
    _, host, port = split(endpoint)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the words are what is checked
    connection = None
    try:
        connection = socket.create_connection((host.strip("[]"), port), CONNECT_TIMEOUT_S)
        channel = Channel(connection, context, server_side=False, seconds=2 * EXCHANGE_S, max_bytes=MAX_JOIN_TOKEN_CHARS)
        channel.handshake()
        own = secrets.token_bytes(NUMBER_BYTES)
        channel.send(PairingCommitment(PAIRING_MARK, commit(own)))
        other = channel.receive(PairingNumber, MAX_MESSAGE_BYTES).number
        channel.send(PairingNumber(own))
        channel.extend(COMPARE_S)
        return Pairing(pairing_words(channel.peer_certificate(), other, own), host, channel)
    except (OSError, BadMessage) as error:
        if connection is not None:
            connection.close()
        reason = str(error.strerror or error) if isinstance(error, OSError) else "it speaks something else"
        raise Unreachable(
            f"No machine is pairing at {endpoint.partition('/')[2]} ({reason}).",
            hint="On the machine that created the network, run: penstock network pair NAME",
        ) from None
