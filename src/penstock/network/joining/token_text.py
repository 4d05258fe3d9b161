"""Tokens as text that a person can copy: a prefix, base64, and a checksum that finds typing errors."""

from __future__ import annotations

import base64
import hashlib
import hmac

from penstock.errors import Untrusted

CHECKSUM_BYTES = 8
COPY_AGAIN = "Copy the whole token again, or ask for a new one (penstock network invite NAME)."


def to_text(prefix: str, packed: bytes) -> str:
    return prefix + base64.urlsafe_b64encode(packed + checksum(prefix, packed)).decode().rstrip("=")


def from_text(prefix: str, text: str, max_chars: int) -> bytes:
    """Return the packed data. Raises Untrusted, with no part of the text in the message."""
    token = "".join(text.split()) if len(text) <= max_chars else ""  # mail breaks long lines
    if not token.startswith(prefix):
        raise Untrusted(f"This is not an invitation: it does not start with {prefix}", hint=COPY_AGAIN)
    body = token.removeprefix(prefix)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise _damaged() from None
    packed, found = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if not hmac.compare_digest(checksum(prefix, packed), found):
        raise _damaged()
    return packed


def checksum(prefix: str, packed: bytes) -> bytes:
    return hashlib.sha256(prefix.encode() + packed).digest()[:CHECKSUM_BYTES]


def unreadable() -> Untrusted:
    return Untrusted(
        "The invitation cannot be read, although it is complete.", hint="Use the same version of Penstock on both machines."
    )


def _damaged() -> Untrusted:
    return Untrusted("The invitation is incomplete or mistyped: its checksum does not match.", hint=COPY_AGAIN)
