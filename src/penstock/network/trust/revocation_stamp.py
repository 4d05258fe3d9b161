"""RevocationStamp: when the authority last signed its list of revocations, and what was on it.

Revocations are final, so nodes merge lists and never replace one. But that does not reveal that a list is being withheld. The
authority therefore stamps its list: a serial, the time, and a hash of what is on it, signed. Its running node does so every day,
even if nothing was revoked. Of two stamps the one with the higher serial counts. A node whose newest stamp is old, or whose list
is shorter than that stamp says, is not getting what the authority signs.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Meta

from penstock.errors import Untrusted
from penstock.network.trust.certificates import Identity, common_name, public_key
from penstock.network.trust.revocations import MAX_RECORDS, Revocations

STAMP_MARK = b"penstock revocation stamp 1\n"  # signed with the stamp, so that no signature can be used for anything else
MAX_STAMP_BYTES = 256
MAX_SERIAL = 1 << 53
RESIGN_AFTER_S = 24 * 3600.0
MAX_TIME = 253402300799  # the last second of the year 9999

Serial = Annotated[int, Meta(ge=0, le=MAX_SERIAL)]
Time = Annotated[int, Meta(ge=0, le=MAX_TIME)]
Count = Annotated[int, Meta(ge=0, le=MAX_RECORDS)]
Digest = Annotated[bytes, Meta(max_length=32)]
Signature = Annotated[bytes, Meta(max_length=72)]  # the longest signature of P-256


class RevocationStamp(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A signed date of the list of revocations. `count` and `digest` say what is on the list; `signed_at` is in Unix seconds."""

    serial: Serial
    signed_at: Time
    count: Count
    digest: Digest
    signature: Signature

    def signed(self, network: str) -> bytes:
        return STAMP_MARK + msgspec.msgpack.encode([network, self.serial, self.signed_at, self.count, self.digest])

    def __or__(self, other: RevocationStamp) -> RevocationStamp:
        return other if other.serial > self.serial else self

    def encode(self) -> bytes:
        return STAMP_MARK + msgspec.msgpack.encode(self) if self.serial else b""

    @property
    def date(self) -> datetime:
        return datetime.fromtimestamp(self.signed_at, UTC)

    def covers(self, revoked: Revocations) -> bool:
        """Whether the stamp was made for exactly this list."""
        return (self.count, self.digest) == (len(revoked.records), _digest(revoked))

    def lacks(self, revoked: Revocations) -> bool:
        """Whether this list lacks certificates of the stamped one. A longer list has not been stamped yet."""
        return len(revoked.records) <= self.count and not self.covers(revoked)


NO_STAMP = RevocationStamp(0, 0, 0, b"", b"")


def stamp_file(revocations_file: Path) -> Path:
    """The file of the stamp, beside that of the list."""
    return revocations_file.with_suffix(".stamp")


def sign_stamp(revoked: Revocations, before: RevocationStamp, authority: Identity) -> RevocationStamp:
    """Stamp a list now; `before` is the authority's last stamp."""
    now = int(time.time())
    serial = max(before.serial + 1, now)  # the clock: a machine restored from an old copy must not repeat serials
    stamp = RevocationStamp(serial, now, len(revoked.records), _digest(revoked), b"")
    signature = authority.key.sign(stamp.signed(common_name(authority.certificate)), ec.ECDSA(hashes.SHA256()))
    return msgspec.structs.replace(stamp, signature=signature)


def is_due(stamp: RevocationStamp, revoked: Revocations) -> bool:
    """Whether the authority should sign a new stamp: its list has changed, or the stamp is a day old or from the future."""
    return not stamp.covers(revoked) or not 0 <= time.time() - stamp.signed_at < RESIGN_AFTER_S


def read_stamp(data: bytes, authority: x509.Certificate) -> RevocationStamp:
    """Decode a stamp and check its signature; nothing at all is NO_STAMP. Raises Untrusted."""
    if not data:
        return NO_STAMP
    if len(data) > MAX_STAMP_BYTES or not data.startswith(STAMP_MARK):
        raise Untrusted("This is not the stamp of a list of revocations.")
    try:
        stamp = msgspec.msgpack.decode(data[len(STAMP_MARK) :], type=RevocationStamp)
        public_key(authority).verify(stamp.signature, stamp.signed(common_name(authority)), ec.ECDSA(hashes.SHA256()))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Untrusted(f"The stamp of a list of revocations cannot be read: {error}.") from None
    except InvalidSignature:
        raise Untrusted("The stamp of a list of revocations was not signed by this network's authority.") from None
    return stamp


def _digest(revoked: Revocations) -> bytes:
    listed = [[record.serial, record.node] for _, record in sorted(revoked.records.items())]
    return hashlib.sha256(msgspec.msgpack.encode(listed)).digest()
