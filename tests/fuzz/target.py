"""Target: something that reads foreign input, strategies for that input, and what must hold for each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

EDIT_BYTES = 6  # of a script, for each edit
MAX_EDITS = 8
NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1]
# What has a meaning in JSON, HTTP, msgpack, paths and numbers.
TOKENS = [
    *(
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"null",
        b"true",
        b"-1",
        b"1.5",
        b"1e999",
        b"NaN",
        b"-0",
        b'""',
        b"{}",
        b"[]",
    ),
    *(
        b"9" * 30,
        b"9" * 5000,
        b"[" * 2000,
        b'{"a":' * 2000,
        b"\\ud800",
        b"\\u0000",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\0",
    ),
    *(b"\r\n", b"\n", b"\r\n\r\n", b" ", b"\t", b"../", b"/", b"%00", b"%2e", b"#", b"~1", b"-", b"\xb2"),
    *(
        b"Content-Length: 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Expect: 100-continue\r\n",
        b"ffffffffffffffff\r\n",
        b"0\r\n\r\n",
    ),
    *(
        b"\xc0",
        b"\xc1",
        b"\x90",
        b"\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 2000,
    ),
]


class Target(NamedTuple):
    """cases: the inputs. check: raises for an input that was handled wrongly; errors that are right are caught by it."""

    cases: st.SearchStrategy[Any]
    check: Callable[[Any], object]


TargetMaker = Callable[[], Target]
_folders: list[tempfile.TemporaryDirectory[str]] = []


def scratch_folder() -> Path:
    """A folder for the files of a target, until the process ends."""
    _folders.append(tempfile.TemporaryDirectory(prefix="penstock-fuzz-"))
    return Path(_folders[-1].name)


def damaged(seeds: Sequence[bytes], *, max_edits: int = MAX_EDITS) -> st.SearchStrategy[bytes]:
    """One of the seeds with some edits, each of which is read from a few bytes of a script: quick to make and to shrink."""
    script = st.binary(max_size=max_edits * EDIT_BYTES)
    return st.tuples(st.integers(0, len(seeds) - 1), script).map(lambda drawn: edited(seeds, *drawn))


def edited(seeds: Sequence[bytes], index: int, script: bytes) -> bytes:
    data = bytearray(seeds[index])
    for start in range(0, len(script) - EDIT_BYTES + 1, EDIT_BYTES):
        kind, high, middle, low, size, value = script[start : start + EDIT_BYTES]
        place = (high << 16 | middle << 8 | low) % (len(data) + 1)
        match kind % 8:
            case 0 if place < len(data):
                data[place] ^= 1 << value % 8
            case 1:
                data[place : place + 1] = bytes([value])
            case 2:
                width = 1 << size % 4
                number = NUMBERS[value % len(NUMBERS)] % (1 << 8 * width)
                data[place : place + width] = number.to_bytes(width, "little" if size & 4 else "big")
            case 3:
                del data[place : place + size + 1]
            case 4:
                data[place:place] = bytes([value]) * (size + 1)
            case 5:
                data[place : place + size % 4] = TOKENS[value % len(TOKENS)]
            case 6:
                other = seeds[value % len(seeds)]
                begin = (size << 8 | value) % (len(other) + 1)
                data[place : place + size] = other[begin : begin + size]
            case 7 if value < 32:
                del data[place:]
    return bytes(data)
