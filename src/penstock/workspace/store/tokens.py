"""tokens.bin: the tokens that a job has generated, so that another server can continue it.

    header   magic, version, seed, fingerprint, checksum        the fingerprint identifies the request and the model
    record   token id, checksum                                 8 bytes for each token; only ever appended

Each checksum covers everything before it, so a tail that a crash has torn, or that an older run has left, is found and cut off.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import BadJob
from penstock.workspace.store.disk import Disk, clear, grow_file, touch
from penstock.workspace.store.files import PARTIAL, TOKENS, read_file

MAGIC, VERSION = b"PSTK", 1
FINGERPRINT_BYTES = 16
MAX_FILE_BYTES = 64 << 20  # eight million tokens

_HEADER = struct.Struct(f"<4sIQ{FINGERPRINT_BYTES}sI")
_TOKEN, _RECORD = struct.Struct("<I"), struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """What an earlier run of a job left: with the same seed and fingerprint, the tokens can be continued."""

    seed: int
    fingerprint: bytes
    tokens: tuple[int, ...] = ()


class _Parsed(NamedTuple):
    saved: SavedTokens
    length: int  # of the part that is whole, in bytes
    checksum: int


def read_tokens(folder: int) -> SavedTokens | None:
    """Read the tokens up to the first torn record; None if not even the header is whole."""
    parsed = _parse(folder)
    return None if parsed is None else parsed.saved


def count_saved_tokens(folder: int) -> dict[str, int]:
    """Return `{"completion_tokens": n}` by the size of the file; empty if there is none."""
    try:
        size = os.stat(TOKENS, dir_fd=folder, follow_symlinks=False).st_size
    except OSError:
        return {}
    return {"completion_tokens": max(0, size - _HEADER.size) // _RECORD.size}


class Transcript:
    """Writes tokens.bin and partial.txt of one run. A failed call can be repeated with the same tokens and more.

    Syncing is optional: what a power cut takes is generated again. No file is kept open between calls.

    text_length: bytes of partial.txt."""

    def __init__(self, disk: Disk, folder: int, saved: SavedTokens) -> None:
        """Continue a file that holds exactly the tokens of `saved`; otherwise begin a new one with them."""
        self._disk = disk
        self._folder = folder
        self._saved = saved
        self._length = 0
        self._checksum = 0
        self.text_length = 0
        self._begun = False
        self._text_begun = False

    def append(self, tokens: Sequence[int], text: bytes, *, sync: bool = False) -> None:
        """Append the tokens and the text since the last call that succeeded. With `sync`, all tokens survive a power cut."""
        if not self._begun:
            self._begin()
        data, checksum = _records(tokens, self._checksum)
        if data or sync:
            grow_file(self._disk, self._folder, TOKENS, self._length, data, sync=sync)
        if not self._text_begun:
            clear(self._disk, self._folder, PARTIAL)
            touch(self._disk, self._folder, PARTIAL)
            self._text_begun = True
        if text:
            grow_file(self._disk, self._folder, PARTIAL, self.text_length, text)
        # only now: a call that fails is repeated whole, over what it left
        self._length += len(data)
        self._checksum = checksum
        self.text_length += len(text)

    def _begin(self) -> None:
        parsed = _parse(self._folder)
        if parsed is not None and parsed.saved == self._saved:
            self._length, self._checksum = parsed.length, parsed.checksum
            grow_file(self._disk, self._folder, TOKENS, self._length, b"")
        else:
            header = _HEADER.pack(MAGIC, VERSION, self._saved.seed, self._saved.fingerprint, 0)[: -_TOKEN.size]
            checksum = zlib.crc32(header)
            data, self._checksum = _records(self._saved.tokens, checksum)
            whole = header + _TOKEN.pack(checksum) + data
            clear(self._disk, self._folder, TOKENS)
            touch(self._disk, self._folder, TOKENS)
            grow_file(self._disk, self._folder, TOKENS, 0, whole)
            self._length = len(whole)
        self._begun = True


def _records(tokens: Sequence[int], checksum: int) -> tuple[bytes, int]:
    parts = []
    for token in tokens:
        checksum = zlib.crc32(_TOKEN.pack(token), checksum)
        parts.append(_RECORD.pack(token, checksum))
    return b"".join(parts), checksum


def _parse(folder: int) -> _Parsed | None:
    try:
        data = read_file(folder, TOKENS, MAX_FILE_BYTES) or b""
    except BadJob:
        return None
    if len(data) < _HEADER.size:
        return None
    magic, version, seed, fingerprint, checksum = _HEADER.unpack_from(data)
    if (magic, version) != (MAGIC, VERSION) or checksum != zlib.crc32(data[: _HEADER.size - _TOKEN.size]):
        return None
    tokens: list[int] = []
    length = _HEADER.size
    while length + _RECORD.size <= len(data):
        token, stored = _RECORD.unpack_from(data, length)
        expected = zlib.crc32(_TOKEN.pack(token), checksum)
        if stored != expected:
            break
        tokens.append(token)
        checksum, length = expected, length + _RECORD.size
    return _Parsed(SavedTokens(seed, fingerprint, tuple(tokens)), length, checksum)
