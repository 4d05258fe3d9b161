"""Revocations: which certificates the authority has taken back, as one numbered list that it signs.

A signed list is a mark, a JSON object and a signature over both. Whoever has the authority's certificate can check it, so it
travels from node to node, and of two lists the one with the higher number counts.
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
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from msgspec import Meta

from penstock.errors import ConfigError, Untrusted
from penstock.network.trust.certificates import Identity, common_name

MARK = b"penstock revocations 1\n"  # signed too: the signature is good for nothing else, and nothing else's for this
MOST_BYTES = 1 << 20
NUMBER_BYTES = 32  # of the two in a P-256 signature

Name = Annotated[str, Meta(max_length=64, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Serial = Annotated[str, Meta(max_length=40, pattern=r"\A[1-9a-f][0-9a-f]*\Z")]


@dataclass(frozen=True, slots=True)
class Revocations:
    """`number` grows with each list; `revoked` has the node's name by the serial of its certificate."""

    network: str
    number: int
    revoked: Mapping[int, str]

    def names(self) -> frozenset[str]:
        return frozenset(self.revoked.values())

    def common_names(self) -> frozenset[str]:
        return frozenset(f"{name}/{serial:x}" for serial, name in self.revoked.items())


class _Payload(msgspec.Struct, forbid_unknown_fields=True):
    network: Name
    number: Annotated[int, Meta(ge=0, lt=1 << 62)]
    revoked: dict[Serial, Name]  # JSON has no numbers as large as serials


def nobody(network: str) -> Revocations:
    return Revocations(network, 0, {})


def sign(revocations: Revocations, authority: Identity) -> bytes:
    revoked = {f"{serial:x}": name for serial, name in sorted(revocations.revoked.items())}
    signed = MARK + msgspec.json.encode(_Payload(revocations.network, revocations.number, revoked))
    r, s = decode_dss_signature(authority.key.sign(signed, ec.ECDSA(hashes.SHA256())))
    data = signed + r.to_bytes(NUMBER_BYTES, "big") + s.to_bytes(NUMBER_BYTES, "big")
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{len(revoked)} revoked certificates are more than a list can hold.",
            hint="Make a new network and invite who is left.",
        )
    return data


def read(data: bytes, authority: x509.Certificate) -> Revocations:
    if len(data) > MOST_BYTES:
        raise Untrusted(f"A list of revocations of {len(data)} bytes is larger than {MOST_BYTES}.")
    signed, r, s = data[: -2 * NUMBER_BYTES], data[-2 * NUMBER_BYTES : -NUMBER_BYTES], data[-NUMBER_BYTES:]
    if not signed.startswith(MARK):
        raise Untrusted("This is no list of revocations.")
    key = authority.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise Untrusted("The network's authority has a key that cannot sign lists of revocations.")
    signature = encode_dss_signature(int.from_bytes(r, "big"), int.from_bytes(s, "big"))
    try:
        key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise Untrusted("The list of revocations was not signed by this network's authority.") from None
    try:
        payload = msgspec.json.decode(signed[len(MARK) :], type=_Payload)
    except msgspec.DecodeError as error:
        raise Untrusted(f"The list of revocations cannot be read: {error}.") from None
    if payload.network != common_name(authority):
        raise Untrusted(f"The list of revocations is that of the network '{payload.network}'.")
    return Revocations(payload.network, payload.number, {int(serial, 16): name for serial, name in payload.revoked.items()})
