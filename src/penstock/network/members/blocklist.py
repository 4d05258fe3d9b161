"""The Blocklist: all revoked certificates that this node knows of, from its file and from other nodes."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

from penstock.network.members.signed_list import SignedList
from penstock.network.trust.revocations import MAX_LIST_BYTES, NO_REVOCATIONS, Revocations, read


class Blocklist(SignedList[Revocations]):
    """The revocations in force. It only grows."""

    name = "list of revocations"
    max_bytes = MAX_LIST_BYTES

    def __init__(self, file: Path | None, authority: x509.Certificate) -> None:
        super().__init__(file, authority, NO_REVOCATIONS)

    def _read(self, data: bytes) -> Revocations:
        return read(data, self._authority, self.current)
