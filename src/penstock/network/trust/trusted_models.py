"""TrustedModels: the weights that a network's authority vouches for, each in a record that it signs.

A record names a model and the hash of its manifest. Of two records for one model the one with the higher serial counts, so an
old record that is shown again changes nothing, and lists can be merged in any order. Any node can check the records with the
authority's certificate, so nodes pass lists on to each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Meta

from penstock.errors import ConfigError, Untrusted
from penstock.network.trust.certificates import Identity, common_name, public_key

LIST_MARK = b"penstock trusted models 1\n"
RECORD_MARK = b"penstock trusted model 1\n"  # signed with the record, so that no signature can be used for anything else
MAX_RECORDS = 64
MAX_LIST_BYTES = 160 << 10  # more than MAX_RECORDS take; the list is part of every node's record
MAX_SERIAL = 1 << 53

Model = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
ManifestHash = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Serial = Annotated[int, Meta(ge=1, le=MAX_SERIAL)]
Date = Annotated[str, Meta(pattern=r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}\Z")]
Signature = Annotated[bytes, Meta(max_length=72)]  # the longest signature of P-256


class TrustedModel(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The manifest that a model must have, and when the authority signed it. An empty hash withdraws an earlier record."""

    model: Model
    manifest: ManifestHash
    serial: Serial
    date: Date
    signature: Signature

    def signed(self, network: str) -> bytes:
        return RECORD_MARK + msgspec.msgpack.encode([network, self.model, self.manifest, self.serial, self.date])

    @property
    def order(self) -> tuple[int, str, str]:
        """Sort key: the higher record counts. What follows the serial matters only if an authority used a serial twice."""
        return self.serial, self.date, self.manifest


_Records = Annotated[list[TrustedModel], Meta(max_length=MAX_RECORDS)]


@dataclass(frozen=True, slots=True)
class TrustedModels:
    """A list of trusted models: records by the names of the models."""

    records: Mapping[str, TrustedModel]

    def manifest(self, model: str) -> str:
        """Return the hash of the manifest that the model must have; empty if the authority vouches for none."""
        record = self.records.get(model)
        return record.manifest if record is not None else ""

    def __or__(self, other: TrustedModels) -> TrustedModels:
        both = dict(self.records)
        for model, record in other.records.items():
            if model not in both or record.order > both[model].order:
                both[model] = record
        if len(both) > MAX_RECORDS:
            raise ConfigError(
                f"A network can have {MAX_RECORDS} trusted models, not {len(both)}.",
                hint="Create another network for further models.",
            )
        return TrustedModels(both)

    def encode(self) -> bytes:
        return LIST_MARK + msgspec.msgpack.encode([record for _, record in sorted(self.records.items())])


NO_TRUSTED_MODELS = TrustedModels({})


def sign(model: str, manifest: str, before: TrustedModels, authority: Identity) -> TrustedModels:
    """Vouch for the weights of a model; `before` has what the authority has signed so far. An empty `manifest` withdraws."""
    newest = max((record.serial for record in before.records.values()), default=0)
    serial = max(newest + 1, int(time.time()))  # the clock: a machine restored from an old copy must not repeat serials
    record = TrustedModel(model, manifest, serial, f"{datetime.now(UTC):%Y-%m-%d}", b"")
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=TrustedModel)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"'{model}' with weights '{manifest}' cannot be trusted: {error}.",
            hint="A hash has 64 digits from 0 to f, and the name of a model up to 512 characters.",
        ) from None
    signature = authority.key.sign(record.signed(common_name(authority.certificate)), ec.ECDSA(hashes.SHA256()))
    return TrustedModels({model: msgspec.structs.replace(record, signature=signature)})


def read(data: bytes, authority: x509.Certificate, known: TrustedModels = NO_TRUSTED_MODELS) -> TrustedModels:
    """Decode a list and check its signatures, except of records that are `known`. Raises Untrusted."""
    if len(data) > MAX_LIST_BYTES:
        raise Untrusted(f"A list of trusted models has {len(data)} bytes; the limit is {MAX_LIST_BYTES}.")
    if not data.startswith(LIST_MARK):
        raise Untrusted("This is not a list of trusted models.")
    try:
        listed = msgspec.msgpack.decode(data[len(LIST_MARK) :], type=_Records)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Untrusted(f"The list of trusted models cannot be read: {error}.") from None
    network, key = common_name(authority), public_key(authority)
    records: dict[str, TrustedModel] = {}
    for record in listed:
        if record.model in records:
            raise Untrusted("The list of trusted models has two records for one model.")
        if record != known.records.get(record.model):
            _verify(record, network, key)
        records[record.model] = record
    return TrustedModels(records)


def _verify(record: TrustedModel, network: str, key: ec.EllipticCurvePublicKey) -> None:
    try:
        key.verify(record.signature, record.signed(network), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise Untrusted("The list of trusted models was not signed by this network's authority.") from None
