"""The file of known peer endpoints, so that a node finds members even when those in its settings are off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from penstock.config import files
from penstock.errors import ConfigError, PenstockError
from penstock.network.trust.listening import check_connect

MAX_ENDPOINTS = 32
MAX_FILE_BYTES = 1 << 16


def load_endpoints(file: Path) -> tuple[str, ...]:
    """Read the file; empty if it is missing or damaged, because it only saves time."""
    try:
        found = json.loads(file.read_bytes()[:MAX_FILE_BYTES])
        return valid_endpoints(found if isinstance(found, list) else [])
    except (OSError, ValueError):
        return ()


def save_endpoints(file: Path, endpoints: Iterable[str]) -> None:
    with suppress(PenstockError):  # such as a full disk: it is saved again later
        files.replace(file.parent, {file.name: json.dumps(list(endpoints)[:MAX_ENDPOINTS], indent=2).encode() + b"\n"})


def valid_endpoints(endpoints: Iterable[object]) -> tuple[str, ...]:
    """Return those that can be endpoints of a closed network. They come from other nodes, so they may be anything."""
    found = []
    for endpoint in list(endpoints)[: 4 * MAX_ENDPOINTS]:
        try:
            if isinstance(endpoint, str) and endpoint not in found:
                check_connect((endpoint,))
                found.append(endpoint)
        except ConfigError:
            continue
    return tuple(found[:MAX_ENDPOINTS])
