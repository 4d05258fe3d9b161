"""When a certificate ends, and what to do about it while there is time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock.config import files
from penstock.network.trust.certificates import load_certificate, node_name

EARLY = timedelta(days=30)


def ends_soon(ends: datetime, now: datetime | None = None) -> bool:
    return ends - (now or datetime.now(UTC)) < EARLY


def expiry_warning(certificate_file: Path, now: datetime | None = None) -> str | None:
    """None while there is time enough."""
    certificate = load_certificate(files.read(certificate_file))
    now, ends = now or datetime.now(UTC), certificate.not_valid_after_utc
    if not ends_soon(ends, now):
        return None
    told = f"The certificate of this node {_ending(ends, now)}."
    if (certificate_file.parent / "ca.key").exists():
        return f"{told} `penstock serve` renews it when it starts next."
    return (
        f"{told} On the machine that made the network run: penstock network invite {node_name(certificate)}; "
        "then here: penstock network join TOKEN"
    )


def _ending(ends: datetime, now: datetime) -> str:
    if ends <= now:
        return f"ended on {ends:%Y-%m-%d}"
    days = (ends - now).days
    return f"ends in {days} day{'' if days == 1 else 's'} ({ends:%Y-%m-%d})"
