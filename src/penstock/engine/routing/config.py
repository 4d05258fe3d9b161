"""RoutingConfig: what stays the same for all routes of one engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    width: int = 1  # of a hidden state
    epoch: int = 0  # of this node: grows with each start
    lease: float = 10.0  # seconds of silence after which other nodes may forget our routes
    recovery_timeout: float = 60.0  # seconds without a working route after which waiting jobs fail
    route_numbers: Iterator[int] = field(default_factory=itertools.count)  # shared by all engines of a node
