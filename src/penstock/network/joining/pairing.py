"""Pairing: hand an invitation to a machine in the same LAN, over a connection that people check by comparing four words.

    machine → authority   PairingCommitment: a hash of a random number of the machine's
    authority → machine   PairingNumber: a random number of the authority's
    machine → authority   PairingNumber: the number that was hashed
    authority → machine   PairingToken, once its owner has typed the words that the machine shows

The words are a hash of both numbers and of the certificate that the machine saw in TLS. An attacker in between has to present
another certificate, and to choose a number on either side before the words are known: so both machines show the same words by
chance once in 2^32 exchanges, and one pairing allows at most a thousand. Nothing secret is sent before.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import threading
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.config.home import JoinedNetwork
from penstock.errors import BadMessage, Unreachable, Untrusted
from penstock.network.joining.join_protocol import Channel
from penstock.network.joining.join_token import MAX_JOIN_TOKEN_CHARS
from penstock.network.joining.stranger_listener import StrangerListener, to_evict
from penstock.network.trust.listening import split

PAIRING_MARK = b"penstock pair 1\n"
NUMBER_BYTES = 32
WORDS = 4
MAX_MESSAGE_BYTES = 1 << 10
CONNECT_TIMEOUT_S = 5.0
EXCHANGE_S = 10.0  # until both sides have the words
COMPARE_S = 180.0  # for the person who compares them
MAX_PAIRINGS = 32  # machines that wait for their words to be typed
MAX_EXCHANGES = 1000
MAX_EXCHANGES_PER_ADDRESS = 20

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
    """The words that a person compares. certificate: the authority's, in DER, as the machine saw it."""
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
    """The authority's side: listens from construction until it is closed. Raises OSError if it cannot.

    Strangers can complete the exchange too: so each machine has its own words, and the words that a person types select the
    machine. Every exchange gives an attacker in between another chance, so their number is limited.
    """

    def __init__(self, network: JoinedNetwork, endpoint: str) -> None:
        self._listener = StrangerListener(network, endpoint, self._serve)
        self._changed = threading.Condition()
        self._pairings: list[Pairing] = []  # the oldest first
        self._exchanges = Counter[str]()  # by address
        self._listener.start()

    def __enter__(self) -> PairingListener:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._changed:
            for pairing in self._pairings:
                pairing.channel.close()

    def wait(self, seconds: float) -> Pairing:
        """Wait for the first machine that completes the exchange."""
        with self._changed:
            self._changed.wait_for(lambda: self._pairings or self._is_attacked, seconds)
            if self._pairings:
                return self._pairings[0]
            if self._is_attacked:
                raise Untrusted("Too many machines have come to pair.", hint="Use an invitation: penstock network invite NODE")
        raise Unreachable("No machine has come to pair.", hint="Begin again, and run the command that it prints in time.")

    def find(self, typed: str) -> Pairing | None:
        """The machine that shows the words that were typed; None if no machine does."""
        with self._changed:
            return next((pairing for pairing in self._pairings if pairing.matches(typed)), None)

    @property
    def _is_attacked(self) -> bool:
        return self._exchanges.total() >= MAX_EXCHANGES

    def _serve(self, connection: socket.socket, address: str) -> bool:
        try:
            pairing = self._exchange(connection, address)
        except (OSError, BadMessage):
            return False
        with self._changed:
            self._pairings.append(pairing)
            if len(self._pairings) > MAX_PAIRINGS:
                self._pairings.pop(to_evict([pairing.address for pairing in self._pairings])).channel.close()
            self._changed.notify_all()
        return True

    def _exchange(self, connection: socket.socket, address: str) -> Pairing:
        listener = self._listener
        channel = Channel(connection, listener.context, server_side=True, seconds=EXCHANGE_S, max_bytes=MAX_MESSAGE_BYTES)
        channel.handshake()
        first = channel.receive(PairingCommitment, MAX_MESSAGE_BYTES)
        self._count(address)  # the next number reveals the words, and a guest that dislikes them can leave
        own = secrets.token_bytes(NUMBER_BYTES)
        channel.send(PairingNumber(own))
        other = channel.receive(PairingNumber, MAX_MESSAGE_BYTES).number
        if first.mark != PAIRING_MARK or not hmac.compare_digest(first.commitment, commit(other)):
            raise ConnectionAbortedError("the number is not the one that was committed to")
        channel.extend(COMPARE_S)
        return Pairing(pairing_words(listener.certificate, own, other), address, channel)

    def _count(self, address: str) -> None:
        with self._changed:
            if self._is_attacked or self._exchanges[address] >= MAX_EXCHANGES_PER_ADDRESS:
                raise ConnectionAbortedError("too many exchanges")
            self._exchanges[address] += 1
            self._changed.notify_all()


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
        channel = Channel(connection, context, server_side=False, seconds=EXCHANGE_S, max_bytes=MAX_JOIN_TOKEN_CHARS)
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
