"""Invitations: all that a machine needs to join a network.

A machine that can reach the authority gets its invitation there, for a single-use token (join_token.py). For one that cannot, the
token contains all of it, with the private key. No part of such a token ever appears in a log, a message or a repr.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta

from penstock.config.home import RESERVED
from penstock.config.network import NAME
from penstock.errors import ConfigError, Untrusted
from penstock.network.joining.token_text import from_text, to_text, unreadable
from penstock.network.trust import revocations, trusted_models
from penstock.network.trust.certificates import Identity, common_name, identity_of, load_der, node_name, private_key, verify
from penstock.network.trust.listening import check_connect
from penstock.network.trust.revocation_stamp import NO_STAMP, read_stamp

TOKEN_PREFIX = "penstock1:"
KEY_BYTES = 32
MAX_CERTIFICATE_BYTES = 8 << 10
MAX_ENDPOINTS = 64
MAX_UNPACKED_BYTES = revocations.MAX_LIST_BYTES + trusted_models.MAX_LIST_BYTES + (64 << 10)
MAX_TOKEN_CHARS = 2 * MAX_UNPACKED_BYTES

Der = Annotated[bytes, Meta(min_length=1, max_length=MAX_CERTIFICATE_BYTES)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=300)]


@dataclass(frozen=True, slots=True)
class Invitation:
    """A decoded token, or the answer of the authority to one that is valid once.

    endpoints: of members.
    revocations, trusted: lists that the authority signed.
    stamp: when it signed the list of revocations; a token has none.
    """

    network: str
    authority: x509.Certificate
    identity: Identity = field(repr=False)
    endpoints: tuple[str, ...]
    revocations: bytes = field(repr=False)
    trusted: bytes = field(default=trusted_models.NO_TRUSTED_MODELS.encode(), repr=False)
    stamp: bytes = field(default=NO_STAMP.encode(), repr=False)

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
    return to_text(TOKEN_PREFIX, zlib.compress(msgspec.msgpack.encode(contents), level=9))


def decode(text: str) -> Invitation:
    """Decode a token. Raises Untrusted unless it is intact and its certificate is valid and signed by its authority."""
    contents = _contents(from_text(TOKEN_PREFIX, text, MAX_TOKEN_CHARS))
    try:
        authority, certificate = load_der(contents.authority), load_der(contents.certificate)
        key = private_key(int.from_bytes(contents.key, "big"))
        check_connect(contents.endpoints)
    except (ValueError, ConfigError, Untrusted):
        raise unreadable() from None
    _check_name(contents.network)
    if common_name(authority) != contents.network:
        raise Untrusted("The invitation and the authority in it name different networks.")
    return checked(authority, certificate, key, contents.endpoints, contents.revocations, contents.trusted)


def network_name(authority: x509.Certificate) -> str:
    """Return the name of an authority's network. Raises Untrusted."""
    name = common_name(authority)
    _check_name(name)
    return name


def _check_name(network: str) -> None:
    if not NAME.fullmatch(network) or network in RESERVED:  # it becomes the name of a folder
        raise Untrusted(f"The invitation names a network {network!r}, which is not a valid name.")


def checked(
    authority: x509.Certificate,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    endpoints: tuple[str, ...],
    revoked: bytes,
    trusted: bytes,
    stamp: bytes = NO_STAMP.encode(),
) -> Invitation:
    """Return the invitation if the authority has signed all of it for a node with this key. Raises Untrusted."""
    verify(certificate, authority)
    node_name(certificate)
    revocations.read(revoked, authority)
    trusted_models.read(trusted, authority)
    read_stamp(stamp, authority)
    return Invitation(network_name(authority), authority, identity_of(certificate, key), endpoints, revoked, trusted, stamp)


def _contents(packed: bytes) -> _Contents:
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, MAX_UNPACKED_BYTES)
        if not unpacking.eof or unpacking.unused_data:
            raise unreadable()
        return msgspec.msgpack.decode(data, type=_Contents)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError):
        raise unreadable() from None
