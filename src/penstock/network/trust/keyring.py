"""The Keyring: the keys between this node and each life of every other, agreed on when they meet, and what is sealed with them.

A life introduces itself with a *card*: its certificate, its epoch, and a key made for this life alone, signed with the key of the
certificate. Whoever has seen a card can show it again, so a card proves nothing about who shows it. What was sealed does: the
keys between two lives come from both of their life keys, and these never leave their processes.
"""

from __future__ import annotations

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta

from penstock.errors import ConfigError, DamagedMessage, MalformedMessage, Untrusted
from penstock.network.router import is_node_id, unreachable
from penstock.network.trust.certificates import load_certificate, load_der, load_identity, node_name, public_key, verify
from penstock.network.trust.revocations import NOBODY, Revocations

CARD_MARK = b"penstock card 1\n"  # signed too: the signature is good for nothing else
KEY_MARK = b"penstock keys 1\n"
MOST_CARD = 16 << 10  # bytes
MOST_NAMES = 4096
LIVES_OF_A_NAME = 4  # the latest ones: a node that was started again, or by mistake twice
WINDOW = 1024  # numbers; messages may overtake each other by that much, where a new link is shorter than the old way

Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Envelope(NamedTuple):
    """What is written outside of something sealed, and vouched for by the seal: from which life to which, and a number that the
    sender never uses twice."""

    kind: int
    sender: int  # epoch
    receiver: int  # epoch
    number: int

    def pack(self) -> bytes:
        return _ENVELOPE.pack(*self)


_ENVELOPE = struct.Struct(">BQQQ")


class Sealed(NamedTuple):
    envelope: bytes
    body: bytes


def read_envelope(data: bytes) -> Envelope:
    if len(data) != _ENVELOPE.size:
        raise MalformedMessage(f"The envelope of a message has {len(data)} bytes instead of {_ENVELOPE.size}.")
    return Envelope(*_ENVELOPE.unpack(data))


class Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes, /) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes, /) -> bytes: ...


@dataclass(slots=True, eq=False)
class KnownPeer:
    """A life that showed a good card, and what is needed to write to it and to read what it writes."""

    node: str
    epoch: int
    card: bytes = field(repr=False)
    life_key: bytes = field(repr=False)
    certificate: x509.Certificate | None = field(repr=False)
    outgoing: Cipher = field(repr=False)
    incoming: Cipher = field(repr=False)
    _newest: int = -1
    _seen: int = 0  # one bit for each of the last numbers

    def is_new(self, number: int) -> bool:
        """Whether something with this number is read for the first time, as far back as the window goes."""
        ahead = number - self._newest
        if ahead > 0:
            self._seen = 1 if ahead >= WINDOW else (self._seen << ahead | 1) & ((1 << WINDOW) - 1)
            self._newest = number
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class Keyring(ABC):
    """What open and closed networks share: who was met, in which lives, and numbers that are used once. Safe in many threads."""

    def __init__(self, node: str, epoch: int) -> None:
        self.node, self.epoch = node, epoch
        self._lock = threading.Lock()
        self._met: dict[str, dict[int, KnownPeer]] = {}
        self._number = 0  # one for all keys of this life, so none can be repeated with any of them, whoever is forgotten

    @abstractmethod
    def card(self) -> bytes:
        """Who this node is in this life, for others to check."""

    @abstractmethod
    def _read(self, card: bytes) -> KnownPeer:
        """Raises Untrusted."""

    def _is_out(self, life: KnownPeer) -> bool:
        return False

    def meet(self, card: bytes) -> KnownPeer:
        """Know the life that this card is of. Raises Untrusted.

        A card that is shown again changes nothing. One of an earlier life does not displace a later one, and the card of one life
        cannot be replaced: its owner signs one only.
        """
        if len(card) > MOST_CARD:
            raise Untrusted(f"A card of {len(card)} bytes is larger than {MOST_CARD}.")
        life = self._read(card)
        with self._lock:
            if self._is_out(life):  # asked in here, or a revocation could come between the question and its entry
                raise Untrusted(f"The certificate of node '{life.node}' was revoked.")
            lives = self._met.get(life.node, {})
            known = lives.get(life.epoch)
            if known is not None:
                if known.life_key != life.life_key:
                    raise Untrusted(f"Two cards of one life of node '{life.node}' differ.")
                return known
            own = {self.epoch} if life.node == self.node else set()
            earlier = lives.keys() - own
            if len(earlier) >= LIVES_OF_A_NAME:
                earliest = min(earlier)
                if life.epoch < earliest:
                    raise Untrusted(f"The card is of an earlier life of node '{life.node}'.")
                del lives[earliest]
            if life.node not in self._met and len(self._met) >= MOST_NAMES:
                del self._met[next(name for name in self._met if name != self.node)]
            self._met.setdefault(life.node, lives)[life.epoch] = life
            return life

    def has_met(self, node: str, epoch: int) -> bool:
        return epoch in self._met.get(node, ())

    def seal(self, node: str, epoch: int, kind: int, data: bytes) -> Sealed:
        """Raises Unreachable when that life was not met."""
        with self._lock:
            life = self._met.get(node, {}).get(epoch)
            if life is None:
                raise unreachable(node)
            self._number += 1
            number = self._number
        envelope = Envelope(kind, self.epoch, epoch, number).pack()
        return Sealed(envelope, life.outgoing.encrypt(_nonce(number), data, envelope))

    def open(self, node: str, sealed: Sealed) -> bytes:
        """What `node` has sealed for this life. Raises BadMessage."""
        envelope = read_envelope(sealed.envelope)
        life = self._met.get(node, {}).get(envelope.sender)
        if life is None or envelope.receiver != self.epoch:
            raise MalformedMessage(f"A message of '{node}' is of a life that was not met, or for another life of this node.")
        try:
            data = life.incoming.decrypt(_nonce(envelope.number), sealed.body, sealed.envelope)
        except InvalidTag:
            raise DamagedMessage(f"A message in the name of '{node}' was not sealed by it, or was damaged on its way.") from None
        with self._lock:
            if not life.is_new(envelope.number):
                raise MalformedMessage(f"A message of '{node}' came again.")
        return data

    # Nobody can be shut out of an open network.

    @property
    def is_revoked(self) -> bool:
        """Whether this node's own certificate was taken back."""
        return False

    def revoke(self, revocations: Revocations) -> list[KnownPeer]:
        """Those who are out now; their keys are forgotten."""
        return []

    def expire(self) -> list[KnownPeer]:
        """Those whose certificates have ended; their keys are forgotten."""
        return []

    def _forget(self, gone: Callable[[KnownPeer], bool]) -> list[KnownPeer]:
        with self._lock:
            out = [life for lives in self._met.values() for life in lives.values() if gone(life)]
            for life in out:
                del self._met[life.node][life.epoch]
            return out


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


# ---- an open network ----


class _OpenCard(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    node: str
    epoch: Epoch


class _NoCipher:
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        return data

    decrypt = encrypt


class OpenKeyring(Keyring):
    """Everybody is who they say they are, and nothing is hidden."""

    def __init__(self, node: str, epoch: int) -> None:
        super().__init__(node, epoch)
        self.meet(self.card())

    def card(self) -> bytes:
        return msgspec.msgpack.encode(_OpenCard(self.node, self.epoch))

    def _read(self, card: bytes) -> KnownPeer:
        try:
            said = msgspec.msgpack.decode(card, type=_OpenCard)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Untrusted("A card cannot be read.") from None
        if not is_node_id(said.node):
            raise Untrusted("The name on a card is not that of a node.")
        plain = _NoCipher()
        return KnownPeer(said.node, said.epoch, card, b"", None, plain, plain)


# ---- a closed network ----


class _Card(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    certificate: bytes
    epoch: Epoch
    life_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: bytes

    def signed(self, network: str) -> bytes:
        return CARD_MARK + msgspec.msgpack.encode([network, self.certificate, self.epoch, self.life_key])


class ClosedKeyring(Keyring):
    """Names are those of certificates, and only the life that something was sealed for can read it."""

    def __init__(
        self,
        *,
        network: str,
        node: str,
        epoch: int,
        ca_file: Path,
        certificate_file: Path,
        key_file: Path,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        super().__init__(node, epoch)
        self.network, self._clock = network, clock
        try:
            self.authority = load_certificate(ca_file.read_bytes())
            identity = load_identity(certificate_file.read_bytes(), key_file.read_bytes())
            verify(identity.certificate, self.authority, now=clock())
            name = node_name(identity.certificate)
        except Untrusted as error:
            raise Untrusted(
                f"This node cannot join the network '{network}' with {certificate_file}: {error.message}",
                hint=error.hint or "Ask for a new invitation where the network was made: penstock network invite NODE.",
            ) from error
        if name != node:
            raise ConfigError(
                f"The certificate {certificate_file} is that of node '{name}', but this node is called '{node}'.",
                hint=f"Leave node_id out or set it to {name}, or ask for an invitation for {node}.",
            )
        self.certificate = identity.certificate
        self._revoked = NOBODY
        self._life_key = X25519PrivateKey.generate()
        card = _Card(identity.certificate.public_bytes(Encoding.DER), epoch, self._life_key.public_key().public_bytes_raw(), b"")
        card.signature = identity.key.sign(card.signed(network), ec.ECDSA(hashes.SHA256()))
        self._card = msgspec.msgpack.encode(card)
        self.meet(self._card)  # a node writes to itself as it does to others

    def card(self) -> bytes:
        return self._card

    def _read(self, card: bytes) -> KnownPeer:
        try:
            said = msgspec.msgpack.decode(card, type=_Card)
        except msgspec.DecodeError:
            raise Untrusted("A card cannot be read.") from None
        certificate = load_der(said.certificate)
        node = node_name(certificate)
        known = self._met.get(node, {}).get(said.epoch)
        if known is not None and known.card == card:
            return known
        verify(certificate, self.authority, now=self._clock())
        try:
            public_key(certificate).verify(said.signature, said.signed(self.network), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise Untrusted(f"A card of node '{node}' was not signed by it for this network.") from None
        outgoing, incoming = self._agree(node, said)
        return KnownPeer(node, said.epoch, card, said.life_key, certificate, outgoing, incoming)

    def _agree(self, node: str, card: _Card) -> tuple[AESGCM, AESGCM]:
        """A key for each direction, that only the two lives can work out. AES-256-GCM seals 64 KiB in a third of the time that
        ChaCha20-Poly1305 takes on processors of the last ten years."""
        try:
            secret = self._life_key.exchange(X25519PublicKey.from_public_bytes(card.life_key))
        except ValueError:  # a point that makes every secret zero
            raise Untrusted(f"A card of node '{node}' has a key that cannot be used.") from None
        here = (self.node, self.epoch, self._life_key.public_key().public_bytes_raw())
        there = (node, card.epoch, card.life_key)

        def key(sender: tuple[str, int, bytes], receiver: tuple[str, int, bytes]) -> AESGCM:
            about = KEY_MARK + msgspec.msgpack.encode([self.network, sender, receiver])
            return AESGCM(HKDF(hashes.SHA256(), 32, salt=None, info=about).derive(secret))

        return key(here, there), key(there, here)

    @property
    def is_revoked(self) -> bool:
        return self.certificate.serial_number in self._revoked

    def revoke(self, revocations: Revocations) -> list[KnownPeer]:
        with self._lock:
            self._revoked = revocations
        return self._forget(self._is_out)

    def _is_out(self, life: KnownPeer) -> bool:
        return life.certificate is not None and life.certificate.serial_number in self._revoked

    def expire(self) -> list[KnownPeer]:
        now = self._clock()
        return self._forget(lambda life: life.certificate is not None and now >= life.certificate.not_valid_after_utc)
