"""UsageLog: counts what each key uses of this server, and writes it to disk every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.config.key_usage import OPERATOR, KeyStorage, KeyUse, ServerUsage, UsageCounts, UsageFile, today
from penstock.doors.access.meter import UsedTokens
from penstock.errors import PenstockError

logger = logging.getLogger("penstock.keys")

WRITE_INTERVAL_S = 5.0  # the most that a crash can lose

NO_TOKENS = UsedTokens()
StorageByOwner = Callable[[], Mapping[str | None, KeyStorage]]


class UsageLog:
    """Safe in any thread. Writes between `start` and `stop`; without a folder of keys, counts in memory only.

    storage_by_owner: what each owner has in the workspace.
    workspace: its path.
    """

    def __init__(self, keys: Path | None = None) -> None:
        self._keys = keys
        self._file: UsageFile | None = None
        self._lock = threading.Lock()  # for the counts
        self._writing = threading.Lock()  # for the file
        self._new: dict[tuple[str, str], list[int]] = {}  # by key and day: requests, tokens of prompts and of answers
        self._used: dict[str, KeyUse] = {}  # without the counts in `_new`
        self._written: ServerUsage | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False
        self.storage_by_owner: StorageByOwner = dict
        self.workspace: str | None = None

    def count(self, owner: str | None, tokens: UsedTokens = NO_TOKENS, *, requests: int = 0) -> None:
        """Add to the counts. Called for each token, so it is cheap; `write` does the rest."""
        key = (owner or OPERATOR, today())
        with self._lock:
            counts = self._new.setdefault(key, [0, 0, 0])
            counts[0] += requests
            counts[1] += tokens.prompt
            counts[2] += tokens.generated

    def start(self) -> None:
        if self._keys is not None:
            self._thread = threading.Thread(target=self._run, name="penstock-usage", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write what was counted, and stop."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self.write()
        if self._file is not None:
            self._file.close()

    def write(self) -> None:
        """Write what has changed. An error is logged, and the next call tries again."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        if self._keys is None or not self._keys.is_dir():
            return  # there are no keys
        try:
            held = {owner or OPERATOR: one for owner, one in self.storage_by_owner().items()}
            self._add_new()
            if self._file is None and (self._used or held):
                self._file = UsageFile(self._keys)
                self._continue(self._file.before)
            with self._lock:
                usage = ServerUsage(0.0, self.workspace, dict(self._used), held)
            if self._file is not None and usage != self._written:
                self._file.write(replace(usage, written=time.time()))
                self._written = usage
            self._failed = False
        except (PenstockError, OSError) as error:
            if not self._failed:
                logger.warning("key usage cannot be written: %s", error)
            self._failed = True

    def _add_new(self) -> None:
        with self._lock:
            for (key, day), counts in self._new.items():
                self._used[key] = self._used.get(key, KeyUse()).plus(UsageCounts(*counts), day)
            self._new.clear()

    def _continue(self, before: ServerUsage) -> None:
        """Add what an earlier server has written."""
        with self._lock:
            for owner, used in before.used.items():
                now = self._used.get(owner)
                merged = used if now is None else KeyUse(used.total + now.total, now.day, used.on(now.day) + now.today)
                self._used[owner] = merged

    def _run(self) -> None:
        while not self._stopping.wait(WRITE_INTERVAL_S):
            self.write()
