"""JobApi: the operations of an API that can run as jobs of a workspace or as lines of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.http.fields import Fields


@dataclass(frozen=True, slots=True)
class JobEndpoint:
    request: type[Fields]
    exchange: Callable[[Any, Context], Exchange]


@dataclass(frozen=True, slots=True)
class JobApi:
    """endpoints: by path. refusal: makes the status and body of an error from its record in usage.json."""

    endpoints: Mapping[str, JobEndpoint]
    refusal: Callable[[Mapping[str, str]], tuple[int, Any]]
