"""Join tokens: a secret that is valid for one machine and a few hours, and where to use it.

A token has no node key: the machine that joins makes its own, and the authority issues a certificate for it. The machine pins
the authority's certificate in the token: no other server is accepted. Secrets never appear in logs, messages or a repr.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta

from penstock.errors import ConfigError, Untrusted
from penstock.network.joining.invitation import MAX_ENDPOINTS, Der, Endpoint, network_name
from penstock.network.joining.invitation_book import SECRET_BYTES, InvitationId
from penstock.network.joining.token_text import from_text, to_text, unreadable
from penstock.network.trust.certificates import load_der
from penstock.network.trust.listening import check_connect

JOIN_PREFIX = "penstock2:"
MAX_JOIN_TOKEN_CHARS = 1 << 16
MAX_TIME = 253402300799  # the last second of the year 9999


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A decoded token.

    authority: the certificate of the network's authority.
    host: the name of its node; only that one answers.
    endpoints: where it listens for machines that join.
    expires: by the clock of its machine, which alone decides.
    """

    authority: x509.Certificate
    host: str
    id: str
    secret: bytes = field(repr=False)
    endpoints: tuple[str, ...]
    expires: datetime

    @property
    def network(self) -> str:
        return network_name(self.authority)


class _TokenContents(msgspec.Struct, array_like=True):
    """More fields may follow in later versions."""

    authority: Der
    host: Annotated[str, Meta(max_length=64)]
    id: InvitationId
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=MAX_ENDPOINTS)]
    expires: Annotated[int, Meta(ge=0, le=MAX_TIME)]

    def __repr__(self) -> str:
        return "_TokenContents(…)"  # they include the secret


def encode_join(token: JoinToken) -> str:
    contents = _TokenContents(
        token.authority.public_bytes(Encoding.DER),
        token.host,
        token.id,
        token.secret,
        token.endpoints,
        int(token.expires.timestamp()),
    )
    return to_text(JOIN_PREFIX, msgspec.msgpack.encode(contents))


def decode_join(text: str) -> JoinToken:
    """Decode a token. Raises Untrusted unless it is intact."""
    packed = from_text(JOIN_PREFIX, text, MAX_JOIN_TOKEN_CHARS)
    try:
        contents = msgspec.msgpack.decode(packed, type=_TokenContents)
        authority = load_der(contents.authority)
        check_connect(contents.endpoints)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError, Untrusted):
        raise unreadable() from None
    network_name(authority)
    expires = datetime.fromtimestamp(contents.expires, UTC)
    return JoinToken(authority, contents.host, contents.id, contents.secret, contents.endpoints, expires)
