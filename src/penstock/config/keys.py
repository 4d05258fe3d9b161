"""The folder of API keys of a server: one file per key, with its hash and its limits but never the key itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import files
from penstock.config.checks import check_whole, unusable
from penstock.config.network import NAME
from penstock.errors import ConfigError

KEY_PREFIX = "sk-penstock-"  # lets people and leak scanners recognise a key
RANDOM_BYTES = 32
TAIL_CHARS = 4  # kept so that users can tell their keys apart
SUFFIX = ".json"
MAX_FILE_BYTES = 1 << 16
PRIORITIES = range(-10, 11)  # the same as in requests
WRITABLE_BY_OTHERS = 0o022
CLOCK_STEP_NS = 2 * 10**9  # the coarsest resolution of modification times on common file systems


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may do; None is no limit.

    jobs: answers open at once.
    tokens_per_minute: tokens of prompts and answers together.
    priority: the highest priority of its requests.
    models: the only models it may use.
    disk, batches: bytes that it may store, and batches that it may have open; None for those that the server allows every key.
    """

    jobs: int | None = None
    tokens_per_minute: int | None = None
    priority: int | None = None
    models: tuple[str, ...] | None = None
    disk: int | None = None
    batches: int | None = None

    def __post_init__(self) -> None:
        for name in ("jobs", "tokens_per_minute", "disk", "batches"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), minimum=1)
        if self.priority is not None and (type(self.priority) is not int or self.priority not in PRIORITIES):
            raise unusable("priority", self.priority, f"Give a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}.")
        if self.models is not None and not (self.models and all(isinstance(name, str) and name.strip() for name in self.models)):
            raise unusable("models", list(self.models), "Name at least one model, or leave models out.")


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What is stored of a key. `created` and `revoked` are times (ISO 8601, UTC).

    A revoked key keeps its record: a server whose last key was revoked must not become open.
    """

    name: str
    sha256: str
    tail: str
    created: str
    limits: KeyLimits = NO_LIMITS
    revoked: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise unusable("name", self.name, "Use up to 64 letters, digits, dots, dashes and underscores.")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise unusable("sha256", self.sha256, "It is 64 digits from 0 to f.")
        for name in ("tail", "created", "revoked"):
            if not isinstance(getattr(self, name), str) and not (name == "revoked" and self.revoked is None):
                raise unusable(name, getattr(self, name), "It is a text.")


class Contents(NamedTuple):
    """The records of a folder, and an error for each file that could not be read."""

    records: tuple[KeyRecord, ...]
    broken: tuple[ConfigError, ...]


def digest(key: str) -> str:
    """Hash a key for storage. A fast hash is enough: 256 random bits cannot be guessed, unlike passwords."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, limits: KeyLimits = NO_LIMITS) -> str:
        """Create a key and return it. It is stored nowhere and cannot be shown again."""
        key = KEY_PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
        record = KeyRecord(name=name, sha256=digest(key), tail=key[-TAIL_CHARS:], created=_now(), limits=limits)
        files.ensure_folder(self.path)
        with files.locked_folder(self.path):
            self._refuse_writable(self.path)
            if self._file(name).exists():
                raise ConfigError(
                    f"There is already a key '{name}', or a revoked one.",
                    hint="Use another name, or remove the revoked one: penstock keys remove NAME",
                )
            self._write(record)
        return key

    def records(self) -> tuple[KeyRecord, ...]:
        """Return all records by name; raise if a file is broken."""
        found = self.contents()
        if found.broken:
            raise found.broken[0]
        return found.records

    def contents(self) -> Contents:
        """Return all records and the errors of broken files; raise only if the folder itself cannot be used."""
        records: list[KeyRecord] = []
        broken: list[ConfigError] = []
        for file in self._files():
            try:
                records.append(self._read(file))
            except ConfigError as error:
                broken.append(error)
        return Contents(tuple(records), tuple(broken))

    def edit(self, name: str, **changes: Any) -> KeyLimits:
        """Change some limits of a key, and return all that it has now. changes: fields of KeyLimits; None removes one."""
        self._check_exists(name)
        with files.locked_folder(self.path):
            record = self._read(self._file(name))
            if record.revoked is not None:
                raise ConfigError(f"The key '{name}' is revoked.", hint="Create another one: penstock keys add NAME")
            limits = replace(record.limits, **changes)
            self._write(replace(record, limits=limits))
        return limits

    def revoke(self, name: str) -> bool:
        """Revoke a key; return whether it was valid until now."""
        self._check_exists(name)
        with files.locked_folder(self.path):
            record = self._read(self._file(name))
            if record.revoked is not None:
                return False
            self._write(replace(record, revoked=_now()))
        return True

    def remove(self, name: str) -> None:
        """Remove the record of a revoked key, and free its name."""
        self._check_exists(name)
        with files.locked_folder(self.path):
            if self._read(self._file(name)).revoked is None:
                raise ConfigError(f"The key '{name}' is valid.", hint=f"Revoke it first: penstock keys revoke {name}")
            self._file(name).unlink()

    def stamp(self) -> object:
        """Return a value that changes whenever the contents of the folder do; None where there is no folder."""
        try:
            folder = self.path.stat()
            with os.scandir(self.path) as entries:
                found = tuple(sorted((entry.name, *_file_stamp(entry)) for entry in entries if not entry.name.startswith(".")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}.") from None
        now = time.time_ns()
        # Two changes within one step of the file system's clock look like one: until it has passed, every stamp is different.
        latest = max(folder.st_mtime_ns, *(changed for _, changed, _, _ in found), 0)
        return folder.st_ino, folder.st_mtime_ns, found, None if now - latest > CLOCK_STEP_NS else now

    # ---- inside ----

    def _check_exists(self, name: str) -> None:
        if not self._file(name).exists():
            known = ", ".join(file.name.removesuffix(SUFFIX) for file in self._files())
            raise ConfigError(f"There is no key '{name}'.", hint=f"There are: {known}." if known else f"{self.path} has none.")

    def _file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def _files(self) -> list[Path]:
        try:
            names = sorted(os.listdir(self.path))
            self._refuse_writable(self.path)
        except OSError as error:
            if isinstance(error, FileNotFoundError | NotADirectoryError) and not self.path.exists():
                return []
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}.", hint="It is a folder of API keys.") from None
        # a name that starts with a dot is a draft, or was one when the power failed
        return [self.path / name for name in names if name.endswith(SUFFIX) and not name.startswith(".")]

    def _read(self, file: Path) -> KeyRecord:
        try:
            self._refuse_writable(file)
            with file.open("rb") as stream:
                record = _record(json.loads(stream.read(MAX_FILE_BYTES)))
            if record.name != file.name.removesuffix(SUFFIX):
                raise unusable("name", record.name, "It is the name of the file.")
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}.", hint=_restore_hint(file)) from None
        except ConfigError as error:
            raise ConfigError(f"{file} cannot be used: {error.message}", hint=error.hint) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigError(f"{file} is not a valid key file.", hint=_restore_hint(file)) from None
        return record

    def _write(self, record: KeyRecord) -> None:
        data = json.dumps(asdict(record), indent=2).encode() + b"\n"
        files.replace(self.path, {self._file(record.name).name: data})

    def _refuse_writable(self, path: Path) -> None:
        """Raise if other users can write there, and so create keys."""
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & WRITABLE_BY_OTHERS:
            raise ConfigError(
                f"Other users of this machine can write to {path} (its mode is {mode:04o}).",
                hint=f"If nobody has, run: chmod {'700' if path.is_dir() else '600'} {path}",
            )


def _file_stamp(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    """Values that change when a file does, also if it is written in place."""
    try:
        found = entry.stat()
    except FileNotFoundError:  # it is just being replaced
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_mode


def _record(found: dict[str, Any]) -> KeyRecord:
    limits = found.pop("limits")
    if isinstance(limits["models"], list):
        limits["models"] = tuple(limits["models"])
    elif limits["models"] is not None:
        raise TypeError
    return KeyRecord(**found, limits=KeyLimits(**limits))


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _restore_hint(file: Path) -> str:
    return f"Restore it, or create another key (penstock keys add NAME) and then remove {file.name}."
