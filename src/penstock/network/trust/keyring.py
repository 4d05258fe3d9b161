"""The Keyring: the keys that this node shares with each session of every other node, and what is sealed with them.

A *session* is one epoch of a node: its process from start to end. It introduces itself with a *card*: its certificate, its epoch,
and a key made for this session alone, signed with the key of the certificate. Any node that has seen a card can show it again, so
a card proves nothing about its sender. A seal does: the keys between two sessions are derived from both session keys, whose
private halves never leave their processes.
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
from penstock.network.stream import Stream
from penstock.network.trust.certificates import load_certificate, load_der, load_identity, node_name, public_key, verify
from penstock.network.trust.revocations import NO_REVOCATIONS, Revocations

CARD_MARK = b"penstock card 1\n"  # signed with the card, so that the signature is valid for nothing else
KEY_MARK = b"penstock keys 2\n"  # counts the versions of the envelope and of what is sealed
MAX_CARD_BYTES = 16 << 10
MAX_NODES = 4096
MAX_EPOCHS_PER_NODE = 4  # the latest: a node may have been restarted, or started twice by mistake
REPLAY_WINDOW = 1024  # how far messages of a stream may overtake each other, when a new link is faster than the old one

Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Envelope(NamedTuple):
    """The unencrypted part of a sealed message, authenticated by the seal. The sender uses a number once for each stream."""

    kind: int
    stream: Stream
    sender: int  # its epoch
    receiver: int  # its epoch
    number: int

    def pack(self) -> bytes:
        return _ENVELOPE.pack(*self)


_ENVELOPE = struct.Struct(">BBQQQ")
_NONCE = struct.Struct(">IQ")  # stream and number
_STREAMS = tuple(Stream)  # by number


class Sealed(NamedTuple):
    envelope: bytes
    body: bytes


def read_envelope(data: bytes) -> Envelope:
    if len(data) != _ENVELOPE.size:
        raise MalformedMessage(
            f"The envelope of a message has {len(data)} bytes instead of {_ENVELOPE.size}; its sender may run another version."
        )
    kind, stream, sender, receiver, number = _ENVELOPE.unpack(data)
    try:
        return Envelope(kind, _STREAMS[stream], sender, receiver, number)
    except IndexError:
        raise MalformedMessage(f"A message has the unknown stream {stream}; its sender may run another version.") from None


class Cipher(Protocol):
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes, /) -> bytes: ...

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes, /) -> bytes: ...


@dataclass(slots=True, eq=False)
class ReplayWindow:
    """The numbers that were received lately on one stream."""

    _newest: int = -1
    _seen: int = 0  # one bit for each number in the window

    def is_new(self, number: int) -> bool:
        """Whether this number was not seen before. Numbers older than the window count as seen."""
        ahead = number - self._newest
        if ahead > 0:
            self._seen = 1 if ahead >= REPLAY_WINDOW else (self._seen << ahead | 1) & ((1 << REPLAY_WINDOW) - 1)
            self._newest = number
            return True
        if -ahead >= REPLAY_WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


@dataclass(slots=True, eq=False)
class KnownPeer:
    """A session that presented a valid card, and the ciphers for both directions.

    sent: the last number that was used for it, by stream.
    """

    node: str
    epoch: int
    card: bytes = field(repr=False)
    session_key: bytes = field(repr=False)
    certificate: x509.Certificate | None = field(repr=False)
    outgoing: Cipher = field(repr=False)
    incoming: Cipher = field(repr=False)
    sent: dict[Stream, int] = field(default_factory=dict, repr=False)
    received: dict[Stream, ReplayWindow] = field(
        default_factory=lambda: {stream: ReplayWindow() for stream in Stream}, repr=False
    )


class Keyring(ABC):
    """What open and closed networks share: the sessions that were met, and message numbers. Thread-safe."""

    def __init__(self, node: str, epoch: int) -> None:
        self.node = node
        self.epoch = epoch
        self._lock = threading.Lock()
        self._met: dict[str, dict[int, KnownPeer]] = {}
        self._highest = 0  # across all: a session that is forgotten and met again has the same keys, and must not restart at 0

    @abstractmethod
    def card(self) -> bytes:
        """Return the card of this session, for other nodes to check."""

    @abstractmethod
    def _read(self, card: bytes) -> KnownPeer:
        """Check a card and derive the keys. Raises Untrusted."""

    def _is_peer_revoked(self, peer: KnownPeer) -> bool:
        return False

    def meet(self, card: bytes) -> KnownPeer:
        """Add the session that this card belongs to. Raises Untrusted.

        A card that is shown again changes nothing. A card of an earlier epoch does not displace a later one, and the card of an
        epoch cannot be replaced, because its owner signs only one.
        """
        if len(card) > MAX_CARD_BYTES:
            raise Untrusted(f"A card has {len(card)} bytes; the limit is {MAX_CARD_BYTES}.")
        peer = self._read(card)
        with self._lock:
            if self._is_peer_revoked(peer):  # under the lock, or a revocation could come between this and adding it
                raise Untrusted(f"The certificate of node '{peer.node}' was revoked.")
            epochs = self._met.get(peer.node, {})
            known = epochs.get(peer.epoch)
            if known is not None:
                if known.session_key != peer.session_key:
                    raise Untrusted(f"Node '{peer.node}' has shown two different cards for one epoch.")
                return known
            own = {self.epoch} if peer.node == self.node else set()
            earlier = epochs.keys() - own
            if len(earlier) >= MAX_EPOCHS_PER_NODE:
                earliest = min(earlier)
                if peer.epoch < earliest:
                    raise Untrusted(f"The card is from an earlier start of node '{peer.node}'.")
                del epochs[earliest]
            if peer.node not in self._met and len(self._met) >= MAX_NODES:
                del self._met[next(name for name in self._met if name != self.node)]
            peer.sent = dict.fromkeys(Stream, self._highest)
            self._met.setdefault(peer.node, epochs)[peer.epoch] = peer
            return peer

    def knows(self, node: str) -> bool:
        """Whether any session of this node was met."""
        return bool(self._met.get(node))

    def has_met(self, node: str, epoch: int) -> bool:
        return epoch in self._met.get(node, ())

    def seal(self, node: str, epoch: int, kind: int, data: bytes, stream: Stream = Stream.CONTROL) -> Sealed:
        """Encrypt a message for one session. Raises Unreachable if it was not met."""
        with self._lock:
            peer = self._met.get(node, {}).get(epoch)
            if peer is None:
                raise unreachable(node)
            number = peer.sent[stream] = peer.sent[stream] + 1
            self._highest = max(self._highest, number)
        envelope = Envelope(kind, stream, self.epoch, epoch, number)
        packed = envelope.pack()
        return Sealed(packed, peer.outgoing.encrypt(_nonce(envelope), data, packed))

    def open(self, node: str, sealed: Sealed, envelope: Envelope | None = None) -> bytes:
        """Decrypt what `node` sealed for this session. Raises BadMessage.

        envelope: of this message, if it was read before.
        """
        envelope = envelope or read_envelope(sealed.envelope)
        peer = self._met.get(node, {}).get(envelope.sender)
        if peer is None or envelope.receiver != self.epoch:
            raise MalformedMessage(f"A message from '{node}' is from an unknown epoch of it, or for another epoch of this node.")
        try:
            data = peer.incoming.decrypt(_nonce(envelope), sealed.body, sealed.envelope)
        except InvalidTag:
            raise DamagedMessage(f"A message from '{node}' was not sealed by it, or was damaged in transit.") from None
        with self._lock:
            if not peer.received[envelope.stream].is_new(envelope.number):
                raise MalformedMessage(f"A message from '{node}' was received twice.")
        return data

    # The defaults are for open networks, where no certificate is revoked or expires.

    @property
    def is_revoked(self) -> bool:
        """Whether this node's own certificate was revoked."""
        return False

    def revoke(self, revocations: Revocations) -> list[KnownPeer]:
        """Apply revocations. Returns the sessions that are revoked now; their keys are dropped."""
        return []

    def expire(self) -> list[KnownPeer]:
        """Return the sessions whose certificates have expired; their keys are dropped."""
        return []

    def _forget(self, gone: Callable[[KnownPeer], bool]) -> list[KnownPeer]:
        with self._lock:
            out = [peer for epochs in self._met.values() for peer in epochs.values() if gone(peer)]
            for peer in out:
                del self._met[peer.node][peer.epoch]
            return out


def _nonce(envelope: Envelope) -> bytes:
    return _NONCE.pack(envelope.stream, envelope.number)


# ---- an open network ----


class _OpenCard(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    node: str
    epoch: Epoch


class _NoCipher:
    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        return data

    decrypt = encrypt


class OpenKeyring(Keyring):
    """For open networks: every name is believed, and nothing is encrypted."""

    def __init__(self, node: str, epoch: int) -> None:
        super().__init__(node, epoch)
        self.meet(self.card())

    def card(self) -> bytes:
        return msgspec.msgpack.encode(_OpenCard(self.node, self.epoch))

    def _read(self, card: bytes) -> KnownPeer:
        try:
            decoded = msgspec.msgpack.decode(card, type=_OpenCard)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Untrusted("A card cannot be read.") from None
        if not is_node_id(decoded.node):
            raise Untrusted("The name on a card cannot be the name of a node.")
        plain = _NoCipher()
        return KnownPeer(decoded.node, decoded.epoch, card, b"", None, plain, plain)


# ---- a closed network ----


class _Card(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    certificate: bytes
    epoch: Epoch
    session_key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    signature: bytes

    def signed(self, network: str) -> bytes:
        return CARD_MARK + msgspec.msgpack.encode([network, self.certificate, self.epoch, self.session_key])


class ClosedKeyring(Keyring):
    """For closed networks: names come from certificates, and only the session that a message was sealed for can read it."""

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
        self.network = network
        self._clock = clock
        try:
            self.authority = load_certificate(ca_file.read_bytes())
            identity = load_identity(certificate_file.read_bytes(), key_file.read_bytes())
            verify(identity.certificate, self.authority, now=clock())
            name = node_name(identity.certificate)
        except Untrusted as error:
            raise Untrusted(
                f"This node cannot join the network '{network}' with {certificate_file}: {error.message}",
                hint=error.hint or "Get a new invitation on the machine that created the network: penstock network invite NODE",
            ) from error
        if name != node:
            raise ConfigError(
                f"The certificate {certificate_file} was issued to node '{name}', but this node is called '{node}'.",
                hint=f"Leave node_id out, set it to {name}, or ask for an invitation for {node}.",
            )
        self.certificate = identity.certificate
        self._revoked = NO_REVOCATIONS
        self._session_key = X25519PrivateKey.generate()
        card = _Card(
            identity.certificate.public_bytes(Encoding.DER), epoch, self._session_key.public_key().public_bytes_raw(), b""
        )
        card.signature = identity.key.sign(card.signed(network), ec.ECDSA(hashes.SHA256()))
        self._card = msgspec.msgpack.encode(card)
        self.meet(self._card)  # a node sends messages to itself, too

    def card(self) -> bytes:
        return self._card

    def _read(self, card: bytes) -> KnownPeer:
        try:
            decoded = msgspec.msgpack.decode(card, type=_Card)
        except msgspec.DecodeError:
            raise Untrusted("A card cannot be read.") from None
        certificate = load_der(decoded.certificate)
        node = node_name(certificate)
        known = self._met.get(node, {}).get(decoded.epoch)
        if known is not None and known.card == card:
            return known
        verify(certificate, self.authority, now=self._clock())
        try:
            public_key(certificate).verify(decoded.signature, decoded.signed(self.network), ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise Untrusted(f"A card of node '{node}' was not signed by it for this network.") from None
        outgoing, incoming = self._agree(node, decoded)
        return KnownPeer(node, decoded.epoch, card, decoded.session_key, certificate, outgoing, incoming)

    def _agree(self, node: str, card: _Card) -> tuple[AESGCM, AESGCM]:
        """Derive a key for each direction, which only the two sessions can do.

        AES-256-GCM seals 64 KiB in a third of the time that ChaCha20-Poly1305 takes on processors of the last ten years.
        """
        try:
            secret = self._session_key.exchange(X25519PublicKey.from_public_bytes(card.session_key))
        except ValueError:  # a point that makes every secret zero
            raise Untrusted(f"A card of node '{node}' has a key that cannot be used.") from None
        here = (self.node, self.epoch, self._session_key.public_key().public_bytes_raw())
        there = (node, card.epoch, card.session_key)

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
        return self._forget(self._is_peer_revoked)

    def _is_peer_revoked(self, peer: KnownPeer) -> bool:
        return peer.certificate is not None and peer.certificate.serial_number in self._revoked

    def expire(self) -> list[KnownPeer]:
        now = self._clock()
        return self._forget(lambda peer: peer.certificate is not None and now >= peer.certificate.not_valid_after_utc)
