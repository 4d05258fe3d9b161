"""RevocationAge: how old the list of revocations is that this node has, and whether it is complete."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from penstock.config import files
from penstock.config.network import NetworkConfig
from penstock.errors import PenstockError, Untrusted
from penstock.network.members.blocklist import Blocklist
from penstock.network.members.revocation_stamps import RevocationStamps
from penstock.network.trust.certificates import load_certificate
from penstock.network.trust.expiry import expiry_warning
from penstock.network.trust.revocation_stamp import stamp_file

logger = logging.getLogger("penstock.network")

DAY_S = 24 * 3600.0
MAX_AGE_S = 7 * DAY_S  # the authority's node signs a stamp every day while it runs
MAX_INCOMPLETE_S = 60.0  # a list may arrive after its stamp
LOG_INTERVAL_S = DAY_S


class RevocationAge:
    """Takes the newest stamp of the list of revocations from any node, and warns if it is old or names more than the list has.

    It never stops the network: without the authority's machine, members go on. Thread-safe.
    """

    def __init__(self, config: NetworkConfig, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._stamps: RevocationStamps | None = None
        self._list: Blocklist | None = None
        self._seen: dict[str, bytes] = {}  # by node, its last stamp
        self._incomplete_since: float | None = None
        self._next_log = 0.0
        self._lock = threading.Lock()

    def open(self) -> None:
        """Read the list and its stamp. An open network has none, nor has a node without a file for them."""
        config = self._config
        if config.ca_file is not None and config.revocations_file is not None and not config.open:
            authority = load_certificate(files.read(config.ca_file))
            self._list = Blocklist(config.revocations_file, authority)
            self._stamps = RevocationStamps(stamp_file(config.revocations_file), authority)

    @property
    def data(self) -> bytes:
        """The newest stamp, to pass on; empty if there is none."""
        return self._stamps.data if self._stamps is not None else b""

    @property
    def date(self) -> str:
        """When the newest stamp was signed, such as 2026-11-17T21:10:03Z; empty if there is none."""
        if self._stamps is None or not self._stamps.current.serial:
            return ""
        return f"{self._stamps.current.date:%Y-%m-%dT%H:%M:%SZ}"

    def merge(self, node: str, data: bytes) -> None:
        """Take another node's stamp. One that is forged or older changes nothing."""
        with self._lock:
            if self._stamps is None or self._seen.get(node, b"") == data:
                return
            self._seen[node] = data
            try:
                self._stamps.merge(data)
            except PenstockError as error:
                logger.warning("the stamp of revocations of node %s is ignored: %s", node, error)

    def reload(self) -> None:
        """Read the files again if they have changed, and log a warning that is due."""
        with self._lock:
            if self._stamps is None or self._list is None:
                return
            try:
                self._stamps.reload()
                self._list.reload()
            except Untrusted as error:
                logger.error("the list of revocations or its stamp cannot be used; the last one stays in force: %s", error)
            now = self._clock()
            if not self._stamps.current.lacks(self._list.current):
                self._incomplete_since = None
            elif self._incomplete_since is None:
                self._incomplete_since = now
        warning = self.warning()
        if warning is not None and now >= self._next_log:
            self._next_log = now + LOG_INTERVAL_S
            logger.warning("%s", warning)

    def warning(self) -> str | None:
        """Return a warning if newer revocations may be withheld from this node; None otherwise."""
        if self._stamps is None or not self._stamps.current.serial:
            return None
        stamp, now = self._stamps.current, self._clock()
        if self._incomplete_since is not None and now - self._incomplete_since >= MAX_INCOMPLETE_S:
            return (
                f"The revocation list of this node lacks entries of the one that was signed on {stamp.date:%Y-%m-%d}: revoked "
                "nodes may still be accepted here. Other nodes may withhold them: connect this node to the machine that created "
                "the network."
            )
        if now - stamp.signed_at > MAX_AGE_S:
            return (
                f"The revocation list is {int((now - stamp.signed_at) / DAY_S)} days old: the machine that created the network "
                "signs it every day while it runs. Start `penstock serve` there; if it is running, other nodes may withhold "
                "newer lists from this one."
            )
        return None


def certificate_warning(config: NetworkConfig) -> str | None:
    """Return a warning if this node's certificate expires soon."""
    if config.certificate_file is None:
        return None
    try:
        return expiry_warning(config.certificate_file)
    except PenstockError as error:
        return str(error)
