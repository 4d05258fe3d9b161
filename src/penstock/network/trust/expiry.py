"""Warnings before a certificate expires."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.config import files
from penstock.network.trust.certificates import load_certificate, node_name

RENEWAL_PERIOD = timedelta(days=30)


def expires_soon(ends: datetime, now: datetime | None = None) -> bool:
    return ends - (now or datetime.now(UTC)) < RENEWAL_PERIOD


def expires(certificate_file: Path) -> datetime:
    """Return when the certificate in a file expires."""
    return load_certificate(files.read(certificate_file)).not_valid_after_utc


def expiry_warning(certificate_file: Path, now: datetime | None = None) -> str | None:
    """Return a warning if the certificate expires soon, with what to do; None otherwise."""
    certificate = load_certificate(files.read(certificate_file))
    now, ends = now or datetime.now(UTC), certificate.not_valid_after_utc
    if not expires_soon(ends, now):
        return None
    warning = f"The certificate of this node {_describe_expiry(ends, now)}."
    if (certificate_file.parent / "ca.key").exists():
        return f"{warning} The next `penstock serve` renews it."
    return (
        f"{warning} To renew it, run on the machine that created the network: penstock network invite {node_name(certificate)}; "
        "then here: penstock network join TOKEN"
    )


def _describe_expiry(ends: datetime, now: datetime) -> str:
    if ends <= now:
        return f"expired on {ends:%Y-%m-%d}"
    days = (ends - now).days
    return f"expires in {days} day{'' if days == 1 else 's'} ({ends:%Y-%m-%d})"
