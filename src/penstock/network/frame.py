"""The frame around every message: its kind, the length of its two parts, and a checksum.

magic  version  kind  header length  tensor length  SHA-256 of everything else  |  header  |  tensor
4      1        1     4              4              32

Where the router seals messages, the checksum leaves the tensor out: the seal notices damage, and a second look at many megabytes
takes longer than sealing them.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from penstock.errors import DamagedMessage, MalformedMessage, WrongVersion
from penstock.network.router import MAX_MESSAGE_BYTES, Bytes

PROTOCOL = 5
MAX_HEADER_BYTES = 1 << 24
JOINED_BYTES = 1 << 12  # tensors up to this size are copied to be hashed
COPIED_AT_ONCE = 1 << 20  # bytes; other threads may run between two copies

MAGIC = b"PNSK"
_START = struct.Struct("<4sBBII")
_DIGEST_BYTES = 32
OVERHEAD = _START.size + _DIGEST_BYTES


class Frame(NamedTuple):
    """An unpacked frame; both parts are views of the received bytes. `intact` is whether the checksum matches."""

    kind: int
    header: memoryview
    tensor: memoryview
    intact: bool


def pack(kind: int, header: bytes, tensor: Bytes = b"", *, sealed: bool = False) -> Bytes:
    """Build a frame. sealed: the router will seal the message."""
    size = memoryview(tensor).nbytes
    if len(header) > MAX_HEADER_BYTES or OVERHEAD + len(header) + size > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            f"A message with {len(header)} bytes of header and {size} bytes of hidden states is too large to send.",
            hint="Use a smaller prefill_chunk_size.",
        )
    start = _START.pack(MAGIC, PROTOCOL, kind, len(header), size)
    digest = _digest(start, header, b"" if sealed else tensor)
    if size <= COPIED_AT_ONCE:
        return b"".join((start, digest, header, tensor))
    packed, view = bytearray().join((start, digest, header)), memoryview(tensor).cast("B")
    for at in range(0, size, COPIED_AT_ONCE):
        packed += view[at : at + COPIED_AT_ONCE]
    return packed


def unpack(data: Bytes, *, sealed: bool = False) -> Frame:
    """Check all that can be checked without knowing the message. sealed: the router has found its seal intact.

    Does not raise for a wrong checksum: the caller may still find out whose message it was.
    """
    view = memoryview(data)
    if not OVERHEAD <= view.nbytes <= MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"A message of {view.nbytes} bytes is not between {OVERHEAD} and {MAX_MESSAGE_BYTES} bytes long.")
    magic, version, kind, header_size, tensor_size = _START.unpack_from(view)
    if magic != MAGIC:
        raise MalformedMessage("This is not a Penstock message.")
    if version != PROTOCOL:
        raise WrongVersion(
            f"The message has protocol version {version}; this node speaks version {PROTOCOL}.",
            hint="Run the same version of Penstock on all nodes.",
        )
    if header_size > MAX_HEADER_BYTES or OVERHEAD + header_size + tensor_size != view.nbytes:
        raise MalformedMessage(
            f"A message of {view.nbytes} bytes claims {header_size} bytes of header and {tensor_size} bytes of hidden states."
        )
    header, tensor = view[OVERHEAD : OVERHEAD + header_size], view[OVERHEAD + header_size :]
    intact = view[_START.size : OVERHEAD] == _digest(view[: _START.size], header, b"" if sealed else tensor)
    return Frame(kind, header, tensor, intact)


def damaged(frame: Frame) -> DamagedMessage:
    return DamagedMessage(f"A message of {OVERHEAD + len(frame.header) + len(frame.tensor)} bytes was damaged in transit.")


def _digest(start: Bytes, header: Bytes, tensor: Bytes) -> bytes:
    if len(tensor) <= JOINED_BYTES:  # one call takes less time than three
        return hashlib.sha256(b"".join((start, header, tensor))).digest()
    hasher = hashlib.sha256(start)
    hasher.update(header)
    hasher.update(tensor)
    return hasher.digest()
