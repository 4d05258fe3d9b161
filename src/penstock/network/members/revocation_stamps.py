"""The RevocationStamps of a node: the newest stamp that it knows of, from its file and from other nodes."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

from penstock.network.members.signed_list import SignedList
from penstock.network.trust.revocation_stamp import MAX_STAMP_BYTES, NO_STAMP, RevocationStamp, read_stamp


class RevocationStamps(SignedList[RevocationStamp]):
    """The stamp in force. Only one with a higher serial replaces it."""

    name = "stamp of the list of revocations"
    max_bytes = MAX_STAMP_BYTES

    def __init__(self, file: Path | None, authority: x509.Certificate) -> None:
        super().__init__(file, authority, NO_STAMP)

    def _read(self, data: bytes) -> RevocationStamp:
        return read_stamp(data, self._authority)
