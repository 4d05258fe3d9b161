"""Invitations: all that a machine needs to become a node of a network, as one token that a person can copy.

A token is as good as the key inside it. None of it is ever logged, shown in a message or in a repr.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import zlib
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta

from penstock.config.home import RESERVED
from penstock.config.network import NAME
from penstock.errors import ConfigError, Untrusted
from penstock.network.trust import revocations
from penstock.network.trust.certificates import Identity, common_name, key_of, load_der, node_name, paired, verify
from penstock.network.trust.listening import check_connect

MARK = "penstock1:"
CHECKSUM_BYTES = 8
KEY_BYTES = 32
MOST_CERTIFICATE = 8 << 10
MOST_ENDPOINTS = 64
MOST_BYTES = revocations.MOST_BYTES + (64 << 10)
MOST_TEXT = 2 * MOST_BYTES
ASK_AGAIN = "Copy it again, the whole of it, or ask for a new one (penstock network invite NAME)."

Der = Annotated[bytes, Meta(min_length=1, max_length=MOST_CERTIFICATE)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=300)]


@dataclass(frozen=True, slots=True)
class Invitation:
    """`endpoints` lead to members, `revocations` is the list of them as the authority knows it."""

    network: str
    authority: x509.Certificate
    identity: Identity = field(repr=False)
    endpoints: tuple[str, ...]
    revocations: bytes = field(repr=False)

    @property
    def node(self) -> str:
        return node_name(self.identity.certificate)


class _Contents(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    network: Annotated[str, Meta(max_length=64)]
    authority: Der
    certificate: Der
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=MOST_ENDPOINTS)]
    revocations: Annotated[bytes, Meta(max_length=revocations.MOST_BYTES)]

    def __repr__(self) -> str:
        return "_Contents(…)"  # the key is among them


def encode(invitation: Invitation) -> str:
    contents = _Contents(
        invitation.network,
        invitation.authority.public_bytes(Encoding.DER),
        invitation.identity.certificate.public_bytes(Encoding.DER),
        invitation.identity.key.private_numbers().private_value.to_bytes(KEY_BYTES, "big"),
        invitation.endpoints,
        invitation.revocations,
    )
    packed = zlib.compress(msgspec.msgpack.encode(contents), level=9)
    return MARK + base64.urlsafe_b64encode(packed + _checksum(packed)).decode().rstrip("=")


def decode(text: str) -> Invitation:
    """Raises Untrusted unless the token is whole, and holds a certificate that its authority stands behind."""
    contents = _contents(_unpacked(text))
    try:
        authority, certificate = load_der(contents.authority), load_der(contents.certificate)
        key = key_of(int.from_bytes(contents.key, "big"))
        check_connect(contents.endpoints)
    except (ValueError, ConfigError, Untrusted):
        raise _unreadable() from None
    if not NAME.fullmatch(contents.network) or contents.network in RESERVED:  # it becomes the name of a folder
        raise Untrusted(f"The invitation is to a network called {contents.network!r}, which none can be called.")
    if common_name(authority) != contents.network:
        raise Untrusted("The invitation names another network than its authority.")
    verify(certificate, authority)
    node_name(certificate)
    revocations.read(contents.revocations, authority)
    return Invitation(contents.network, authority, paired(certificate, key), contents.endpoints, contents.revocations)


def _unpacked(text: str) -> bytes:
    token = "".join(text.split()) if len(text) <= MOST_TEXT else ""  # mail breaks long lines
    if not token.startswith(MARK):
        raise Untrusted(f"This is no invitation: one begins with {MARK}", hint=ASK_AGAIN)
    body = token.removeprefix(MARK)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise _damaged() from None
    packed, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if not hmac.compare_digest(_checksum(packed), checksum):
        raise _damaged()
    return packed


def _contents(packed: bytes) -> _Contents:
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, MOST_BYTES)
        if not unpacking.eof or unpacking.unused_data:
            raise _unreadable()
        return msgspec.msgpack.decode(data, type=_Contents)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError):
        raise _unreadable() from None


def _checksum(packed: bytes) -> bytes:
    return hashlib.sha256(MARK.encode() + packed).digest()[:CHECKSUM_BYTES]


def _damaged() -> Untrusted:
    return Untrusted("The invitation is cut off or mistyped: its checksum does not fit.", hint=ASK_AGAIN)


def _unreadable() -> Untrusted:
    return Untrusted("The invitation is whole, but holds what none can hold.", hint="Was it made by another version of Penstock?")
