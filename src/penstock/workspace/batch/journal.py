"""Journal: the append-only log of a batch, one fact on each line. Each line has a checksum, so that a torn one is found.

1a2b3c4d {"n": 0, "custom_id": "a", "job": "1736700000_12345_0", "body": {...}}
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

from penstock.workspace.store.disk import Disk, grow_file, put_file
from penstock.workspace.store.disk_usage import BATCH_JOURNAL
from penstock.workspace.store.files import open_file

JOURNAL, REWRITTEN = BATCH_JOURNAL, "results.new"
CHECKSUM_DIGITS = 8  # hexadecimal


class Entry(NamedTuple):
    """A fact, and the byte range of its line."""

    start: int
    end: int
    fact: Mapping[str, Any]


def read_entries(folder: int, start: int = 0) -> Iterator[Entry]:
    """Yield the facts from byte `start` on, up to the first torn line, which may be one that is being written."""
    with _reading(folder) as stream:
        stream.seek(start)
        for line, fact in _whole(stream):
            yield Entry(start, start := start + len(line), fact)


def read_entry(file: int, start: int, end: int) -> Mapping[str, Any]:
    fact = _fact(os.pread(file, end - start, start))
    assert fact is not None, "it was whole before"
    return fact


def entry_bytes(fact: Mapping[str, Any]) -> int:
    """What a fact takes in the journal."""
    return len(_line(fact))


class Journal:
    """Writes the journal; needs the lock of the batch's folder. A failed call can be repeated."""

    def __init__(self, disk: Disk, folder: int) -> None:
        self._disk = disk
        self._folder = folder
        self._length = 0

    def open(self, learn: Callable[[Entry], None]) -> None:
        """Call `learn` with every fact so far, and rewrite the file without a torn tail; it survives a power cut then.

        Syncing the old file would not do: its writer may have seen a sync fail, after which later syncs do not help."""
        self._length = 0
        with _reading(self._folder) as stream:
            put_file(self._disk, self._folder, REWRITTEN, self._replay(stream, learn))
        self._disk.replace(REWRITTEN, JOURNAL, self._folder)
        self._disk.sync(self._folder)

    def _replay(self, stream: BinaryIO, learn: Callable[[Entry], None]) -> Iterator[bytes]:
        for line, fact in _whole(stream):
            start, self._length = self._length, self._length + len(line)
            learn(Entry(start, self._length, fact))
            yield line

    def append(self, facts: Iterable[Mapping[str, Any]]) -> list[Entry]:
        """Add facts; they survive a power cut when this returns."""
        entries, lines, end = [], [], self._length
        for fact in facts:
            line = _line(fact)
            entries.append(Entry(end, end := end + len(line), fact))
            lines.append(line)
        if lines:
            grow_file(self._disk, self._folder, JOURNAL, self._length, b"".join(lines), sync=True)
            self._length = end  # only now: a call that fails is repeated whole, over what it left
        return entries


@contextmanager
def _reading(folder: int) -> Iterator[BinaryIO]:
    file = open_file(folder, JOURNAL)
    with BytesIO() if file is None else open(file, "rb") as stream:
        yield stream


def _whole(stream: BinaryIO) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """Yield each line with its fact, up to the first that is torn."""
    for line in stream:
        fact = _fact(line)
        if fact is None:
            return
        yield line, fact


def _line(fact: Mapping[str, Any]) -> bytes:
    text = json.dumps(fact, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _fact(line: bytes) -> dict[str, Any] | None:
    text = line[CHECKSUM_DIGITS + 1 : -1]
    if not line.endswith(b"\n") or line[: CHECKSUM_DIGITS + 1] != b"%08x " % zlib.crc32(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # made by hand
        return None
    return found if isinstance(found, dict) else None
