"""Invitations: all that a machine needs to join a network, as one token that a person can copy.

A token contains a private key. No part of it is ever logged, or shown in a message or a repr.
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
from penstock.network.trust import revocations, trusted_models
from penstock.network.trust.certificates import Identity, common_name, identity_of, load_der, node_name, private_key, verify
from penstock.network.trust.listening import check_connect

TOKEN_PREFIX = "penstock1:"
CHECKSUM_BYTES = 8
KEY_BYTES = 32
MAX_CERTIFICATE_BYTES = 8 << 10
MAX_ENDPOINTS = 64
MAX_UNPACKED_BYTES = revocations.MAX_LIST_BYTES + trusted_models.MAX_LIST_BYTES + (64 << 10)
MAX_TOKEN_CHARS = 2 * MAX_UNPACKED_BYTES
COPY_AGAIN = "Copy the whole token again, or ask for a new one (penstock network invite NAME)."

Der = Annotated[bytes, Meta(min_length=1, max_length=MAX_CERTIFICATE_BYTES)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=300)]


@dataclass(frozen=True, slots=True)
class Invitation:
    """A decoded token. `endpoints` are those of members; `revocations` and `trusted` are lists that the authority signed."""

    network: str
    authority: x509.Certificate
    identity: Identity = field(repr=False)
    endpoints: tuple[str, ...]
    revocations: bytes = field(repr=False)
    trusted: bytes = field(default=trusted_models.NO_TRUSTED_MODELS.encode(), repr=False)

    @property
    def node(self) -> str:
        return node_name(self.identity.certificate)


class _Contents(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    network: Annotated[str, Meta(max_length=64)]
    authority: Der
    certificate: Der
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=MAX_ENDPOINTS)]
    revocations: Annotated[bytes, Meta(max_length=revocations.MAX_LIST_BYTES)]
    # older tokens have none
    trusted: Annotated[bytes, Meta(max_length=trusted_models.MAX_LIST_BYTES)] = trusted_models.NO_TRUSTED_MODELS.encode()

    def __repr__(self) -> str:
        return "_Contents(…)"  # they include the private key


def encode(invitation: Invitation) -> str:
    contents = _Contents(
        invitation.network,
        invitation.authority.public_bytes(Encoding.DER),
        invitation.identity.certificate.public_bytes(Encoding.DER),
        invitation.identity.key.private_numbers().private_value.to_bytes(KEY_BYTES, "big"),
        invitation.endpoints,
        invitation.revocations,
        invitation.trusted,
    )
    packed = zlib.compress(msgspec.msgpack.encode(contents), level=9)
    return TOKEN_PREFIX + base64.urlsafe_b64encode(packed + _checksum(packed)).decode().rstrip("=")


def decode(text: str) -> Invitation:
    """Decode a token. Raises Untrusted unless it is intact and its certificate is valid and signed by its authority."""
    contents = _contents(_unpacked(text))
    try:
        authority, certificate = load_der(contents.authority), load_der(contents.certificate)
        key = private_key(int.from_bytes(contents.key, "big"))
        check_connect(contents.endpoints)
    except (ValueError, ConfigError, Untrusted):
        raise _unreadable() from None
    if not NAME.fullmatch(contents.network) or contents.network in RESERVED:  # it becomes the name of a folder
        raise Untrusted(f"The invitation names a network {contents.network!r}, which is not a valid name.")
    if common_name(authority) != contents.network:
        raise Untrusted("The invitation and the authority in it name different networks.")
    verify(certificate, authority)
    node_name(certificate)
    revocations.read(contents.revocations, authority)
    trusted_models.read(contents.trusted, authority)
    identity = identity_of(certificate, key)
    return Invitation(contents.network, authority, identity, contents.endpoints, contents.revocations, contents.trusted)


def _unpacked(text: str) -> bytes:
    token = "".join(text.split()) if len(text) <= MAX_TOKEN_CHARS else ""  # mail breaks long lines
    if not token.startswith(TOKEN_PREFIX):
        raise Untrusted(f"This is not an invitation: it does not start with {TOKEN_PREFIX}", hint=COPY_AGAIN)
    body = token.removeprefix(TOKEN_PREFIX)
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
        data = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
        if not unpacking.eof or unpacking.unused_data:
            raise _unreadable()
        return msgspec.msgpack.decode(data, type=_Contents)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError):
        raise _unreadable() from None


def _checksum(packed: bytes) -> bytes:
    return hashlib.sha256(TOKEN_PREFIX.encode() + packed).digest()[:CHECKSUM_BYTES]


def _damaged() -> Untrusted:
    return Untrusted("The invitation is incomplete or mistyped: its checksum does not match.", hint=COPY_AGAIN)


def _unreadable() -> Untrusted:
    return Untrusted(
        "The invitation cannot be read, although it is complete.", hint="Use the same version of Penstock on both machines."
    )
