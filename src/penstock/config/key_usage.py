"""The records of what each key has used: beside the keys, one file for each server that has them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.config import files
from penstock.errors import ConfigError

FOLDER = ".usage"  # in the folder of keys, which is not read again when this changes
SUFFIX, LOCK_SUFFIX = ".json", ".lock"
MAX_SERVERS = 1000
OPERATOR = ""  # stands for the owner None in records


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Requests, and tokens of their prompts and answers."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What one key has used: in all, and on `day` (UTC)."""

    total: UsageCounts = UsageCounts()
    day: str = ""
    today: UsageCounts = UsageCounts()

    def plus(self, counts: UsageCounts, day: str) -> KeyUse:
        today = self.today if day == self.day else UsageCounts()
        return KeyUse(self.total + counts, day, today + counts)

    def on(self, day: str) -> UsageCounts:
        return self.today if day == self.day else UsageCounts()


@dataclass(frozen=True, slots=True)
class KeyStorage:
    """What a key has in a workspace: bytes on the disk, and batches that have not ended."""

    disk: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """What the keys have used on one server, by owner (see `Caller.owner`).

    written: Unix time. workspace: the path of the one that `held` describes; servers can share one.
    """

    written: float = 0.0
    workspace: str | None = None
    used: Mapping[str, KeyUse] = field(default_factory=dict)
    held: Mapping[str, KeyStorage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What one key has used on all servers."""

    total: UsageCounts = UsageCounts()
    today: UsageCounts = UsageCounts()
    held: KeyStorage = KeyStorage()


def today() -> str:
    return _day(int(time.time() // 86_400))


@lru_cache(maxsize=2)
def _day(number: int) -> str:
    return f"{datetime.fromtimestamp(86_400 * number, UTC):%Y-%m-%d}"


class UsageFile:
    """The record of one server, locked until it ends, so that no other running server uses the file."""

    def __init__(self, keys: Path) -> None:
        """keys: the folder of keys. Raises ConfigError if it cannot be written."""
        self._folder = keys / FOLDER
        files.ensure_folder(self._folder)
        self._lock, number = self._take()
        self._name = f"{number}{SUFFIX}"
        self.before = _read(self._folder / self._name) or ServerUsage()

    def _take(self) -> tuple[int, int]:
        """Lock the first record that no running server has, and return the lock and the number."""
        for number in range(MAX_SERVERS):
            lock = _lock(self._folder / f"{number}{LOCK_SUFFIX}")
            if lock is not None:
                return lock, number
        raise ConfigError(f"{self._folder} is in use by {MAX_SERVERS} running servers, the limit.")

    def write(self, usage: ServerUsage) -> None:
        files.replace(self._folder, {self._name: json.dumps(asdict(usage), indent=1).encode() + b"\n"})

    def close(self) -> None:
        os.close(self._lock)


def read_usage(keys: Path) -> dict[str, KeyUsage]:
    """What each owner has used on all servers with this folder of keys. Files that cannot be read are left out."""
    found = [usage for file in sorted((keys / FOLDER).glob(f"*{SUFFIX}")) if (usage := _read(file)) is not None]
    day, all_used = today(), dict[str, KeyUsage]()
    latest = {usage.workspace: usage for usage in sorted(found, key=lambda usage: usage.written)}
    for usage in found:
        for owner, used in usage.used.items():
            before = all_used.get(owner, KeyUsage())
            all_used[owner] = replace(before, total=before.total + used.total, today=before.today + used.on(day))
    for usage in latest.values():
        for owner, held in usage.held.items():
            before = all_used.get(owner, KeyUsage())
            sums = KeyStorage(before.held.disk + held.disk, before.held.batches + held.batches)
            all_used[owner] = replace(before, held=sums)
    return all_used


def _lock(path: Path) -> int | None:
    """Lock a file until the descriptor is closed; None if another process holds the lock."""
    with files.wrap_os_errors(path, "opened"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, files.PRIVATE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
    return descriptor


def _read(file: Path) -> ServerUsage | None:
    try:
        found = json.loads(file.read_bytes())
        return ServerUsage(
            written=float(found["written"]),
            workspace=found["workspace"],
            used={owner: _used(one) for owner, one in found["used"].items()},
            held={owner: KeyStorage(**one) for owner, one in found["held"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _used(found: dict[str, Any]) -> KeyUse:
    return KeyUse(UsageCounts(**found["total"]), str(found["day"]), UsageCounts(**found["today"]))
