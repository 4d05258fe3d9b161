"""Revocations: which certificates the authority has taken back, each in a record that it signs.

What was taken back stays so. Lists only ever come together, therefore: it does not matter which one is newer, in which order they
come, or whether the authority's machine was restored from a copy and has forgotten what the others still know. A list is a mark
and its records; whoever has the authority's certificate can check each of them, so they travel from node to node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Meta

from penstock.config.network import NAME
from penstock.errors import ConfigError, Untrusted
from penstock.network.trust.certificates import Identity, common_name, public_key

LIST_MARK = b"penstock revocations 2\n"
RECORD_MARK = b"penstock revocation 2\n"  # signed too: the signature is good for nothing else, and nothing else's for this
MOST = 4096  # records
MOST_BYTES = 1 << 20  # more than so many take

Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]
Serial = Annotated[str, Meta(max_length=40, pattern=r"\A[1-9a-f][0-9a-f]*\Z")]  # msgpack has no numbers as large
Signature = Annotated[bytes, Meta(max_length=72)]  # the most that one of P-256 takes


class Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One certificate, and the node that it was issued to."""

    serial: Serial
    node: Name
    signature: Signature

    def signed(self, network: str) -> bytes:
        return RECORD_MARK + msgspec.msgpack.encode([network, self.serial, self.node])


_Records = Annotated[list[Record], Meta(max_length=MOST)]


@dataclass(frozen=True, slots=True)
class Revocations:
    """Records, by the serials of their certificates."""

    records: Mapping[int, Record]

    def __contains__(self, serial: int) -> bool:
        return serial in self.records

    def __or__(self, other: Revocations) -> Revocations:
        both = {**other.records, **self.records}
        if len(both) > MOST:
            raise ConfigError(
                f"{len(both)} revoked certificates are more than a list can hold ({MOST}).",
                hint="Make a new network and invite who is left.",
            )
        return Revocations(both)

    def common_names(self) -> frozenset[str]:
        return frozenset(f"{record.node}/{record.serial}" for record in self.records.values())

    def encode(self) -> bytes:
        return LIST_MARK + msgspec.msgpack.encode([record for _, record in sorted(self.records.items())])


NOBODY = Revocations({})


def sign(revoked: Mapping[int, str], authority: Identity) -> Revocations:
    """Take certificates back; `revoked` has the node's name by the serial of each."""
    network = common_name(authority.certificate)
    records = {}
    for serial, node in revoked.items():
        record = Record(f"{serial:x}", node, b"")
        signature = authority.key.sign(record.signed(network), ec.ECDSA(hashes.SHA256()))
        records[serial] = msgspec.structs.replace(record, signature=signature)
    return Revocations(records)


def read(data: bytes, authority: x509.Certificate, known: Revocations = NOBODY) -> Revocations:
    """The list that `data` is. Records of certificates that are `known` to be out are not checked again. Raises Untrusted."""
    if len(data) > MOST_BYTES:
        raise Untrusted(f"A list of revocations of {len(data)} bytes is larger than {MOST_BYTES}.")
    if not data.startswith(LIST_MARK):
        raise Untrusted("This is no list of revocations.")
    try:
        listed = msgspec.msgpack.decode(data[len(LIST_MARK) :], type=_Records)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Untrusted(f"The list of revocations cannot be read: {error}.") from None
    network, key = common_name(authority), public_key(authority)
    records = {}
    for record in listed:
        serial = int(record.serial, 16)
        records[serial] = known.records.get(serial) or _checked(record, network, key)
    return Revocations(records)


def _checked(record: Record, network: str, key: ec.EllipticCurvePublicKey) -> Record:
    try:
        key.verify(record.signature, record.signed(network), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise Untrusted("The list of revocations was not signed by this network's authority.") from None
    return record
