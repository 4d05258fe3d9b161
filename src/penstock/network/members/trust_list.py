"""The TrustList: all trusted models that this node knows of, from its file and from other nodes."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

from penstock.network.members.signed_list import SignedList
from penstock.network.trust.trusted_models import MAX_LIST_BYTES, NO_TRUSTED_MODELS, TrustedModels, read


class TrustList(SignedList[TrustedModels]):
    """The trusted models in force. Of each model, only a record with a higher serial replaces one."""

    name = "list of trusted models"
    max_bytes = MAX_LIST_BYTES

    def __init__(self, file: Path | None, authority: x509.Certificate) -> None:
        super().__init__(file, authority, NO_TRUSTED_MODELS)

    def _read(self, data: bytes) -> TrustedModels:
        return read(data, self._authority, self.current)
