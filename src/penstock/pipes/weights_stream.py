"""Correspondent: a part of a model from one node, as a stream of bytes. Asks ahead, and notices who is silent, busy or wrong."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.errors import WeightsUnavailable
from penstock.model.manifest import MAX_MANIFEST

PIECE = 1 << 18  # bytes per ask
WINDOW = 8  # asks under way to one node; what has come out of order is counted too
TIMEOUT = 5.0  # seconds of silence after which everything under way is asked for again
TRIES = 2
BUSY = 30.0  # seconds that a node may put us off
LONGEST_PAUSE = 1.0  # seconds until it is asked again
KEPT = "What was fetched is kept, and the next fetch goes on from there."

Bytes = bytes | bytearray | memoryview
Mailbox = SimpleQueue[WeightsPart | None]  # None: stop


class Failed(Exception):
    """A node that is of no use any more, and why."""


class Refused(Failed):
    """A node that does not have what was asked for; it may have other parts."""


class Stopped(WeightsUnavailable):
    """Fetching was broken off."""

    def __init__(self) -> None:
        super().__init__("Fetching weights was broken off, since this node leaves.", hint=KEPT)


class Correspondent:
    """Numbers the asks of this node, and puts each answer into the mailbox of the stream that waits for it."""

    def __init__(self, send: Callable[[str, AskWeights], None], timeout: float = TIMEOUT) -> None:
        self._send, self.timeout = send, timeout
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[str, Mailbox]] = {}  # by request
        self._numbers = itertools.count(1)
        self._mailboxes: set[Mailbox] = set()
        self.closed = threading.Event()

    def stream(self, peer: str, wanted: AskWeights, total: int | None, mailbox: Mailbox) -> Iterator[Bytes]:
        """The bytes of the part from `wanted.offset` on, in order; `total` is None where only the other node knows.

        Raises Failed when the node is of no use any more, Refused when it does not have this part.
        """
        with self._lock:
            if self.closed.is_set():
                raise Stopped
            self._mailboxes.add(mailbox)
        stream = _Stream(self, peer, wanted, total, mailbox)
        try:
            while not stream.done:
                yield from stream.next()
        finally:
            with self._lock:
                self._mailboxes.discard(mailbox)
                for number in stream.asked:
                    self._asked.pop(number, None)

    def ask(self, peer: str, ask: AskWeights, mailbox: Mailbox) -> AskWeights:
        """The ask, with its number."""
        with self._lock:
            ask = replace(ask, request=next(self._numbers))
            self._asked[ask.request] = peer, mailbox
        self._send(peer, ask)
        return ask

    def on_part(self, sender: str, answer: WeightsPart) -> None:
        with self._lock:
            peer, mailbox = self._asked.get(answer.request, ("", None))
            if mailbox is None or peer != sender:
                return  # too late, or nobody asked it
            del self._asked[answer.request]
        mailbox.put(answer)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            for mailbox in self._mailboxes:
                mailbox.put(None)


class _Stream:
    def __init__(self, desk: Correspondent, peer: str, wanted: AskWeights, total: int | None, mailbox: Mailbox) -> None:
        self._desk, self._peer, self._wanted, self._total, self._mailbox = desk, peer, wanted, total, mailbox
        self._at = self._end = wanted.offset  # what was handed on, and what was asked for
        self.asked: dict[int, AskWeights] = {}  # by request
        self._put_off: list[AskWeights] = []  # the node was busy; they wait until nothing else is under way
        self._pause = 0.0  # seconds, then
        self._arrived: dict[int, Bytes] = {}  # by offset
        self._heard, self._silences = time.monotonic(), 0

    @property
    def done(self) -> bool:
        return self._at == self._total

    def next(self) -> Iterator[Bytes]:
        """Hear one answer, and hand on what is in order now."""
        if not self.asked:
            self._ask_those_put_off()
        self._ask_ahead()
        answer = self._hear()
        if answer is None:
            self._ask_again()
            return
        ask = self.asked.pop(answer.request)
        if answer.reason:
            self._put_off.append(ask)
            self._check_refusal(answer)
            return
        self._heard, self._total = time.monotonic(), _checked(ask, answer, self._total)
        self._arrived[ask.offset] = answer.data
        while self._at in self._arrived:
            data = self._arrived.pop(self._at)
            self._at += len(data)
            yield data

    def _ask_ahead(self) -> None:
        window = 1 if self._total is None else WINDOW
        while len(self.asked) + len(self._put_off) + len(self._arrived) < window and self._end != self._total:
            length = PIECE if self._total is None else min(PIECE, self._total - self._end)
            self._ask(replace(self._wanted, offset=self._end, length=length))
            self._end = self._end + length if self._total is None else min(self._end + length, self._total)

    def _ask(self, ask: AskWeights) -> None:
        ask = self._desk.ask(self._peer, ask, self._mailbox)
        self.asked[ask.request] = ask

    def _hear(self) -> WeightsPart | None:
        """The next answer; None when there was none for too long."""
        try:
            answer = self._mailbox.get(timeout=self._desk.timeout)
        except Empty:
            return None
        if answer is None:
            raise Stopped
        self._silences = 0
        return answer

    def _ask_again(self) -> None:
        self._silences += 1
        if self._silences == TRIES:
            raise Failed(f"did not answer for {self._desk.timeout * TRIES:g} seconds")
        for number in list(self.asked):
            self._ask(self.asked.pop(number))

    def _check_refusal(self, answer: WeightsPart) -> None:
        reason = "".join(letter if letter.isprintable() else "?" for letter in answer.reason[:200])  # it will be logged
        if not answer.retry_after:
            raise Refused(f"says that {reason}")
        if time.monotonic() - self._heard > BUSY:
            raise Failed(f"put us off for {BUSY:g} seconds: {reason}")
        self._pause = min(answer.retry_after, LONGEST_PAUSE)

    def _ask_those_put_off(self) -> None:
        if self._put_off:
            self._desk.closed.wait(self._pause)
        for ask in self._put_off:
            self._ask(ask)
        self._put_off.clear()


def _checked(ask: AskWeights, answer: WeightsPart, total: int | None) -> int:
    """The part's size, if the answer is one to this ask."""
    expected = answer.total if total is None else total
    if total is None and expected > MAX_MANIFEST:
        raise Failed(f"has a manifest of {expected} bytes")
    if (answer.offset, answer.total, len(answer.data)) != (ask.offset, expected, min(ask.length, expected - ask.offset)):
        raise Failed("sent other bytes than it was asked for")
    return expected
