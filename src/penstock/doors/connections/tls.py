"""ServerCertificate: the certificate of an HTTPS server, read again when its files change."""

from __future__ import annotations

import ipaddress
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from penstock.errors import ConfigError

logger = logging.getLogger("penstock.http")

CHECK_INTERVAL_S = 1.0  # between two looks at the files

Stamp = tuple[tuple[int, int, int] | None, ...]


class ServerCertificate:
    """A certificate and its private key, both in PEM. Raises ConfigError if they cannot be used.

    Connections keep what they began with. If changed files cannot be used, the error is logged and nothing changes.
    """

    def __init__(self, certificate_file: Path, key_file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.file = certificate_file
        self._key_file = key_file
        self._clock = clock
        self._stamp = self._current_stamp()
        self._loaded = _load(certificate_file, key_file)
        self._next_check = clock() + CHECK_INTERVAL_S
        self._log_validity()

    @property
    def expires(self) -> datetime:
        return self._loaded.certificate.not_valid_after_utc

    def context(self) -> ssl.SSLContext:
        """What encrypts the next connection."""
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            self._reload_if_changed()
        return self._loaded.context

    def name_for(self, address: str) -> str:
        """The address, or the name by which clients must call it because the certificate does not have the address."""
        try:
            names = self._loaded.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return address
        hosts = names.get_values_for_type(x509.DNSName)
        wanted = ipaddress.ip_address(address)
        if wanted in names.get_values_for_type(x509.IPAddress):
            return address
        if wanted.is_loopback and "localhost" in hosts:
            return "localhost"
        return next((name for name in hosts if "*" not in name and name != "localhost"), address)

    def _reload_if_changed(self) -> None:
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._loaded = _load(self.file, self._key_file)
        except ConfigError as error:
            logger.error("the earlier certificate stays in use: %s", error)
        else:
            logger.info("the certificate %s was read again; it is valid until %s", self.file, f"{self.expires:%Y-%m-%d}")
            self._log_validity()

    def _log_validity(self) -> None:
        if not self._loaded.certificate.not_valid_before_utc <= datetime.now(UTC) <= self.expires:
            logger.warning(
                "clients will refuse the certificate %s: it is valid from %s to %s",
                self.file,
                self._loaded.certificate.not_valid_before_utc,
                self.expires,
            )

    def _current_stamp(self) -> Stamp:
        return tuple(map(_file_stamp, (self.file, self._key_file)))


@dataclass(frozen=True, slots=True)
class _Loaded:
    context: ssl.SSLContext
    certificate: x509.Certificate


def _load(certificate_file: Path, key_file: Path) -> _Loaded:
    certificate = _certificate(certificate_file)
    _check_key(certificate, certificate_file, key_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate_file, key_file, password="")  # else it would ask the terminal for one
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{certificate_file} and {key_file} cannot be used for TLS: {reason}.") from None
    return _Loaded(context, certificate)


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(_read(file, "certificate"))[0]
    except ValueError:
        raise ConfigError(
            f"{file} has no certificate in PEM format.",
            hint="It begins with -----BEGIN CERTIFICATE-----, the server's own first.",
        ) from None


def _check_key(certificate: x509.Certificate, certificate_file: Path, key_file: Path) -> None:
    data = _read(key_file, "private key")
    try:
        key = serialization.load_pem_private_key(data, None)
    except TypeError:
        raise ConfigError(
            f"The private key {key_file} is encrypted.",
            hint=f"The server has no password for it. Decrypt it: openssl pkey -in {key_file} -out plain-key.pem",
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{key_file} has no private key in PEM format.", hint="It has a line such as -----BEGIN PRIVATE KEY-----."
        ) from None
    if key.public_key() != certificate.public_key():
        raise ConfigError(
            f"The private key {key_file} does not belong to the certificate {certificate_file}.",
            hint="Use the key that the certificate was requested with.",
        )


def _read(file: Path, what: str) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"The {what} {file} does not exist.", hint="Check server.tls_cert and server.tls_key.") from None
    except OSError as error:
        raise ConfigError(f"The {what} {file} cannot be read: {error.strerror}.") from None


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    with suppress(OSError):
        found = file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None
