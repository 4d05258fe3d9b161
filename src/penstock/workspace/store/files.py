"""Names of the folders and files in a workspace, and functions that read them without trusting their contents."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.errors import BadJob

MAX_PROMPT_BYTES = 16 << 20
MAX_RECORD_BYTES = 4 << 20  # request.json or usage.json
MAX_RESULT_BYTES = 64 << 20
BLOCK_BYTES = 4096  # files take whole blocks, and so does the folder around them
MAX_NUMBER = 1e15  # limit for times in seconds and sizes in bytes: floats below it are exact to the millisecond


class Place(StrEnum):
    WRITING = "input/writing"
    READY = "input/ready"
    PROCESSING = "processing"
    OUTPUT = "output"
    FAILED = "failed"
    KEYS = "keys"  # one file for each idempotency key, with the id of its job
    CANCEL = "cancel"  # one empty file for each job to cancel
    RESPONSES = "responses"  # API answers that later requests can continue
    FILES = "files"  # uploads, and the output files of batches
    BATCHES = "batches"  # files of many requests, each of which becomes a job
    TRASH = "trash"  # being deleted


FINISHED = (Place.OUTPUT, Place.FAILED)

PROMPT, REQUEST = "prompt.txt", "request.json"  # the input
RESULT, ERROR, USAGE = "result.txt", "error.txt", "usage.json"  # the outcome; USAGE is written last and proves the other
TOKENS, PARTIAL = "tokens.bin", "partial.txt"  # progress: for a resume, and for people
SUSPECT, ISOLATED_RUN = "suspect", "alone-"  # its server died; one numbered file for each isolated run

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a named pipe must not block us


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ends: the bytes of result.txt or error.txt, and the facts for usage.json."""

    done: bool
    text: bytes
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        return Place.OUTPUT if self.done else Place.FAILED

    @property
    def file(self) -> str:
        return RESULT if self.done else ERROR

    def record(self) -> bytes:
        proof = {"outcome": "done" if self.done else "failed", "sha256": hashlib.sha256(self.text).hexdigest()}
        return json.dumps(proof | dict(self.facts), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


@dataclass(frozen=True, slots=True)
class End:
    """An outcome found on disk: where the job belongs, and the bytes of usage.json that prove it."""

    place: Place
    record: bytes


def read_file(folder: int, name: str, limit: int) -> bytes | None:
    """Read a file; None if it does not exist. Raises BadJob if it is not a plain file or has more than `limit` bytes."""
    file = open_file(folder, name)
    if file is None:
        return None
    try:
        size = os.fstat(file).st_size
        if size > limit:
            raise BadJob(f"{name} has {size} bytes; the limit is {limit}.", hint="Make it shorter.")
        return _read_all(file, limit)
    finally:
        os.close(file)


def open_file(folder: int, name: str) -> int | None:
    """Open a file for reading; None if it does not exist. Raises BadJob if it is not a plain file. The caller closes it."""
    try:
        file = os.open(name, _FILE, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM):
            why = "is a link" if error.errno == errno.ELOOP else f"cannot be read: {os.strerror(error.errno or 0)}"
            raise BadJob(f"{name} {why}.", hint="A job's files are plain files.") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise BadJob(f"{name} is not a plain file.", hint="A job's files are plain files.")
    return file


def key_file(key: str) -> str:
    """Name of the file for an idempotency key: a hash, since keys may be any text."""
    return hashlib.sha256(key.encode()).hexdigest()


def has_file(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def names_in(folder: int) -> list[str]:
    """List an open folder. It is opened once more, since threads that list one descriptor would share its read position."""
    again = os.open(".", FOLDER, dir_fd=folder)
    try:
        return os.listdir(again)
    finally:
        os.close(again)


def sizes_in(folder: int) -> dict[str, int]:
    """The sizes of the files in an open folder, by name."""
    sizes = {}
    for name in names_in(folder):
        with suppress(FileNotFoundError):  # removed meanwhile
            sizes[name] = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return sizes


def footprint(*sizes: int) -> int:
    """Bytes that a folder with files of these sizes takes."""
    return BLOCK_BYTES * (1 + sum(max(1, -(-size // BLOCK_BYTES)) for size in sizes))


def read_record(folder: int, name: str) -> dict[str, Any] | None:
    """Read a JSON object; None if it is missing or unreadable, such as one torn by a crash."""
    try:
        found = json.loads(read_file(folder, name, MAX_RECORD_BYTES) or b"")
    except (ValueError, RecursionError, BadJob):
        return None
    return found if isinstance(found, dict) else None


def is_number(value: object) -> bool:
    """Whether a value from JSON is a usable number: not NaN, infinite, a boolean, or beyond any clock or disk."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def not_none(*values: Any) -> list[Any]:
    return [value for value in values if value is not None]


def proven_end(folder: int) -> End | None:
    """Return how a job ended if usage.json is whole and its checksum matches the result; else None."""
    try:
        record = read_file(folder, USAGE, MAX_RECORD_BYTES)
        facts = read_record(folder, USAGE) or {}
        done = {"done": True, "failed": False}.get(str(facts.get("outcome")))
        if done is None or record is None:
            return None
        text = read_file(folder, RESULT if done else ERROR, MAX_RESULT_BYTES)
    except BadJob:
        return None
    if text is None or hashlib.sha256(text).hexdigest() != facts.get("sha256"):
        return None
    return End(Place.OUTPUT if done else Place.FAILED, record)


def try_lock(folder: int, *, shared: bool = False) -> bool:
    """Lock a folder unless it is locked already. The lock ends when the descriptor is closed or the process dies."""
    try:
        fcntl.flock(folder, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_all(file: int, limit: int) -> bytes:
    parts = []
    while limit > 0 and (part := os.read(file, min(limit, 1 << 20))):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)
