"""Where nodes of a network were met, for the next start: members find each other also when those they were told of are off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from penstock.config import files
from penstock.errors import ConfigError, PenstockError
from penstock.network.trust.listening import check_connect

MOST = 32  # endpoints
MOST_BYTES = 1 << 16


def remembered(file: Path) -> tuple[str, ...]:
    """Nothing where there is no such file, or none that can be used: it only saves time."""
    try:
        found = json.loads(file.read_bytes()[:MOST_BYTES])
        return usable(found if isinstance(found, list) else [])
    except (OSError, ValueError):
        return ()


def remember(file: Path, endpoints: Iterable[str]) -> None:
    with suppress(PenstockError):  # a full disk: next time, then
        files.replace(file.parent, {file.name: json.dumps(list(endpoints)[:MOST], indent=2).encode() + b"\n"})


def usable(endpoints: Iterable[object]) -> tuple[str, ...]:
    """Those that can lead to nodes of a closed network; other nodes say them."""
    found = []
    for endpoint in list(endpoints)[: 4 * MOST]:
        try:
            if isinstance(endpoint, str) and endpoint not in found:
                check_connect((endpoint,))
                found.append(endpoint)
        except ConfigError:
            continue
    return tuple(found[:MOST])
