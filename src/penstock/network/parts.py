"""Parts: the pieces in which messages travel, and the Assembler, which puts them together again."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import MalformedMessage
from penstock.network.router import MAX_MESSAGE_BYTES
from penstock.network.stream import Stream

PART_BYTES = 120_000  # fits into two of Zenoh's batches, and passes a link of 1 Mbit/s in a second
MAX_UNFINISHED_BYTES = 4 * MAX_MESSAGE_BYTES  # of all senders together
_HEADER = struct.Struct(">BQII")  # wants_receipt, message, offset, total


class Part(NamedTuple):
    """Some bytes of a message. The parts of a message have its number and are sent in order."""

    wants_receipt: bool
    message: int
    offset: int
    total: int  # bytes of the whole message
    data: bytes | memoryview

    def pack(self) -> bytes:
        return b"".join((_HEADER.pack(self.wants_receipt, self.message, self.offset, self.total), self.data))


def offsets(total: int) -> Iterator[int]:
    """Yield where the parts of a message of so many bytes begin. An empty one has a part, too."""
    yield from range(0, max(total, 1), PART_BYTES)


def read_part(data: bytes) -> Part:
    """Raises MalformedMessage. Only the last part may be short: many tiny ones would take more memory than they count."""
    if len(data) < _HEADER.size:
        raise MalformedMessage(f"A part of a message has {len(data)} bytes; its header alone has {_HEADER.size}.")
    wants_receipt, message, offset, total = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]  # bytes, of which many are joined without holding up other threads
    whole = not offset % PART_BYTES and len(body) == min(PART_BYTES, total - offset)
    if total > MAX_MESSAGE_BYTES or not whole or (not body and total):
        raise MalformedMessage(f"A part has {len(body)} bytes from {offset} on, of a message of {total} bytes.")
    return Part(bool(wants_receipt), message, offset, total, body)


class Source(NamedTuple):
    """Where parts come from: those of one source arrive in order, or not at all."""

    node: str
    epoch: int
    stream: Stream


@dataclass(slots=True)
class _Unfinished:
    message: int
    total: int
    pieces: list[bytes | memoryview] = field(default_factory=list)
    size: int = 0


class Assembler:
    """Puts parts together. A message of which a part is missing is dropped.

    When too much is unfinished, the node that has the most of it loses its least recently extended message: a flood from one
    node drops nothing of others.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = MAX_UNFINISHED_BYTES if max_bytes is None else max_bytes
        self._unfinished: dict[Source, _Unfinished] = {}  # least recently extended first
        self._sizes: Counter[str] = Counter()  # bytes of unfinished messages, by node
        self.size = 0  # ... of all together

    def add(self, source: Source, part: Part) -> bytes | None:
        """Take a part. Returns the message that is complete with it."""
        found = self._take(source)
        if part.offset == 0:
            found = _Unfinished(part.message, part.total)
        if found is None or (found.message, found.total, found.size) != (part.message, part.total, part.offset):
            return None  # one before it was lost
        found.pieces.append(part.data)
        found.size += len(part.data)
        if found.size == found.total:
            return b"".join(found.pieces)
        self._unfinished[source] = found
        self.size += found.size
        self._sizes[source.node] += found.size
        while self.size > self._max_bytes:
            ((most, _),) = self._sizes.most_common(1)
            self._take(next(source for source in self._unfinished if source.node == most))
        return None

    def forget(self, node: str, epoch: int) -> None:
        for stream in Stream:
            self._take(Source(node, epoch, stream))

    def clear(self) -> None:
        self._unfinished.clear()
        self._sizes.clear()
        self.size = 0

    def _take(self, source: Source) -> _Unfinished | None:
        found = self._unfinished.pop(source, None)
        if found is not None:
            self.size -= found.size
            self._sizes[source.node] -= found.size
            if not self._sizes[source.node]:
                del self._sizes[source.node]
        return found
