"""PeerDirectory: how a node gets to know the others and what they publish, in bytes. Who carries them is not its business.

Hearing of a life, a node asks it: "this is my card, and these are the revocations that I know of". The answer has the same of
the other side, and its record, sealed for the asker. So after one round trip each has the other's keys, and the asker knows that
the other one is who it says: nobody else can have sealed that record.

Later records are sent sealed, and again every second until a receipt comes. That is all that is needed for everybody to have
everybody's newest record in the end, whatever is lost and whichever way things overtake each other:

- Both sides of a pair hear of each other's life and ask until they get an answer; so both have proof and keys in the end.
- Whoever counts a life as proven sends it its newest record until a receipt for that one comes, and a receipt is given only for
  what is kept. A record that comes before its sender was met, or before the sign of that life, is not kept, and comes again.
- Records carry their counter, so an older one that arrives later changes nothing.
- A life that is over takes all that was known of it along; the next one has another epoch, and begins anew.
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
from penstock.network.blocklist import Blocklist
from penstock.network.log_throttle import LogThrottle
from penstock.network.roster import Issue, Roster
from penstock.network.trust.keyring import MOST_CARD, Keyring, Sealed, read_envelope
from penstock.network.trust.revocations import MOST_BYTES

MESSAGE, RECORD, RECEIPT, REVOCATIONS = range(4)  # kinds of letters
MOST_RECORD = 1 << 20  # bytes
COUNTER = struct.Struct(">Q")  # of a record, which follows; alone it is a receipt
MOST_GREETING = MOST_CARD + MOST_BYTES + MOST_RECORD + 1024

logger = logging.getLogger("penstock.network")


class _Greeting(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A question has no record in it."""

    card: bytes
    revocations: bytes
    envelope: bytes = b""
    body: bytes = b""


class PeerDirectory:
    """`on_change` is called when records may have changed, `on_revoked` when a certificate was taken back. Both must be quick."""

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
        self._keyring, self._roster, self._blocklist = keyring, roster, blocklist
        self._on_change, self._on_revoked, self._clock = on_change, on_revoked, clock
        self._revoking = threading.Lock()
        self.refused: Counter[str] = Counter()
        self._telling = LogThrottle(clock)

    # ---- meeting ----

    def question(self) -> bytes:
        return msgspec.msgpack.encode(_Greeting(self._keyring.card(), self._list()))

    def answer(self, question: bytes) -> bytes:
        """Raises Untrusted or BadMessage."""
        said = self._read(question)
        asker = self._keyring.meet(said.card)
        sealed = self._keyring.seal(asker.node, asker.epoch, RECORD, self._own_record())
        return msgspec.msgpack.encode(_Greeting(self._keyring.card(), self._list(), *sealed))

    def hear_answer(self, node: str, epoch: int, answer: bytes) -> None:
        """That life has proved itself when nothing is raised. Raises Untrusted or BadMessage."""
        said = self._read(answer)
        life = self._keyring.meet(said.card)
        if (life.node, life.epoch) != (node, epoch):
            raise Untrusted(f"Node '{life.node}' answered for '{node}'.")
        sealed = Sealed(said.envelope, said.body)
        if read_envelope(sealed.envelope)[:2] != (RECORD, epoch):
            raise MalformedMessage(f"The answer of '{node}' is without a record.")
        self._hear_record(node, epoch, self._keyring.open(node, sealed))

    def _read(self, greeting: bytes) -> _Greeting:
        """The revocations come first: the card may be of one of them."""
        if len(greeting) > MOST_GREETING:
            raise MalformedMessage(f"A greeting of {len(greeting)} bytes is larger than {MOST_GREETING}.")
        try:
            said = msgspec.msgpack.decode(greeting, type=_Greeting)
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"A greeting cannot be read: {error}.") from None
        self._hear_list(said.revocations)
        return said

    # ---- letters ----

    def seal(self, node: str, data: bytes) -> Sealed:
        """A message for the life of `node` that counts. Raises Unreachable."""
        epoch = self._roster.life(node)
        return self._keyring.seal(node, -1 if epoch is None else epoch, MESSAGE, data)

    def open(self, sender: str, sealed: Sealed) -> bytes | None:
        """A message, or None where there is nothing to hand on. Raises Untrusted or BadMessage."""
        envelope = read_envelope(sealed.envelope)
        if envelope.receiver != self._keyring.epoch:
            return None  # for another life of this node
        if not self._keyring.has_met(sender, envelope.sender):
            if self._roster.unread(sender, envelope.sender):
                self._on_change()
            raise Untrusted(f"Node '{sender}' has sent something, but was not met yet.")
        data = self._keyring.open(sender, sealed)
        self._roster.spoke(sender, envelope.sender, self._clock())
        if envelope.kind == MESSAGE:
            return data
        if envelope.kind == RECORD:
            self._hear_record(sender, envelope.sender, data)
        elif envelope.kind == RECEIPT and len(data) == COUNTER.size:
            self._roster.told(sender, envelope.sender, *COUNTER.unpack(data))
        elif envelope.kind == REVOCATIONS:
            self._hear_list(data)
        else:
            raise MalformedMessage(f"Node '{sender}' has sent something of an unknown kind ({envelope.kind}).")
        return None

    def letters(self) -> list[tuple[str, Sealed]]:
        """Records and receipts that are due now, for whom."""
        own, letters = self._own_record(), []
        (counter,) = COUNTER.unpack_from(own)
        for node, epoch in self._roster.to_tell(counter, self._clock()):
            letters.append((node, epoch, RECORD, own))
        for node, epoch, counter in self._roster.receipts():
            letters.append((node, epoch, RECEIPT, COUNTER.pack(counter)))
        return self._sealed(letters)

    def warnings(self) -> list[tuple[str, Sealed]]:
        """The list of revocations, for everybody who is there."""
        lives = [(node, self._roster.life(node)) for node in self._roster.records()]
        return self._sealed([(node, epoch, REVOCATIONS, self._list()) for node, epoch in lives if epoch is not None])

    def _sealed(self, letters: list[tuple[str, int, int, bytes]]) -> list[tuple[str, Sealed]]:
        sealed = []
        for node, epoch, kind, data in letters:
            with contextlib.suppress(Unreachable):  # revoked just now
                if node != self._keyring.node:
                    sealed.append((node, self._keyring.seal(node, epoch, kind, data)))
        return sealed

    # ---- records ----

    def _own_record(self) -> bytes:
        counter, record = self._roster.issue(self._keyring.node, self._keyring.epoch)
        return COUNTER.pack(counter) + (record or b"")

    def _hear_record(self, node: str, epoch: int, data: bytes) -> None:
        if not COUNTER.size <= len(data) <= COUNTER.size + MOST_RECORD:
            raise MalformedMessage(f"The record of '{node}' has {len(data)} bytes; up to {MOST_RECORD} are taken.")
        (counter,) = COUNTER.unpack_from(data)
        if node == self._keyring.node:
            return  # another process has this node's name: the router tells
        if self._roster.heard(node, Issue(epoch, counter), data[COUNTER.size :], self._clock()):
            self._on_change()

    # ---- who is out ----

    def look(self) -> None:
        """Whether the file has new revocations, and whose certificate has ended meanwhile."""
        for life in self._keyring.expire():
            if (life.node, life.epoch) == (self._keyring.node, self._keyring.epoch):
                logger.error("the certificate of this node has ended: other nodes do not talk to it any more")
            else:
                logger.warning("the certificate of node %s has ended", life.node)
                self._roster.vanished(life.node, life.epoch)
            self._on_change()
        if self._blocklist is None:
            return
        with self._revoking:
            try:
                if self._blocklist.look():
                    self._revoke(self._blocklist)
            except Untrusted as error:
                logger.error("the list of revocations cannot be used, what is known still counts: %s", error)

    def _hear_list(self, data: bytes) -> None:
        if self._blocklist is None:
            return
        with self._revoking:
            if self._blocklist.offer(data):
                self._revoke(self._blocklist)

    def _revoke(self, blocklist: Blocklist) -> None:
        for life in self._keyring.revoke(blocklist.current):
            logger.warning("the certificate of node %s was revoked", life.node)
            if life.node != self._keyring.node:
                self._roster.vanished(life.node, life.epoch)
        self._on_change()
        self._on_revoked()

    def _list(self) -> bytes:
        return self._blocklist.data if self._blocklist is not None else b""

    # ---- what was refused ----

    def refuse(self, error: PenstockError) -> None:
        """Count it, and tell now and then: a hostile member must not fill the log."""
        self.refused[error.code] += 1
        if self._telling.should_log():
            logger.warning("something from the network was refused (%d so far): %s", self.refused.total(), error)
        else:
            logger.debug("something from the network was refused: %s", error)
