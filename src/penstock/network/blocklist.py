"""The Blocklist: all revoked certificates that this node knows of, from its file and from others."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from cryptography import x509

from penstock.config import files
from penstock.errors import ConfigError, Untrusted
from penstock.network.trust.revocations import MOST_BYTES, NOBODY, Revocations, read

logger = logging.getLogger("penstock.network")


class Blocklist:
    """`data` is `current` as it is handed on. It only grows, and only by what the authority has signed: whoever hands round a
    shorter list, or one of their own making, changes nothing."""

    def __init__(self, file: Path | None, authority: x509.Certificate) -> None:
        self._file, self._authority = file, authority
        self.current, self.data = NOBODY, NOBODY.encode()
        self._looked_at: object = None
        self._trouble = ""
        try:
            self.look()
        except Untrusted as error:
            raise ConfigError(
                f"The list of revocations {file} cannot be used: {error}",
                hint="Remove it: other nodes of the network bring it again.",
            ) from error

    def look(self) -> bool:
        """Whether the file has something new. Raises Untrusted, once, for one that cannot be used."""
        if self._file is None:
            return False
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._looked_at:
                return False
            data = _contents(self._file)
        except FileNotFoundError:
            return False
        except OSError as error:  # it is tried again, but not told again
            told, self._trouble = self._trouble, str(error)
            if self._trouble == told:
                return False
            raise Untrusted(f"It cannot be read: {error}.") from error
        self._looked_at, self._trouble = stamp, ""
        before = self.current
        if len(self._join(data).records) < len(self.current.records):  # the file is that of a copy
            self._keep(self._file)
        return self.current is not before

    def offer(self, data: bytes) -> bool:
        """Whether another node's list has something new; then it is kept. Raises Untrusted."""
        before = self.current
        if data and data != self.data:
            self._join(data)
        if self.current is before:
            return False
        if self._file is not None:
            self._keep(self._file)
        return True

    def _join(self, data: bytes) -> Revocations:
        """Know what this list says, too; the list."""
        listed = read(data, self._authority, self.current)
        if listed.records.keys() - self.current.records.keys():
            self.current |= listed
            self.data = self.current.encode()
        return listed

    def _keep(self, file: Path) -> None:
        try:
            with files.locked_folder(file.parent):
                with suppress(OSError, Untrusted):  # a command may have revoked somebody just now
                    self._join(_contents(file))
                files.replace(file.parent, {file.name: self.data})
        except ConfigError as error:  # it counts all the same, until this node ends
            logger.error("the list of revocations could not be kept: %s", error)


def _contents(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES + 1)
