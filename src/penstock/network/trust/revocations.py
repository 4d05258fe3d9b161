"""Revocations: the certificates that the authority has revoked, each in a record that it signs.

A revocation is final, so lists are only ever merged. It does not matter which one is newer, in which order they arrive, or
whether the authority's machine was restored from a backup and has forgotten some. Any node can check the records with the
authority's certificate, so nodes pass lists on to each other. A list is a mark and its records.
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
RECORD_MARK = b"penstock revocation 2\n"  # signed with the record, so that no signature can be used for anything else
MAX_RECORDS = 4096
MAX_LIST_BYTES = 1 << 20  # more than MAX_RECORDS take

Name = Annotated[str, Meta(pattern=rf"\A{NAME.pattern}\Z")]
Serial = Annotated[str, Meta(max_length=40, pattern=r"\A[1-9a-f][0-9a-f]*\Z")]  # too large for a number in msgpack
Signature = Annotated[bytes, Meta(max_length=72)]  # the longest signature of P-256


class Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A revoked certificate, and the node that it was issued to."""

    serial: Serial
    node: Name
    signature: Signature

    def signed(self, network: str) -> bytes:
        return RECORD_MARK + msgspec.msgpack.encode([network, self.serial, self.node])


_Records = Annotated[list[Record], Meta(max_length=MAX_RECORDS)]


@dataclass(frozen=True, slots=True)
class Revocations:
    """A list of revocations: records by the serial numbers of their certificates."""

    records: Mapping[int, Record]

    def __contains__(self, serial: int) -> bool:
        return serial in self.records

    def __or__(self, other: Revocations) -> Revocations:
        both = {**other.records, **self.records}
        if len(both) > MAX_RECORDS:
            raise ConfigError(
                f"A list of revocations can hold {MAX_RECORDS} certificates, not {len(both)}.",
                hint="Create a new network and invite the remaining nodes.",
            )
        return Revocations(both)

    def common_names(self) -> frozenset[str]:
        return frozenset(f"{record.node}/{record.serial}" for record in self.records.values())

    def encode(self) -> bytes:
        return LIST_MARK + msgspec.msgpack.encode([record for _, record in sorted(self.records.items())])


NO_REVOCATIONS = Revocations({})


def sign(revoked: Mapping[int, str], authority: Identity) -> Revocations:
    """Revoke certificates; `revoked` maps the serial number of each to the name of its node."""
    network = common_name(authority.certificate)
    records = {}
    for serial, node in revoked.items():
        record = Record(f"{serial:x}", node, b"")
        signature = authority.key.sign(record.signed(network), ec.ECDSA(hashes.SHA256()))
        records[serial] = msgspec.structs.replace(record, signature=signature)
    return Revocations(records)


def read(data: bytes, authority: x509.Certificate, known: Revocations = NO_REVOCATIONS) -> Revocations:
    """Decode a list and check its signatures, except for certificates that are `known` to be revoked. Raises Untrusted."""
    if len(data) > MAX_LIST_BYTES:
        raise Untrusted(f"A list of revocations has {len(data)} bytes; the limit is {MAX_LIST_BYTES}.")
    if not data.startswith(LIST_MARK):
        raise Untrusted("This is not a list of revocations.")
    try:
        listed = msgspec.msgpack.decode(data[len(LIST_MARK) :], type=_Records)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Untrusted(f"The list of revocations cannot be read: {error}.") from None
    network, key = common_name(authority), public_key(authority)
    records = {}
    for record in listed:
        serial = int(record.serial, 16)
        records[serial] = known.records.get(serial) or _verified(record, network, key)
    return Revocations(records)


def _verified(record: Record, network: str, key: ec.EllipticCurvePublicKey) -> Record:
    try:
        key.verify(record.signature, record.signed(network), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise Untrusted("The list of revocations was not signed by this network's authority.") from None
    return record
