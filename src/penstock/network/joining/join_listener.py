"""JoinListener: where the authority's node answers machines that join. Anyone can connect to it, so what a stranger can consume
is bounded: connections, bytes, time, and guesses of a secret.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time

from penstock.config.home import JoinedNetwork
from penstock.errors import BadMessage, PenstockError, Untrusted
from penstock.network.joining.admission import admit
from penstock.network.joining.join_protocol import (
    CHALLENGE_BYTES,
    JOIN_MARK,
    MAX_REQUEST_BYTES,
    Channel,
    JoinAnswer,
    JoinHello,
    JoinRefusal,
    JoinRequest,
)
from penstock.network.joining.stranger_listener import StrangerListener
from penstock.network.log_throttle import LogThrottle

CONNECTION_S = 10.0  # for a whole connection

logger = logging.getLogger("penstock.network")


class JoinListener:
    """Listens at an endpoint from construction until `close`. Raises OSError if it cannot."""

    def __init__(self, network: JoinedNetwork, endpoint: str) -> None:
        self.endpoint = endpoint
        self._network = network
        self._throttle = LogThrottle()
        self._listener = StrangerListener(network, endpoint, self._serve)
        self.close = self._listener.close
        self._listener.start()

    def _serve(self, connection: socket.socket, address: str) -> bool:
        try:
            self._answer(connection, address)
        except (OSError, BadMessage) as error:
            self._log(f"a machine at {address} connected to join, and did not: {error}")
        return False

    def _answer(self, connection: socket.socket, address: str) -> None:
        listener = self._listener
        channel = Channel(connection, listener.context, server_side=True, seconds=CONNECTION_S, max_bytes=MAX_REQUEST_BYTES)
        channel.handshake()
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        channel.send(JoinHello(JOIN_MARK, challenge, int(time.time())))
        request = channel.receive(JoinRequest, MAX_REQUEST_BYTES)
        try:
            answer = admit(self._network, request, challenge=challenge, server_certificate=listener.certificate, address=address)
        except Untrusted as error:
            logger.warning("refused a machine at %s that wants to join: %s", address, error)
            answer = JoinAnswer(JoinRefusal.FAILED)
        except PenstockError as error:
            logger.error("a machine at %s could not join: %s", address, error)
            answer = JoinAnswer(JoinRefusal.FAILED)
        if answer.refusal == JoinRefusal.INVALID:
            self._log(f"refused a machine at {address}: it does not know the secret of invitation {request.id}")
        channel.send(answer)

    def _log(self, text: str) -> None:
        """Log, at a limited rate, what strangers can cause."""
        logger.log(logging.WARNING if self._throttle.should_log() else logging.DEBUG, "%s", text)
