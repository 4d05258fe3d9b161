"""JoinListener: where the authority's node answers machines that join. Strangers can connect to it, so all that they can use up
is bounded: connections, bytes, time, and guesses of a secret.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import closing

from cryptography.hazmat.primitives.serialization import Encoding

from penstock.config import files
from penstock.config.home import JoinedNetwork
from penstock.errors import BadMessage, PenstockError, Untrusted
from penstock.network.log_throttle import LogThrottle
from penstock.network.trust.admission import admit
from penstock.network.trust.certificates import load_certificate
from penstock.network.trust.join_protocol import (
    CHALLENGE_BYTES,
    JOIN_MARK,
    MAX_REQUEST_BYTES,
    Channel,
    JoinAnswer,
    JoinHello,
    JoinRefusal,
    JoinRequest,
)
from penstock.network.trust.listening import split

MAX_CONNECTIONS = 8  # at once; further ones wait in the queue of the system
MAX_CONNECTIONS_PER_ADDRESS = 2
BACKLOG = 16
CONNECTION_S = 10.0  # for all of a conversation
MIN_ACCEPT_INTERVAL_S = 0.05  # a handshake costs a signature
POLL_INTERVAL_S = 0.2

logger = logging.getLogger("penstock.network")


class JoinListener:
    """Listens at an endpoint from construction until `close`. Raises OSError if it cannot."""

    def __init__(self, network: JoinedNetwork, endpoint: str) -> None:
        self.endpoint = endpoint
        self._network = network
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.num_tickets = 0
        self._context.load_cert_chain(network.certificate_file, network.key_file)
        self._certificate = load_certificate(files.read(network.certificate_file)).public_bytes(Encoding.DER)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._by_address: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._throttle = LogThrottle()
        self._closing = threading.Event()
        self._socket = listen_at(endpoint)
        self._acceptor = threading.Thread(target=self._accept_loop, name="penstock-joins", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._closing.set()
        self._acceptor.join()
        self._socket.close()

    def _accept_loop(self) -> None:
        self._socket.settimeout(POLL_INTERVAL_S)
        while not self._closing.is_set():
            if not self._slots.acquire(timeout=POLL_INTERVAL_S):
                continue
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                self._slots.release()
                if not isinstance(error, TimeoutError):
                    self._closing.wait(POLL_INTERVAL_S)  # such as too many open files
                continue
            address = str(peer[0])
            if self._is_greedy(address):
                connection.close()
                self._slots.release()
            else:
                threading.Thread(target=self._serve, args=(connection, address), name="penstock-join", daemon=True).start()
            self._closing.wait(MIN_ACCEPT_INTERVAL_S)

    def _is_greedy(self, address: str) -> bool:
        """Whether an address has as many connections as it may; counts another one if not."""
        with self._counting:
            if self._by_address[address] >= MAX_CONNECTIONS_PER_ADDRESS:
                return True
            self._by_address[address] += 1
            return False

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            with closing(connection):
                self._answer(connection, address)
        except (OSError, BadMessage) as error:
            self._log(f"a machine at {address} connected to join, and did not: {error}")
        except Exception:
            logger.exception("failed to answer a machine at %s that wants to join", address)
        finally:
            with self._counting:
                self._by_address[address] -= 1
                self._by_address += Counter()  # drops those without connections
            self._slots.release()

    def _answer(self, connection: socket.socket, address: str) -> None:
        channel = Channel(connection, self._context, server_side=True, seconds=CONNECTION_S, max_bytes=MAX_REQUEST_BYTES)
        channel.handshake()
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        channel.send(JoinHello(JOIN_MARK, challenge, int(time.time())))
        request = channel.receive(JoinRequest, MAX_REQUEST_BYTES)
        try:
            answer = admit(self._network, request, challenge=challenge, server_certificate=self._certificate, address=address)
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
        """Log what strangers can cause, now and then."""
        logger.log(logging.WARNING if self._throttle.should_log() else logging.DEBUG, "%s", text)


def listen_at(endpoint: str) -> socket.socket:
    """A socket that listens at an endpoint such as tls/0.0.0.0:7448."""
    _, host, port = split(endpoint)
    bare = host.strip("[]")
    family, *_, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    dual = family == socket.AF_INET6 and bare == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual)
