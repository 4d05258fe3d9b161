"""DiskUsage: how much each owner has stored in files, batches, responses and jobs, and whether more fits its limits.

Sizes are read from the disk once. From then on this process counts its own changes, and compares names with the disk before it
refuses anything: other processes may have removed something, and only what is new to it must be read.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import BadJob, KeyLimit, StorageLimit
from penstock.units import format_bytes
from penstock.workspace.store.files import MAX_RECORD_BYTES, Place, footprint, read_file, sizes_in
from penstock.workspace.store.kept_jobs import KeptJobs

if TYPE_CHECKING:
    from penstock.workspace.store.places import Places

REFRESH_INTERVAL_S = 1.0  # between two reads of the disk before a refusal
TOTALS_INTERVAL_S = 60.0
RETRY_AFTER_S = 10  # when the batch limit is reached; it is unknown when one will end
UPLOAD_RECORD, RESPONSE_OWNER, BATCH_REQUEST = "file.json", "owner.json", "batch.json"
OWNER_FILES = {Place.FILES: UPLOAD_RECORD, Place.RESPONSES: RESPONSE_OWNER, Place.BATCHES: BATCH_REQUEST}
BATCH_JOURNAL, BATCH_END = "results.jsonl", "end.json"


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """What an owner may have: bytes, and batches that have not ended. None is no limit."""

    bytes: int | None = None
    batches: int | None = None


UNLIMITED = StorageLimits()


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A file, response or batch. open: a batch that has not ended."""

    owner: str | None
    bytes: int
    open: bool = False


class Stored(NamedTuple):
    """What an owner has: bytes, and batches that have not ended."""

    bytes: int
    batches: int


class _KeptBytes(NamedTuple):
    bytes: int
    read_at: float  # on the monotonic clock


class Reservation:
    """Room that is held until `close`, or the end of the block."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


class DiskUsage:
    """Safe in any thread. May read from the disk, so it is not for the event loop.

    limits_of: the limits of an owner.
    """

    def __init__(self, places: Places) -> None:
        self.limits_of: Callable[[str | None], StorageLimits] = lambda owner: UNLIMITED
        self._places = places
        self._lock = threading.RLock()
        self._opened = 0  # which opening of the workspace was read; 0 for none yet
        self._refreshed = -math.inf
        self._items: dict[Place, dict[str, StoredItem]] = {place: {} for place in OWNER_FILES}
        self._used = Counter[str | None]()
        self._open = Counter[str | None]()
        self._reserved = Counter[str | None]()
        self._opening = Counter[str | None]()
        self._kept_jobs = KeptJobs(places)
        self._kept: dict[str, _KeptBytes] = {}  # of owners that were looked at

    # ---- before something is stored ----

    def reserve(self, owner: str | None, size: int, *, batches: int = 0) -> Reservation:
        """Hold room for `size` bytes and some batches until they are stored: a Reservation, to use in a `with` block. Raises
        StorageLimit or KeyLimit if they do not fit."""
        limits = self.limits_of(owner)
        if limits == UNLIMITED:
            return Reservation(lambda: None)
        with self._lock:
            self._load()
            refusal = self._refusal(owner, limits, size, batches)
            if refusal is not None:
                self._refresh(REFRESH_INTERVAL_S)
                refusal = self._refusal(owner, limits, size, batches)
            if refusal is not None:
                raise refusal
            self._hold(owner, size, batches)
        return Reservation(lambda: self._hold(owner, -size, -batches))

    def room(self, owner: str | None) -> int | None:
        """Bytes that an owner may still store, negative if it has too much; None for any number."""
        limit = self.limits_of(owner).bytes
        if limit is None:
            return None
        with self._lock:
            self._load()
            if limit <= self._taken(owner):
                self._refresh(REFRESH_INTERVAL_S)
            return limit - self._taken(owner)

    # ---- what was stored ----

    def record(self, place: Place, name: str, item: StoredItem) -> None:
        """Count what was stored."""
        with self._lock:
            if self._opened:
                self._set(place, name, item)

    def reread(self, place: Place, name: str, *, more: int = 0) -> None:
        """Count again what has changed on the disk, and `more` bytes that belong to it."""
        with self._lock:
            found = self._read(place, name) if self._opened else None
            if found is not None:
                self._set(place, name, replace(found, bytes=found.bytes + more))

    def recount_jobs(self, owner: str) -> None:
        """Count again the jobs that an owner has run again."""
        with self._lock:
            self._kept.pop(owner, None)

    def forget(self, place: Place, names: Iterable[str]) -> None:
        """Stop counting what was removed."""
        with self._lock:
            for name in names:
                self._drop(place, name)

    def names(self, place: Place, owner: str | None) -> list[str]:
        """Names of an owner's items at a place; of all items while nothing has been counted. Changes by other processes in the
        last second may be missing."""
        with self._lock:
            if not self._opened:
                return self._places.names(place)
            self._load()
            self._refresh(REFRESH_INTERVAL_S)
            return [name for name, item in self._items[place].items() if item.owner == owner]

    def totals(self) -> Mapping[str | None, Stored]:
        """What each owner has; what other processes have changed in the last minute may be missing."""
        with self._lock:
            self._load()
            self._refresh(TOTALS_INTERVAL_S)
            owners = {owner for counts in (self._used, self._open) for owner, count in counts.items() if count}
            owners.update(owner for owner, kept in self._kept.items() if kept.bytes)
            return {owner: Stored(self._used[owner] + self._kept_bytes(owner), self._open[owner]) for owner in owners}

    # ---- inside ----

    def _hold(self, owner: str | None, size: int, batches: int) -> None:
        with self._lock:
            self._reserved[owner] += size
            self._opening[owner] += batches

    def _refusal(self, owner: str | None, limits: StorageLimits, size: int, batches: int) -> StorageLimit | KeyLimit | None:
        count = self._open[owner] + self._opening[owner]
        if limits.batches is not None and batches and count + batches > limits.batches:
            return KeyLimit(
                f"This key may have {limits.batches} open batch{'es' if limits.batches > 1 else ''}, and has {count}.",
                retry_after=RETRY_AFTER_S,
                hint="Wait until one has ended, or cancel one.",
            )
        used = self._taken(owner)
        if limits.bytes is None or used + size <= limits.bytes:
            return None
        allowed, taken, needed = map(format_bytes, (limits.bytes, used, size))
        return StorageLimit(
            f"This key may store {allowed}: {taken} are used, and this needs {needed}.",
            hint="Delete files (DELETE /v1/files/ID), stored responses (/v1/responses/ID) or batches that have ended "
            "(/v1/batches/ID); or ask the operator for more (penstock keys edit NAME --disk SIZE).",
        )

    def _taken(self, owner: str | None) -> int:
        return self._used[owner] + self._reserved[owner] + self._kept_bytes(owner)

    def _kept_bytes(self, owner: str | None) -> int:
        """Bytes of the jobs that an owner has run again. They grow while they run, so they are read once a second."""
        if owner is None:
            return 0
        known = self._kept.get(owner)
        if known is None or time.monotonic() > known.read_at + REFRESH_INTERVAL_S:
            known = self._kept[owner] = _KeptBytes(self._kept_jobs.bytes(owner), time.monotonic())
        return known.bytes

    def _load(self) -> None:
        """Read everything, unless that was done since the workspace was opened."""
        if self._opened != self._places.opened:
            opened = self._places.opened
            self._items = {place: {} for place in OWNER_FILES}
            self._used.clear()
            self._open.clear()
            self._kept.clear()
            self._refreshed = -math.inf
            self._refresh(REFRESH_INTERVAL_S)
            self._opened = opened

    def _refresh(self, interval: float) -> None:
        """Count what other processes have added or removed, unless we looked less than `interval` seconds ago."""
        if time.monotonic() < self._refreshed + interval:
            return
        for place, known in self._items.items():
            names = set(self._places.names(place))
            for name in known.keys() - names:
                self._drop(place, name)
            for name in names:
                before = known.get(name)
                if before is not None and not before.open:
                    continue  # it never changes
                found = self._read(place, name)
                if found is not None and before is not None and found.open:
                    found = replace(found, bytes=max(found.bytes, before.bytes))  # a BatchRun counts its jobs as well
                if found is not None:
                    self._set(place, name, found)
        self._refreshed = time.monotonic()

    def _set(self, place: Place, name: str, item: StoredItem) -> None:
        self._drop(place, name)
        self._items[place][name] = item
        self._used[item.owner] += item.bytes
        self._open[item.owner] += item.open

    def _drop(self, place: Place, name: str) -> None:
        item = self._items.get(place, {}).pop(name, None)
        if item is not None:
            self._used[item.owner] -= item.bytes
            self._open[item.owner] -= item.open

    def _read(self, place: Place, name: str) -> StoredItem | None:
        with self._places.reading_folder(name, place) as folder:
            if folder is None:
                return None  # it was removed meanwhile
            sizes = sizes_in(folder)
            is_open = place is Place.BATCHES and BATCH_END not in sizes
            answers = [sizes[BATCH_JOURNAL]] if is_open and BATCH_JOURNAL in sizes else []  # will be written to the output too
            return StoredItem(_owner(folder, place), footprint(*sizes.values(), *answers), is_open)


def _owner(folder: int, place: Place) -> str | None:
    """Whose a folder is; None, the operator, for one that is damaged."""
    try:
        found = json.loads(read_file(folder, OWNER_FILES[place], MAX_RECORD_BYTES) or b"null")
    except (ValueError, RecursionError, BadJob):
        return None
    owner = found.get("owner") if isinstance(found, dict) else found
    return owner if isinstance(owner, str) else None
