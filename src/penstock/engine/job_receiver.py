"""JobReceiver: takes what other nodes send. Checks it, and hands it to the engine that it is for, or back to its origin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from penstock.domain.messages import Bounce, BounceReason, Message, OpenRoute, RouteOffer
from penstock.engine.engine import Engine
from penstock.errors import BadMessage, DamagedMessage

logger = logging.getLogger("penstock.receiver")

LOG_EVERY = 10.0  # seconds between two lines about the same thing


class JobReceiver:
    """Runs on the network's thread. `decode` checks length, version, checksum and shape before anything else is looked at."""

    def __init__(
        self,
        decode: Callable[[bytes], Message],
        engines: Mapping[str, Engine],
        send: Callable[[str, Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decode, self._engines, self._send, self._clock = decode, engines, send, clock
        self.refused: dict[str, int] = {}  # by why
        self._logged: dict[tuple[str, str], float] = {}

    def on_message(self, sender: str, data: bytes) -> None:
        try:
            message = self._decode(data)
        except DamagedMessage as error:
            self._refuse(sender, error)
            if error.route is not None and error.number is not None:
                self._bounce(sender, Bounce(error.route, error.number, BounceReason.DAMAGED))
            return
        except BadMessage as error:
            self._refuse(sender, error)
            return
        if isinstance(message, OpenRoute) and message.model not in self._engines:
            known = ", ".join(self._engines)
            self._send(sender, RouteOffer(message.route, reason=f"it does not hold {message.model} (it holds {known})"))
            return
        for engine in self._engines_of(message):
            engine.deliver(sender, message)

    def _engines_of(self, message: Message) -> list[Engine]:
        """Routes are opened by model; later messages name only the route, and an engine that does not know it says so."""
        if isinstance(message, OpenRoute):
            return [self._engines[message.model]]
        return [engine for engine in self._engines.values() if engine.concerns(message.route)] or list(self._engines.values())[:1]

    def _bounce(self, sender: str, bounce: Bounce) -> None:
        """Its origin must act, if it was on its way here at all: anybody can name a route."""
        for engine in self._engines.values():
            if bounce.route.origin == engine.pipe.node:
                engine.deliver(sender, bounce)
            elif engine.host.hands_over(sender, bounce.route):
                self._send(bounce.route.origin, bounce)

    def _refuse(self, sender: str, error: BadMessage) -> None:
        self.refused[error.code] = self.refused.get(error.code, 0) + 1
        now = self._clock()
        if now - self._logged.get((sender, error.code), -LOG_EVERY) >= LOG_EVERY:
            if len(self._logged) > 1000:
                self._logged.clear()
            self._logged[sender, error.code] = now
            logger.warning("refused a message of node %s: %s (%d so far)", sender, error, self.refused[error.code])
