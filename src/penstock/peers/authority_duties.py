"""AuthorityDuties: what the machine that created a network does for it while its node runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from penstock.config.home import Home, JoinedNetwork
from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError, PenstockError
from penstock.network.joining import invitation_book
from penstock.network.joining.admission import join_endpoint
from penstock.network.joining.authority import stamp_revocations_if_due
from penstock.network.joining.join_listener import JoinListener

logger = logging.getLogger("penstock.network")

INTERVAL_S = 0.5
STAMP_CHECK_INTERVAL_S = 3600.0  # ... and when the list has changed


class AuthorityDuties:
    """Lets in machines that were invited, and dates the list of revocations.

    It listens only while there are invitations, and an hour longer.
    """

    def __init__(self, network: JoinedNetwork) -> None:
        self._network = network
        self._listener: JoinListener | None = None
        self._checked: tuple[int, float] | None = None  # the list's time of change, and when the stamp was looked at
        self._errors: dict[Callable[[], None], str] = {}  # the last one of each duty, logged once
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-authority", daemon=True)

    @classmethod
    def of(cls, config: NetworkConfig) -> AuthorityDuties | None:
        """The duties of this node; None if another machine created the network."""
        if config.certificate_file is None or config.open:
            return None
        folder = config.certificate_file.parent
        if not all((folder / name).exists() for name in ("ca.key", "network.json")):
            return None
        return cls(Home(folder.parents[1]).network(folder.name))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._listener is not None:
            self._listener.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            for duty in (self._stamp, self._listen):
                self._try(duty)
            self._closing.wait(INTERVAL_S)

    def _try(self, duty: Callable[[], None]) -> None:
        """Do a duty. It is tried again if it fails."""
        error = ""
        try:
            duty()
        except Exception as failure:
            error = str(failure)
            if error != self._errors.get(duty):
                expected = isinstance(failure, PenstockError | OSError)
                logger.error("%s", error, exc_info=None if expected else failure)
        self._errors[duty] = error

    def _stamp(self) -> None:
        changed, now = self._network.revocations_file.stat().st_mtime_ns, time.monotonic()
        if self._checked is None or self._checked[0] != changed or now - self._checked[1] >= STAMP_CHECK_INTERVAL_S:
            stamp_revocations_if_due(self._network)
            self._checked = (changed, now)

    def _listen(self) -> None:
        book = invitation_book.read(self._network)
        wanted = join_endpoint(self._network, book.port) if book.is_answering(datetime.now(UTC)) else None
        if wanted == (self._listener.endpoint if self._listener is not None else None):
            return
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if wanted is not None:
            try:
                self._listener = JoinListener(self._network, wanted)
            except OSError as error:
                raise ConfigError(
                    f"Invited machines cannot join: this node cannot listen at {wanted}: {error.strerror or error}.",
                    hint="Stop the program that uses that port.",
                ) from error
            logger.info("listening at %s for machines that were invited", wanted)
