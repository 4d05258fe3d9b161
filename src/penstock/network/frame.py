"""The frame around every message: what it is, how long its two parts are, and a checksum over all of it.

magic  version  kind  header length  tensor length  SHA-256 of everything else  |  header  |  tensor
4      1        1     4              4              32
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from penstock.errors import DamagedMessage, MalformedMessage, WrongVersion

PROTOCOL = 2
MAX_MESSAGE = 1 << 28  # bytes in all; a chunk of 2048 tokens, 16384 numbers wide, in float32 is half of it
MAX_HEADER = 1 << 24

MAGIC = b"PNSK"
_START = struct.Struct("<4sBBII")
_DIGEST = 32
OVERHEAD = _START.size + _DIGEST

Bytes = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """What was in a frame; both parts are views of the bytes that came. `sound` is whether the checksum fits."""

    kind: int
    header: memoryview
    tensor: memoryview
    sound: bool


def pack(kind: int, header: bytes, tensor: Bytes = b"") -> bytes:
    size = memoryview(tensor).nbytes
    if len(header) > MAX_HEADER or OVERHEAD + len(header) + size > MAX_MESSAGE:
        raise MalformedMessage(
            f"A message with {len(header)} bytes of header and {size} of hidden states is larger than nodes accept.",
            hint="Use a smaller prefill_chunk_size.",
        )
    start = _START.pack(MAGIC, PROTOCOL, kind, len(header), size)
    return b"".join((start, _digest(start, header, tensor), header, tensor))


def unpack(data: Bytes) -> Frame:
    """Check all that can be checked without knowing the message. A wrong checksum is left to the caller, who can perhaps still
    tell whose message it was."""
    view = memoryview(data)
    if not OVERHEAD <= view.nbytes <= MAX_MESSAGE:
        raise MalformedMessage(f"A message cannot have {view.nbytes} bytes: from {OVERHEAD} to {MAX_MESSAGE} are possible.")
    magic, version, kind, header_size, tensor_size = _START.unpack_from(view)
    if magic != MAGIC:
        raise MalformedMessage("What came is no message of Penstock.")
    if version != PROTOCOL:
        raise WrongVersion(
            f"A message of protocol version {version} came; this node speaks version {PROTOCOL}.",
            hint="Run the same version of Penstock on all nodes.",
        )
    if header_size > MAX_HEADER or OVERHEAD + header_size + tensor_size != view.nbytes:
        raise MalformedMessage(
            f"A message of {view.nbytes} bytes says that it has {header_size} of header and {tensor_size} of hidden states."
        )
    header, tensor = view[OVERHEAD : OVERHEAD + header_size], view[OVERHEAD + header_size :]
    sound = view[_START.size : OVERHEAD] == _digest(view[: _START.size], header, tensor)
    return Frame(kind, header, tensor, sound)


def damaged(frame: Frame) -> DamagedMessage:
    return DamagedMessage(f"A message of {OVERHEAD + len(frame.header) + len(frame.tensor)} bytes was damaged on its way.")


def _digest(start: Bytes, header: Bytes, tensor: Bytes) -> bytes:
    hasher = hashlib.sha256(start)
    hasher.update(header)
    hasher.update(tensor)
    return hasher.digest()
