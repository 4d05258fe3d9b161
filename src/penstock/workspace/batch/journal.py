"""Journal: what is known of a batch, one line for each fact. It only grows; each line has a checksum, so a torn one is found.

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

from penstock.workspace.store.disk import Disk, put_file
from penstock.workspace.store.files import open_file

JOURNAL, REWRITTEN = "results.jsonl", "results.new"
CHECKSUM_DIGITS = 8  # hexadecimal digits


class Entry(NamedTuple):
    """A fact, and where its line lies."""

    start: int
    end: int
    fact: Mapping[str, Any]


def read_entries(folder: int, start: int = 0) -> Iterator[Entry]:
    """The facts from there on, up to the first line that is not whole: it is being written, or a crash has torn it."""
    with _reading(folder) as stream:
        stream.seek(start)
        for line, fact in _whole(stream):
            yield Entry(start, start := start + len(line), fact)


def read_entry(file: int, start: int, end: int) -> Mapping[str, Any]:
    fact = _fact(os.pread(file, end - start, start))
    assert fact is not None, "it was whole before"
    return fact


class Journal:
    """Writes it. Only whoever holds the lock of the batch's folder may. After an error the same call can be made again."""

    def __init__(self, disk: Disk, folder: int) -> None:
        self._disk, self._folder, self._length = disk, folder, 0

    def open(self, learn: Callable[[Entry], None]) -> None:
        """Tell what is known so far. When this returns, that survives a power cut: it was written anew, without a torn tail.
        Whoever wrote what can be read may have died before the sync, or seen it fail: then no later sync of that file helps."""
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
        """When this returns, they survive a power cut."""
        entries, lines, end = [], [], self._length
        for fact in facts:
            line = _line(fact)
            entries.append(Entry(end, end := end + len(line), fact))
            lines.append(line)
        if lines:
            self._grow(b"".join(lines))
            self._length = end  # only now: what fails is done again whole, over what it left
        return entries

    def _grow(self, data: bytes) -> None:
        file = self._disk.append_to(JOURNAL, self._folder)
        try:
            if os.fstat(file).st_size != self._length:
                self._disk.cut(file, self._length)
            self._disk.write(file, data)
            self._disk.sync(file)
        finally:
            os.close(file)


@contextmanager
def _reading(folder: int) -> Iterator[BinaryIO]:
    file = open_file(folder, JOURNAL)
    with BytesIO() if file is None else open(file, "rb") as stream:
        yield stream


def _whole(stream: BinaryIO) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """Lines, each with what it says, up to the first that is not whole."""
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
    found = json.loads(text)
    return found if isinstance(found, dict) else None
