"""Finding: what a check of `penstock doctor` has seen, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckResult(StrEnum):
    GOOD = "good"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    verdict: CheckResult
    seen: str
    advice: str = ""
