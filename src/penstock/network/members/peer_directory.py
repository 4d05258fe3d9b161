"""PeerDirectory: how nodes get to know each other and exchange records. It makes and reads bytes; others carry them.

A *session* is one epoch of a node: its process from start to end. When a session is announced, a node sends it a question: its
own card, and the revocations it knows. The answer has the same of the other side, and its record, sealed for the asker. After
this round trip each has the other's keys, and the asker knows which session answered: no other can have sealed the record.

Later records are sent sealed, and again every second until a receipt comes. In the end every node has every other's newest
record, whatever is lost and in whichever order things arrive:

- Both sides of a pair see each other's announcement and ask until they get an answer, so both end up with proof and keys.
- A node sends its newest record to every proven session until a receipt for it comes, and a receipt is given only for a record
  that was stored. One that arrives before its sender was met, or announced, is not stored, and comes again.
- Records carry their counter, so an older one that arrives later changes nothing.
- A large record is not part of an answer. It is sent in parts, on the stream for bulk, so that it neither holds up other messages
  nor makes a slow link look dead.
- When a session ends, all that was known about it is dropped; the next one has another epoch and starts from nothing.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.errors import MalformedMessage, PenstockError, Unreachable, Untrusted
from penstock.network.log_throttle import LogThrottle
from penstock.network.members.blocklist import Blocklist
from penstock.network.members.roster import Issue, Roster
from penstock.network.parts import PART_BYTES, Assembler, Part, Source, offsets, read_part
from penstock.network.rate_limit import RateLimit
from penstock.network.router import MAX_RECORD_BYTES, unreachable
from penstock.network.stream import Stream
from penstock.network.trust.keyring import MAX_CARD_BYTES, Envelope, Keyring, Sealed, read_envelope
from penstock.network.trust.revocations import MAX_LIST_BYTES

PART, RECORD, RECEIPT, REVOCATIONS, PARTS_RECEIPT, RECORD_PART, MESSAGE = range(7)  # kinds of what is sealed
FOR_MESSENGER = (MESSAGE, PART, PARTS_RECEIPT)
COUNTER = struct.Struct(">Q")  # in front of a record; alone it is a receipt
MAX_COUNTED_SENDERS = 256  # with refusal counts of their own
UNKNOWN_SENDERS = "(others)"  # name for all others; no node can have it
MAX_GREETING_BYTES = MAX_CARD_BYTES + MAX_LIST_BYTES + PART_BYTES + 1024
MAX_UNFINISHED_RECORDS_BYTES = 64 * MAX_RECORD_BYTES  # of all senders together
MAX_RECORDS_PER_S = 5  # per sender; an honest one sends one a second, or several when its layers change
MAX_LISTS_PER_S = 1  # of revocations
BURST_S = 5  # a sender that was silent may send this many seconds' worth at once
MIN_BYTES_PER_SECOND = 50_000  # assumed speed of a large record, to time its retransmission

logger = logging.getLogger("penstock.network")


class _Greeting(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A question, which has no sealed record, or the answer to one."""

    card: bytes
    revocations: bytes
    envelope: bytes = b""
    body: bytes = b""


class PeerDirectory:
    """What this node knows about the others, and the bytes that it exchanges with them.

    on_change: called when records may have changed. It must be quick.
    on_revoked: called when a certificate was revoked. It must be quick.
    """

    def __init__(
        self,
        keyring: Keyring,
        roster: Roster,
        blocklist: Blocklist | None,
        *,
        on_change: Callable[[], None],
        on_revoked: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keyring = keyring
        self._roster = roster
        self._blocklist = blocklist
        self._on_change = on_change
        self._on_revoked = on_revoked
        self._clock = clock
        self._revoking = threading.Lock()
        self._counting = threading.Lock()
        self.refused: Counter[str] = Counter()  # by error code
        self.refused_from: Counter[str] = Counter()  # by the sender that a message names
        self._throttles: dict[str, LogThrottle] = {}  # by error code
        self._record_parts = Assembler(MAX_UNFINISHED_RECORDS_BYTES)  # used by the thread of the stream for bulk alone
        self._record_rate = RateLimit(MAX_RECORDS_PER_S, MAX_RECORDS_PER_S * BURST_S, clock)
        self._list_rate = RateLimit(MAX_LISTS_PER_S, MAX_LISTS_PER_S * BURST_S, clock)

    # ---- meeting ----

    def question(self) -> bytes:
        return msgspec.msgpack.encode(_Greeting(self._keyring.card(), self._revocations()))

    def answer(self, question: bytes) -> bytes:
        """Answer another node's question. Raises Untrusted or BadMessage."""
        greeting = self._read(question)
        asker = self._keyring.meet(greeting.card)
        own = self._own_record()
        if len(own) > PART_BYTES:
            own = COUNTER.pack(0)  # none yet
        sealed = self._keyring.seal(asker.node, asker.epoch, RECORD, own)
        return msgspec.msgpack.encode(_Greeting(self._keyring.card(), self._revocations(), *sealed))

    def accept_answer(self, node: str, epoch: int, answer: bytes) -> None:
        """Take a session's answer, which proves its identity. Raises Untrusted or BadMessage."""
        greeting = self._read(answer)
        peer = self._keyring.meet(greeting.card)
        if (peer.node, peer.epoch) != (node, epoch):
            raise Untrusted(f"Node '{peer.node}' answered a question to '{node}'.")
        sealed = Sealed(greeting.envelope, greeting.body)
        envelope = read_envelope(sealed.envelope)
        if (envelope.kind, envelope.sender) != (RECORD, epoch):
            raise MalformedMessage(f"The answer of '{node}' has no record.")
        self._store_record(node, epoch, self._keyring.open(node, sealed, envelope))

    def _read(self, data: bytes) -> _Greeting:
        """Decode a greeting and merge its revocations, before its card is looked at: that may be revoked."""
        if len(data) > MAX_GREETING_BYTES:
            raise MalformedMessage(f"A greeting has {len(data)} bytes; the limit is {MAX_GREETING_BYTES}.")
        try:
            greeting = msgspec.msgpack.decode(data, type=_Greeting)
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"A greeting cannot be read: {error}.") from None
        self._merge_revocations(greeting.revocations)
        return greeting

    # ---- sealed messages ----

    def current_epoch(self, node: str) -> int:
        """The epoch of the session of `node` that counts. Raises Unreachable if there is none."""
        epoch = self._roster.current_epoch(node)
        if epoch is None:
            raise unreachable(node)
        return epoch

    def seal(self, node: str, epoch: int, kind: int, data: bytes, stream: Stream) -> Sealed:
        """Seal data for a session. Raises Unreachable for an unknown session."""
        return self._keyring.seal(node, epoch, kind, data, stream)

    def open(self, sender: str, sealed: Sealed, stream: Stream = Stream.CONTROL) -> tuple[Envelope, bytes] | None:
        """Return what was sealed if it is for a Messenger; None if it was for this directory. Raises Untrusted or BadMessage.

        stream: the one that it arrived on, which is not sealed. Each has a thread of its own.
        """
        envelope = read_envelope(sealed.envelope)
        if envelope.receiver != self._keyring.epoch:  # for an earlier session of this node: usual after a restart
            self._count_sender(sender)
            return None
        if envelope.stream is not stream:
            raise MalformedMessage(f"A message from '{sender}' arrived on the wrong stream.")
        if not self._keyring.has_met(sender, envelope.sender):
            if self._roster.mark_unproven(sender, envelope.sender):
                self._on_change()
            raise Untrusted(f"Node '{sender}' sent a message before it introduced itself.")
        data = self._keyring.open(sender, sealed, envelope)
        self._roster.mark_active(sender, envelope.sender, self._clock())
        if envelope.kind in FOR_MESSENGER:
            return envelope, data
        if envelope.kind == RECORD:
            self._take_record(sender, envelope.sender, data)
        elif envelope.kind == RECORD_PART and stream is Stream.BULK:
            part = read_part(data)
            if part.total > COUNTER.size + MAX_RECORD_BYTES:
                raise MalformedMessage(f"The record of '{sender}' has {part.total} bytes; the limit is {MAX_RECORD_BYTES}.")
            record = self._record_parts.add(Source(sender, envelope.sender, stream), part)
            if record is not None:
                self._take_record(sender, envelope.sender, record)
        elif envelope.kind == RECEIPT and len(data) == COUNTER.size:
            self._roster.acknowledge(sender, envelope.sender, *COUNTER.unpack(data))
        elif envelope.kind == REVOCATIONS:
            if self._list_rate.allows(sender):
                self._merge_revocations(data)
        else:
            raise MalformedMessage(f"Node '{sender}' sent a message of unknown kind {envelope.kind}.")
        return None

    def outgoing(self) -> list[tuple[str, Sealed]]:
        """Seal the records and receipts that are due now; returns each with the node to send it to."""
        own = self._own_record()
        (counter,) = COUNTER.unpack_from(own)
        sessions = self._roster.records_due(counter, self._clock(), transfer=len(own) / MIN_BYTES_PER_SECOND)
        kind, pieces = (RECORD, [own]) if len(own) <= PART_BYTES else (RECORD_PART, _cut(counter, own))
        due = [(node, epoch, kind, piece) for node, epoch in sessions for piece in pieces]
        due += [(node, epoch, RECEIPT, COUNTER.pack(counter)) for node, epoch, counter in self._roster.receipts_due()]
        return self._seal_all(due)

    def revocation_notices(self) -> list[tuple[str, Sealed]]:
        """Seal the list of revocations for every live node."""
        live = [(node, self._roster.current_epoch(node)) for node in self._roster.records()]
        return self._seal_all([(node, epoch, REVOCATIONS, self._revocations()) for node, epoch in live if epoch is not None])

    def _seal_all(self, messages: list[tuple[str, int, int, bytes]]) -> list[tuple[str, Sealed]]:
        """Seal messages given as (node, epoch, kind, data)."""
        sealed = []
        for node, epoch, kind, data in messages:
            with contextlib.suppress(Unreachable):  # revoked just now
                if node != self._keyring.node:
                    stream = Stream.BULK if kind == RECORD_PART else Stream.CONTROL
                    sealed.append((node, self._keyring.seal(node, epoch, kind, data, stream)))
        return sealed

    # ---- records ----

    def _own_record(self) -> bytes:
        counter, record = self._roster.newest_record(self._keyring.node, self._keyring.epoch)
        return COUNTER.pack(counter) + (record or b"")

    def _take_record(self, node: str, epoch: int, data: bytes) -> None:
        """Store a record, unless its sender sends too many: without a receipt it comes again, a second later."""
        if self._record_rate.allows(node):
            self._store_record(node, epoch, data)

    def _store_record(self, node: str, epoch: int, data: bytes) -> None:
        if not COUNTER.size <= len(data) <= COUNTER.size + MAX_RECORD_BYTES:
            raise MalformedMessage(f"The record of '{node}' has {len(data)} bytes; the limit is {MAX_RECORD_BYTES}.")
        (counter,) = COUNTER.unpack_from(data)
        if node == self._keyring.node:
            return  # another process has this node's name: the router logs it
        if self._roster.store_record(node, Issue(epoch, counter), data[COUNTER.size :], self._clock()):
            self._on_change()

    # ---- expired and revoked certificates ----

    def refresh(self) -> None:
        """Drop nodes whose certificates have expired, and read new revocations from the file."""
        for peer in self._keyring.expire():
            if (peer.node, peer.epoch) == (self._keyring.node, self._keyring.epoch):
                logger.error("the certificate of this node has expired: other nodes no longer accept it")
            else:
                logger.warning("the certificate of node %s has expired", peer.node)
                self._roster.vanished(peer.node, peer.epoch)
            self._on_change()
        if self._blocklist is None:
            return
        with self._revoking:
            try:
                if self._blocklist.reload():
                    self._revoke(self._blocklist)
            except Untrusted as error:
                logger.error("the list of revocations cannot be used; earlier revocations stay in force: %s", error)

    def _merge_revocations(self, data: bytes) -> None:
        if self._blocklist is None:
            return
        with self._revoking:
            if self._blocklist.merge(data):
                self._revoke(self._blocklist)

    def _revoke(self, blocklist: Blocklist) -> None:
        for peer in self._keyring.revoke(blocklist.current):
            logger.warning("the certificate of node %s was revoked", peer.node)
            if peer.node != self._keyring.node:
                self._roster.vanished(peer.node, peer.epoch)
        self._on_change()
        self._on_revoked()

    def _revocations(self) -> bytes:
        return self._blocklist.data if self._blocklist is not None else b""

    # ---- refusals ----

    def refuse(self, error: PenstockError, sender: str = "") -> None:
        """Count a refused message, and log it now and then: a hostile member must not fill the log.

        sender: the node that it claims to be from. Any member can claim to be any other.
        """
        if sender:
            self._count_sender(sender)
        with self._counting:
            self.refused[error.code] += 1
            count = self.refused.total()
            throttle = self._throttles.setdefault(error.code, LogThrottle(self._clock))
            level = logging.WARNING if throttle.should_log() else logging.DEBUG
        logger.log(level, "refused a message from the network (%d so far): %s", count, error)

    def _count_sender(self, sender: str) -> None:
        with self._counting:
            known = sender in self.refused_from or (len(self.refused_from) < MAX_COUNTED_SENDERS and self._keyring.knows(sender))
            self.refused_from[sender if known else UNKNOWN_SENDERS] += 1


def _cut(number: int, record: bytes) -> list[bytes]:
    view = memoryview(record)
    return [Part(False, number, start, len(record), view[start : start + PART_BYTES]).pack() for start in offsets(len(record))]
