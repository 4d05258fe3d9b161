"""The Blocklist: all revoked certificates that this node knows of, from its file and from other nodes."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from cryptography import x509

from penstock.config import files
from penstock.errors import ConfigError, Untrusted
from penstock.network.trust.revocations import MAX_LIST_BYTES, NO_REVOCATIONS, Revocations, read

logger = logging.getLogger("penstock.network")


class Blocklist:
    """The revocations in force: `current`, and as bytes to pass on, `data`.

    It only grows, and only by records that the authority signed: a shorter or a made-up list from another node changes nothing.
    """

    def __init__(self, file: Path | None, authority: x509.Certificate) -> None:
        self._file = file
        self._authority = authority
        self.current = NO_REVOCATIONS
        self.data = NO_REVOCATIONS.encode()
        self._stamp: object = None
        self._last_error = ""
        try:
            self.reload()
        except Untrusted as error:
            raise ConfigError(
                f"The list of revocations {file} cannot be used: {error}",
                hint="Remove the file: this node gets the list again from other nodes.",
            ) from error

    def reload(self) -> bool:
        """Read the file if it has changed. True if it had new revocations. Raises Untrusted, once per error."""
        if self._file is None:
            return False
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return False
            data = _read_limited(self._file)
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
        if len(self._add(data).records) < len(self.current.records):  # the file was restored from an older copy
            self._save(self._file)
        return self.current is not before

    def merge(self, data: bytes) -> bool:
        """Add another node's list and save the file. True if it had new revocations. Raises Untrusted."""
        before = self.current
        if data and data != self.data:
            self._add(data)
        if self.current is before:
            return False
        if self._file is not None:
            self._save(self._file)
        return True

    def _add(self, data: bytes) -> Revocations:
        """Read a list, add its records, and return it."""
        listed = read(data, self._authority, self.current)
        if listed.records.keys() - self.current.records.keys():
            self.current |= listed
            self.data = self.current.encode()
        return listed

    def _save(self, file: Path) -> None:
        try:
            with files.locked_folder(file.parent):
                with suppress(OSError, Untrusted):  # `penstock network revoke` may have added to it just now
                    self._add(_read_limited(file))
                files.replace(file.parent, {file.name: self.data})
        except ConfigError as error:  # the revocations stay in force until this node stops
            logger.error("the list of revocations could not be saved: %s", error)


def _read_limited(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MAX_LIST_BYTES + 1)
