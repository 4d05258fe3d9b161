"""Certificates for test servers."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class CertificateFiles(NamedTuple):
    cert: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key)


def write_certificate(
    folder: Path, *names: str, common_name: str = "penstock", password: str = "", days: int = 1
) -> CertificateFiles:
    """Write a self-signed certificate for these names and addresses; by default those of this machine. Replaces earlier files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_name(name) for name in names or ("localhost", "127.0.0.1")]), False)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    files = CertificateFiles(folder / "cert.pem", folder / "key.pem")
    contents = {
        files.key: key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption),
        files.cert: certificate.public_bytes(serialization.Encoding.PEM),
    }
    for file, data in contents.items():
        draft = file.with_suffix(".new")
        draft.write_bytes(data)
        draft.replace(file)
    return files


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
