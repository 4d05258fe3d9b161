"""A network's authority and the papers of its nodes, made on the spot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from penstock.config.network import NetworkConfig
from penstock.network.trust import certificates, revocations
from penstock.network.trust.certificates import Identity
from penstock.network.trust.keyring import ClosedKeyring

DAY = 24 * 3600.0


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """The same bytes with some of them changed, taken out or put in: where a structure is encoded, often a strange one."""
    edit = st.tuples(st.integers(0, len(data) - 1), st.integers(0, 2), st.binary(max_size=2))

    def edited(edits: list[tuple[int, int, bytes]]) -> bytes:
        changed = data
        for place, length, put in edits:
            changed = changed[:place] + put + changed[place + length :]
        return changed

    return st.lists(edit, min_size=1, max_size=3).map(edited)


@dataclass(frozen=True)
class Papers:
    """What a node of a closed network shows and checks."""

    network: str
    node: str
    ca_file: Path
    certificate_file: Path
    key_file: Path
    revocations_file: Path

    @property
    def files(self) -> dict[str, Path]:
        return {"ca_file": self.ca_file, "certificate_file": self.certificate_file, "key_file": self.key_file}

    def config(self, **settings: Any) -> NetworkConfig:
        settings = {"name": self.network, "revocations_file": self.revocations_file} | settings
        return NetworkConfig(**self.files, **settings)

    def keyring(self, epoch: int, **options: Any) -> ClosedKeyring:
        return ClosedKeyring(network=self.network, node=self.node, epoch=epoch, **self.files, **options)


class Authority:
    """`name` is that of its network, and of its folder where it differs."""

    def __init__(self, folder: Path, name: str = "home", *, network: str = "home") -> None:
        self.folder, self.network = folder / name, network
        self.folder.mkdir()
        self.identity = certificates.create_authority(network)
        self.file = self.folder / "ca.pem"
        self.file.write_bytes(self.identity.certificate_pem())
        self._issued: dict[str, Identity] = {}
        self._revoked = revocations.NO_REVOCATIONS

    def invite(self, node: str, *, trusting: Path | None = None, seconds: float = DAY) -> Papers:
        """Papers for a node; a rogue trusts another authority than the one that signed its own."""
        identity = self._issued[node] = certificates.issue(self.identity, node, days=seconds / DAY)
        where = {kind: self.folder / f"{node}.{kind}" for kind in ("pem", "key", "revoked")}
        where["pem"].write_bytes(identity.certificate_pem())
        where["key"].write_bytes(identity.key_pem())
        return Papers(self.network, node, trusting or self.file, where["pem"], where["key"], where["revoked"])

    def revoke(self, *nodes: str) -> bytes:
        """The list with these certificates and all that were revoked before."""
        more = {self._issued[node].certificate.serial_number: node for node in nodes}
        self._revoked |= revocations.sign(more, self.identity)
        return self._revoked.encode()

    def forget(self) -> None:
        """As when its machine is restored from a copy that is older than all revocations."""
        self._revoked = revocations.NO_REVOCATIONS
