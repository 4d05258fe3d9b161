"""Machines that join a network over real sockets, with a token that is valid once."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from penstock.config.home import Home, JoinedNetwork
from penstock.errors import BadMessage
from penstock.network.joining import admission, authority, invitation_book
from penstock.network.joining.join_listener import JoinListener
from penstock.network.joining.join_protocol import (
    JOIN_MARK,
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    Channel,
    JoinAnswer,
    JoinHello,
    JoinRequest,
    prove,
)
from penstock.network.joining.join_token import JoinToken
from penstock.network.trust.certificates import new_key, signing_request
from penstock.network.trust.listening import split
from tests.server import free_port

CHALLENGE = bytes(32)
SERVER_CERTIFICATE = b"shown by the server"
HOURS_AGO = datetime.now(UTC) - timedelta(hours=6, minutes=30)  # an invitation of that time has expired, and is still answered


def created(folder: Path, name: str = "home", node: str = "desk") -> JoinedNetwork:
    return authority.create(Home(folder), name, node=node, listen=f"tls/127.0.0.1:{free_port()}")


@contextmanager
def listening(network: JoinedNetwork) -> Iterator[JoinListener]:
    """The authority's part of a running node; there must have been an invitation."""
    listener = JoinListener(network, admission.join_endpoint(network, invitation_book.read(network).port))
    try:
        yield listener
    finally:
        listener.close()


def request_of(
    token: JoinToken,
    key: ec.EllipticCurvePrivateKey | None = None,
    *,
    challenge: bytes = CHALLENGE,
    certificate: bytes = SERVER_CERTIFICATE,
) -> JoinRequest:
    asked = signing_request(key or new_key())
    return JoinRequest(token.id, asked, prove(token.secret, token.id, challenge, certificate, asked))


def admit(network: JoinedNetwork, request: JoinRequest, now: datetime | None = None) -> JoinAnswer:
    return admission.admit(
        network, request, challenge=CHALLENGE, server_certificate=SERVER_CERTIFICATE, address="192.0.2.9", now=now
    )


def connected(token: JoinToken) -> socket.socket:
    _, host, port = split(token.endpoints[0])
    return socket.create_connection((host, port), 10)


def client_channel(connection: socket.socket, network: JoinedNetwork) -> Channel:
    """The conversation of a client that checks nothing, up to the hello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cafile=network.ca_file)
    channel = Channel(connection, context, server_side=False, seconds=10, max_bytes=MAX_ANSWER_BYTES)
    channel.handshake()
    return channel


class Impostor:
    """A server that shows some certificate and notes every request that it gets."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self.requests: list[JoinRequest] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tls/127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with closing(connection), suppress(OSError, BadMessage):
                channel = Channel(connection, self._context, server_side=True, seconds=10, max_bytes=MAX_REQUEST_BYTES)
                channel.handshake()
                channel.send(JoinHello(JOIN_MARK, CHALLENGE, 0))
                self.requests.append(channel.receive(JoinRequest, MAX_REQUEST_BYTES))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
