"""tokens.bin: the tokens that a job has said so far, so that another server can go on where this one stopped.

    header   magic, version, seed, fingerprint, checksum        the seed and what the tokens are an answer to
    record   token id, checksum                                 8 bytes for each token; only ever appended

Each checksum covers everything before it, so a tail that a crash has torn, or left of an older life, is found and cut off.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import BadJob
from penstock.workspace.store.disk import Disk, clear, touch
from penstock.workspace.store.files import PARTIAL, TOKENS, read_file

MAGIC, VERSION = b"PSTK", 1
FINGERPRINT_BYTES = 16  # bytes
MAX_FILE_BYTES = 64 << 20  # bytes: eight million tokens

_HEADER = struct.Struct(f"<4sIQ{FINGERPRINT_BYTES}sI")
_TOKEN, _RECORD = struct.Struct("<I"), struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class SavedTokens:
    """What an earlier life of a job left: with the same seed and fingerprint, the tokens can be continued."""

    seed: int
    fingerprint: bytes
    tokens: tuple[int, ...] = ()


class _Parsed(NamedTuple):
    saved: SavedTokens
    length: int  # bytes that are whole
    checksum: int


def read_tokens(folder: int) -> SavedTokens | None:
    """What is there and whole; None if nothing is."""
    parsed = _parse(folder)
    return None if parsed is None else parsed.saved


def count_saved_tokens(folder: int) -> dict[str, int]:
    """How many tokens a job has said, by the size of the file; nothing if there is none."""
    try:
        size = os.stat(TOKENS, dir_fd=folder, follow_symlinks=False).st_size
    except OSError:
        return {}
    return {"completion_tokens": max(0, size - _HEADER.size) // _RECORD.size}


class Transcript:
    """Writes tokens.bin and partial.txt of one run. No sync is needed for the job to be safe: what a power cut takes is computed
    again. After an error the same call can be made again, with the same tokens and more. No file is kept open in between."""

    def __init__(self, disk: Disk, folder: int, saved: SavedTokens) -> None:
        """Goes on in a file that holds the very tokens of `saved`; else begins a new one with them."""
        self._disk, self._folder, self._saved = disk, folder, saved
        self._length = self._checksum = self._text_length = 0
        self._begun = self._text_begun = False

    def append(self, tokens: Sequence[int], text: bytes, *, sync: bool = False) -> None:
        """All tokens after those of `saved`, or after the last call that succeeded; the same for text. With `sync` all tokens so
        far survive a power cut."""
        if not self._begun:
            self._begin()
        data, checksum = _records(tokens, self._checksum)
        if data or sync:
            self._grow(TOKENS, self._length, data, sync=sync)
        if not self._text_begun:
            clear(self._disk, self._folder, PARTIAL)
            touch(self._disk, self._folder, PARTIAL)
            self._text_begun = True
        if text:
            self._grow(PARTIAL, self._text_length, text)
        # only now: what fails is done again whole, over what it left
        self._length, self._checksum, self._text_length = self._length + len(data), checksum, self._text_length + len(text)

    def _begin(self) -> None:
        parsed = _parse(self._folder)
        if parsed is not None and parsed.saved == self._saved:
            self._length, self._checksum = parsed.length, parsed.checksum
            self._grow(TOKENS, self._length, b"")
        else:
            header = _HEADER.pack(MAGIC, VERSION, self._saved.seed, self._saved.fingerprint, 0)[: -_TOKEN.size]
            checksum = zlib.crc32(header)
            data, self._checksum = _records(self._saved.tokens, checksum)
            whole = header + _TOKEN.pack(checksum) + data
            clear(self._disk, self._folder, TOKENS)
            touch(self._disk, self._folder, TOKENS)
            self._grow(TOKENS, 0, whole)
            self._length = len(whole)
        self._begun = True

    def _grow(self, name: str, length: int, data: bytes, *, sync: bool = False) -> None:
        """Add to a file that is so long. What else is behind that was torn by a crash, or left by a write that failed."""
        file = self._disk.append_to(name, self._folder)
        try:
            if os.fstat(file).st_size != length:
                self._disk.cut(file, length)
            if data:
                self._disk.write(file, data)
            if sync:
                self._disk.sync(file)
        finally:
            os.close(file)


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
