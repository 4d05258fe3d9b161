"""The messages between the authority and a machine that joins, over TLS 1.3.

    authority → machine   JoinHello: a random challenge, and the time
    machine → authority   JoinRequest: which invitation, a signing request for the machine's own key, and a proof
    authority → machine   JoinAnswer: the certificate and all else that a member needs, or why it is refused

The proof shows that the machine knows the secret of the invitation, and is good for this challenge, this server certificate and
this signing request alone: a recording of it is useless, and it is sent to no server but the authority's.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from penstock.errors import MalformedMessage
from penstock.network.joining.invitation import MAX_CERTIFICATE_BYTES, MAX_ENDPOINTS, Endpoint
from penstock.network.joining.invitation_book import InvitationId
from penstock.network.trust import revocation_stamp, revocations, trusted_models

JOIN_MARK = b"penstock join 1\n"  # in the hello and in the proof
CHALLENGE_BYTES = 32
PROOF_BYTES = 32
MAX_REQUEST_BYTES = 4 << 10
MAX_ANSWER_BYTES = revocations.MAX_LIST_BYTES + trusted_models.MAX_LIST_BYTES + (64 << 10)
MAX_HANDSHAKE_BYTES = 16 << 10
CHUNK_BYTES = 16 << 10
_LENGTH = struct.Struct(">I")

S = TypeVar("S", bound=msgspec.Struct)


class JoinRefusal(StrEnum):
    """Why a machine is refused. Without the secret of an invitation, it learns no more than INVALID."""

    NONE = ""
    INVALID = "invalid"
    USED = "used"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    LOCKED = "locked"
    FAILED = "failed"


class JoinHello(msgspec.Struct, array_like=True):
    """`time` is the authority's clock in Unix seconds. As in the next two, later versions may add fields at the end."""

    mark: bytes
    challenge: Annotated[bytes, Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
    time: int


class JoinRequest(msgspec.Struct, array_like=True):
    id: InvitationId
    signing_request: Annotated[bytes, Meta(max_length=MAX_REQUEST_BYTES)]
    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class JoinAnswer(msgspec.Struct, array_like=True):
    refusal: Annotated[str, Meta(max_length=32)]
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)] = b""
    endpoints: Annotated[tuple[Endpoint, ...], Meta(max_length=MAX_ENDPOINTS)] = ()
    revocations: Annotated[bytes, Meta(max_length=revocations.MAX_LIST_BYTES)] = b""
    stamp: Annotated[bytes, Meta(max_length=revocation_stamp.MAX_STAMP_BYTES)] = b""
    trusted: Annotated[bytes, Meta(max_length=trusted_models.MAX_LIST_BYTES)] = b""


def prove(secret: bytes, invitation_id: str, challenge: bytes, server_certificate: bytes, signing_request: bytes) -> bytes:
    """Return the proof for a request. `server_certificate`: in DER, as presented in TLS."""
    about = msgspec.msgpack.encode([invitation_id, challenge, server_certificate, signing_request])
    return hmac.digest(secret, JOIN_MARK + about, hashlib.sha256)


class Channel:
    """A TLS connection with one deadline for all of it, and one limit for all bytes that arrive, the handshake included.

    Sending a byte now and then does not keep it open. Raises OSError (also ssl.SSLError and TimeoutError) if the connection
    fails, and MalformedMessage for invalid messages.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool, seconds: float, max_bytes: int
    ) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds
        self._bytes_left = max_bytes + MAX_HANDSHAKE_BYTES
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server_side)

    def extend(self, seconds: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._deadline = time.monotonic() + seconds

    def close(self) -> None:
        self._connection.close()

    def handshake(self) -> None:
        self._run(self._tls.do_handshake)

    def peer_certificate(self) -> bytes:
        """The other side's certificate, in DER; TLS has proved that it holds the key."""
        return self._tls.getpeercert(binary_form=True) or b""

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self._run(lambda: self._tls.write(_LENGTH.pack(len(data)) + data))

    def receive(self, kind: type[S], max_bytes: int) -> S:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > max_bytes:
            raise MalformedMessage(f"A message about joining has {length} bytes; the limit is {max_bytes}.")
        try:
            return msgspec.msgpack.decode(self._read(length), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedMessage(f"A message about joining cannot be read: {error}.") from None

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            found: bytes = self._run(partial(self._tls.read, count - len(data)))
            if not found:
                raise ConnectionResetError("the connection was closed")
            data += found
        return data

    def _run(self, step: Callable[[], Any]) -> Any:
        """Run one TLS operation, receiving and sending the bytes that it needs."""
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the alert that tells the other side why
                raise
            else:
                self._flush()
                return result

    def _flush(self) -> None:
        if data := self._leaving.read():
            self._connection.settimeout(self._seconds_left())
            self._connection.sendall(data)

    def _fill(self) -> None:
        self._connection.settimeout(self._seconds_left())
        data = self._connection.recv(CHUNK_BYTES)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise MalformedMessage("Too many bytes arrived on a connection for joining.")
        if data:
            self._arrived.write(data)
        else:
            self._arrived.write_eof()

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the connection took too long")
        return left
