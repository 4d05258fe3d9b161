"""tokens.bin: the tokens that a job has said so far, so that another server can go on where this one stopped.

    header   magic, version, seed, fingerprint, checksum        the seed and what the tokens are an answer to
    record   token id, checksum                                 8 bytes for each token; only ever appended

Each checksum covers everything before it, so a tail that a crash has torn, or left of an older life, is found and cut off.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import BadJob
from penstock.workspace.disk import Disk
from penstock.workspace.files import PARTIAL, TOKENS, read_file

MAGIC, VERSION = b"PSTK", 1
FINGERPRINT = 16  # bytes
MAX_SIZE = 64 << 20  # bytes: eight million tokens

_HEADER = struct.Struct(f"<4sIQ{FINGERPRINT}sI")
_TOKEN, _RECORD = struct.Struct("<I"), struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Said:
    """What an earlier life of a job left: with the same seed and fingerprint, the tokens can be continued."""

    seed: int
    fingerprint: bytes
    tokens: tuple[int, ...] = ()


class _Parsed(NamedTuple):
    said: Said
    length: int  # bytes that are whole
    checksum: int


def read_tokens(folder: int) -> Said | None:
    """What is there and whole; None if nothing is."""
    parsed = _parse(folder)
    return None if parsed is None else parsed.said


class Transcript:
    """Writes tokens.bin and partial.txt of one run. No sync is needed for the job to be safe: what a power cut takes is computed
    again. After an error the same call can be made again, with the same tokens and more."""

    def __init__(self, disk: Disk, folder: int, said: Said) -> None:
        """Goes on in a file that holds the very tokens of `said`; else begins a new one with them."""
        self._disk, self._folder, self._said = disk, folder, said
        self._tokens = self._text = -1
        self._length = self._checksum = self._shown = 0
        self._synced = True

    def append(self, tokens: Sequence[int], text: bytes) -> None:
        """All tokens after those of `said`, or after the last call that succeeded; the same for text."""
        if self._tokens < 0:
            self._open_tokens()
        if tokens:
            data, checksum = _records(tokens, self._checksum)
            self._grow(self._tokens, self._length, data)
            self._length, self._checksum, self._synced = self._length + len(data), checksum, False
        if self._text < 0:
            self._clear(PARTIAL)
            self._text = self._disk.create(PARTIAL, self._folder)
        if text:
            self._grow(self._text, self._shown, text)
            self._shown += len(text)

    def sync(self) -> None:
        if not self._synced:
            self._disk.sync(self._tokens)
            self._synced = True

    def close(self) -> None:
        for file in (self._tokens, self._text):
            if file >= 0:
                os.close(file)
        self._tokens = self._text = -1

    def _open_tokens(self) -> None:
        parsed = _parse(self._folder)
        if parsed is not None and parsed.said == self._said:
            self._tokens = self._disk.append_to(TOKENS, self._folder)
            self._length, self._checksum = parsed.length, parsed.checksum
        else:
            self._clear(TOKENS)
            header = _HEADER.pack(MAGIC, VERSION, self._said.seed, self._said.fingerprint, 0)[:-4]
            checksum = zlib.crc32(header)
            data, self._checksum = _records(self._said.tokens, checksum)
            self._tokens = self._disk.create(TOKENS, self._folder)
            self._length = 0
            whole = header + _TOKEN.pack(checksum) + data
            try:
                self._grow(self._tokens, 0, whole)
            except OSError:
                os.close(self._tokens)
                self._tokens = -1
                raise
            self._length = len(whole)

    def _grow(self, file: int, length: int, data: bytes) -> None:
        try:
            self._disk.write(file, data)
        except OSError:
            with suppress(OSError):
                self._disk.cut(file, length)  # what was written of it would be written again
            raise

    def _clear(self, name: str) -> None:
        with suppress(FileNotFoundError):
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mode)
            (self._disk.remove_folder if is_folder else self._disk.remove)(name, self._folder)


def _records(tokens: Sequence[int], checksum: int) -> tuple[bytes, int]:
    parts = []
    for token in tokens:
        checksum = zlib.crc32(_TOKEN.pack(token), checksum)
        parts.append(_RECORD.pack(token, checksum))
    return b"".join(parts), checksum


def _parse(folder: int) -> _Parsed | None:
    try:
        data = read_file(folder, TOKENS, MAX_SIZE) or b""
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
        token, told = _RECORD.unpack_from(data, length)
        expected = zlib.crc32(_TOKEN.pack(token), checksum)
        if told != expected:
            break
        tokens.append(token)
        checksum, length = expected, length + _RECORD.size
    return _Parsed(Said(seed, fingerprint, tuple(tokens)), length, checksum)
