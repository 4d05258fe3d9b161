"""Certificates of a network: creating the authority, issuing certificates to nodes, and verifying them.

The common name of a node's certificate is `node/serial`. The serial makes it unique, so that a rule against a revoked certificate
does not hit its successor.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.config.network import NAME
from penstock.errors import ConfigError, Untrusted

AUTHORITY_DAYS = 3650
NODE_DAYS = 365
CLOCK_SKEW = timedelta(hours=1)  # certificates are backdated by this much
SERIAL_BITS = 64
_DER = serialization.Encoding.DER
MAX_NODE_NAME = 64 - len("/") - SERIAL_BITS // 4  # X.509 allows a common name 64 characters


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


# ---- issuing ----


def create_authority(network: str) -> Identity:
    key = new_key()
    name = _common_name(network)
    certificate = (
        _certificate(name, name, key.public_key(), timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Identity(certificate, key)


def check_issuable(node: str, days: float) -> None:
    """Raise ConfigError unless a certificate can be issued to a node of this name, for so many days."""
    if not NAME.fullmatch(node) or len(node) > MAX_NODE_NAME:
        raise ConfigError(
            f"'{node}' cannot be the name of a node.",
            hint=f"Use up to {MAX_NODE_NAME} letters, digits, dots, dashes and underscores, starting with a letter or digit.",
        )
    if not 0 < days <= AUTHORITY_DAYS:
        raise ConfigError(f"A certificate cannot be valid for {days:g} days.", hint=f"Use 1 to {AUTHORITY_DAYS} days.")


def issue(authority: Identity, node: str, *, days: float = NODE_DAYS) -> Identity:
    """Issue a certificate with a new key."""
    check_issuable(node, days)
    key = new_key()
    return Identity(issue_to(authority, node, key.public_key(), days=days), key)


def issue_to(authority: Identity, node: str, key: ec.EllipticCurvePublicKey, *, days: float = NODE_DAYS) -> x509.Certificate:
    """Issue a certificate for a node's own key. It expires with the authority's at the latest."""
    check_issuable(node, days)
    serial = 1 + secrets.randbelow(2**SERIAL_BITS - 1)
    issuer = authority.certificate
    lifetime = min(timedelta(days=days), issuer.not_valid_after_utc - datetime.now(UTC))
    if lifetime <= timedelta(0):
        raise Untrusted(
            "The certificate of the network's authority has expired.", hint="Create a new network: penstock network create NAME"
        )
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _certificate(_common_name(f"{node}/{serial:x}"), issuer.subject, key, lifetime, serial)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(node)]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _common_name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: timedelta, serial: int | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,  # lists of revocations
        encipher_only=False,
        decipher_only=False,
    )


# ---- signing requests ----


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a request, in DER, to issue a certificate for this key. The name comes from the authority, not from the request."""
    return x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256()).public_bytes(_DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a signing request, which proves that its sender has the private half. Raises Untrusted."""
    with _raising_untrusted("This is not a certificate signing request."):
        found = x509.load_der_x509_csr(request)
        key, valid = found.public_key(), found.is_signature_valid
    if not valid:
        raise Untrusted("The certificate signing request was not signed with its own key.")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Untrusted("The certificate signing request has a key of another kind than the network uses.")
    return key


# ---- reading ----


@contextmanager
def _raising_untrusted(reason: str, hint: str = "") -> Iterator[None]:
    """Turn any exception into Untrusted.

    The parser reads each part of a certificate only on access, and for a crafted one it can raise anything, not just ValueError.
    """
    try:
        yield
    except Exception:
        raise Untrusted(reason, hint=hint) from None


def load_certificate(pem: bytes) -> x509.Certificate:
    with _raising_untrusted("This is not a certificate.", hint="It must be a PEM file that starts with BEGIN CERTIFICATE."):
        return x509.load_pem_x509_certificate(pem)


def load_der(der: bytes) -> x509.Certificate:
    with _raising_untrusted("This is not a certificate."):
        return x509.load_der_x509_certificate(der)


def load_identity(certificate_pem: bytes, key_pem: bytes) -> Identity:
    certificate = load_certificate(certificate_pem)
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError):  # TypeError: the key has a password
        raise Untrusted("The private key cannot be read.", hint="It must be a PEM file without a password.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Untrusted("The private key is not of the kind that the network uses.", hint="It must be a P-256 key.")
    return identity_of(certificate, key)


def private_key(number: int) -> ec.EllipticCurvePrivateKey:
    """Return the private key with this number. Raises ValueError if there is none."""
    return ec.derive_private_key(number, ec.SECP256R1())


def identity_of(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Identity:
    if key.public_key() != public_key(certificate):
        raise Untrusted("The private key does not match the certificate.", hint="Join the network again with a new invitation.")
    return Identity(certificate, key)


def public_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    with _raising_untrusted("The key in the certificate cannot be read."):
        key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise Untrusted("The key in the certificate is not of the kind that the network uses.")
    return key


def common_name(certificate: x509.Certificate) -> str:
    with _raising_untrusted("The certificate does not have exactly one common name."):
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(name.value)


def node_name(certificate: x509.Certificate) -> str:
    name = common_name(certificate).partition("/")[0]
    if not NAME.fullmatch(name):  # it becomes part of Zenoh keys and log lines
        raise Untrusted("The name in the certificate cannot be the name of a node.")
    return name


def verify(certificate: x509.Certificate, authority: x509.Certificate, *, now: datetime | None = None) -> None:
    """Raise Untrusted unless the authority issued this certificate to a node, and both are valid now."""
    now = now or datetime.now(UTC)
    with _raising_untrusted("The certificate was not signed by this network's authority."):
        certificate.verify_directly_issued_by(authority)
    if _is_authority(certificate):
        raise Untrusted("The certificate belongs to an authority, not to a node.")
    if not _allows_client_auth(certificate):
        raise Untrusted("The certificate does not allow client authentication.")
    for subject, dated in (("certificate", certificate), ("certificate of the network's authority", authority)):
        with _raising_untrusted(f"The {subject} has no valid dates."):
            begins, ends = dated.not_valid_before_utc, dated.not_valid_after_utc
        if now < begins:
            raise Untrusted(
                f"The {subject} is not valid before {begins:%Y-%m-%d %H:%M} UTC.", hint="Check the clock of this machine."
            )
        if now >= ends:
            raise Untrusted(f"The {subject} expired on {ends:%Y-%m-%d %H:%M} UTC.")


def _is_authority(certificate: x509.Certificate) -> bool:
    return any(isinstance(value, x509.BasicConstraints) and value.ca for value in _extensions(certificate))


def _allows_client_auth(certificate: x509.Certificate) -> bool:
    purposes = [value for value in _extensions(certificate) if isinstance(value, x509.ExtendedKeyUsage)]
    return any(ExtendedKeyUsageOID.CLIENT_AUTH in purpose for purpose in purposes)


def _extensions(certificate: x509.Certificate) -> list[x509.ExtensionType]:
    with _raising_untrusted("The certificate has extensions that cannot be read."):
        return [extension.value for extension in certificate.extensions]
