"""The Blocklist: the newest list of revoked certificates that this node knows, on disk and from others."""

from __future__ import annotations

import logging
from pathlib import Path

from cryptography import x509

from penstock.errors import ConfigError, Untrusted
from penstock.network.trust import files
from penstock.network.trust.certificates import common_name
from penstock.network.trust.revocations import MOST_BYTES, nobody, read

logger = logging.getLogger("penstock.network")


class Blocklist:
    """`data` is the list as its authority signed it, empty while there is none. A list is replaced only by one with a higher
    number, so whoever hands round an older one, or one of their own making, changes nothing."""

    def __init__(self, file: Path | None, authority: x509.Certificate) -> None:
        self._file, self._authority = file, authority
        self.current, self.data = nobody(common_name(authority)), b""
        self._looked_at: object = None
        try:
            self.look()
        except Untrusted as error:
            raise ConfigError(
                f"The list of revocations {file} cannot be used: {error}",
                hint="Remove it: other nodes of the network bring the newest one.",
            ) from error

    def look(self) -> bool:
        """Whether the file has a newer list. Raises Untrusted, once, for one that cannot be used."""
        if self._file is None:
            return False
        try:
            status = self._file.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._looked_at:
                return False
            self._looked_at = stamp
            with self._file.open("rb") as stream:
                return self._take(stream.read(MOST_BYTES + 1))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Untrusted(f"It cannot be read: {error}.") from error

    def offer(self, data: bytes) -> bool:
        """Whether another node's list is newer; then it is kept. Raises Untrusted."""
        if not data or data == self.data or not self._take(data):
            return False
        if self._file is not None:
            try:
                files.replace(self._file.parent, {self._file.name: data})
            except ConfigError as error:  # it counts all the same, until this node ends
                logger.error("the newest list of revocations could not be kept: %s", error)
        return True

    def _take(self, data: bytes) -> bool:
        newer = read(data, self._authority)
        if newer.number <= self.current.number:
            return False
        self.current, self.data = newer, data
        return True
