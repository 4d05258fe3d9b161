"""SignedList: a list that a network's authority signs, as this node knows it: from its file and from other nodes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from cryptography import x509

from penstock.config import files
from penstock.errors import ConfigError, Untrusted

logger = logging.getLogger("penstock.network")


class Records(Protocol):
    """Signed records. `|` merges two lists, and equals its left side if the right one has nothing newer."""

    def __or__(self, other: Self, /) -> Self: ...

    def encode(self) -> bytes: ...


L = TypeVar("L", bound=Records)


class SignedList(ABC, Generic[L]):
    """The records in force: `current`, and as bytes to pass on, `data`.

    It only gets newer, and only by records that the authority signed: an older or a made-up list from another node changes
    nothing.
    """

    name: ClassVar[str]  # for messages
    max_bytes: ClassVar[int]

    def __init__(self, file: Path | None, authority: x509.Certificate, empty: L) -> None:
        self._file = file
        self._authority = authority
        self.current = empty
        self.data = empty.encode()
        self._stamp: object = None
        self._last_error = ""
        try:
            self.reload()
        except Untrusted as error:
            raise ConfigError(
                f"The {self.name} {file} cannot be used: {error}",
                hint="Remove the file: this node gets the list again from other nodes.",
            ) from error

    @abstractmethod
    def _read(self, data: bytes) -> L:
        """Decode a list and check its signatures. Raises Untrusted."""

    def reload(self) -> bool:
        """Read the file if it has changed. True if it had something newer. Raises Untrusted, once per error."""
        if self._file is None:
            return False
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return False
            data = self._read_limited(self._file)
        except FileNotFoundError:
            return False
        except OSError as error:  # it is tried again, but reported once
            if self._last_error == str(error):
                return False
            self._last_error = str(error)
            raise Untrusted(f"It cannot be read: {error}.") from error
        self._stamp = stamp
        self._last_error = ""
        before = self.current
        listed = self._add(data)
        if listed | self.current != listed:  # the file was restored from an older copy
            self._save(self._file)
        return self.current is not before

    def merge(self, data: bytes) -> bool:
        """Add another node's list and save the file. True if it had something newer. Raises Untrusted."""
        before = self.current
        if data and data != self.data:
            self._add(data)
        if self.current is before:
            return False
        if self._file is not None:
            self._save(self._file)
        return True

    def _add(self, data: bytes) -> L:
        """Read a list, add its records, and return it."""
        listed = self._read(data)
        merged = self.current | listed
        if merged != self.current:
            self.current = merged
            self.data = merged.encode()
        return listed

    def _save(self, file: Path) -> None:
        try:
            with files.locked_folder(file.parent):
                with suppress(OSError, Untrusted):  # a command may have added to it just now
                    self._add(self._read_limited(file))
                files.replace(file.parent, {file.name: self.data})
        except ConfigError as error:  # the records stay in force until this node stops
            logger.error("the %s could not be saved: %s", self.name, error)

    def _read_limited(self, file: Path) -> bytes:
        with file.open("rb") as stream:
            return stream.read(self.max_bytes + 1)
