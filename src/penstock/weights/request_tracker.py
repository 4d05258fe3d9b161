"""RequestTracker: parts of a model as streams of bytes, each from one node. Notices who is silent, busy, slow or wrong."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.errors import WeightsUnavailable
from penstock.weights.manifest import MAX_MANIFEST

PIECE = 1 << 18  # bytes per ask
WINDOW = 8  # asks under way to one node; what has come out of order is counted too
TIMEOUT = 5.0  # seconds of silence after which everything under way is asked for again
TRIES = 2
BUSY = 30.0  # seconds that a node may put us off
LONGEST_PAUSE = 1.0  # seconds until it is asked again
SPAN = 15.0  # seconds over which a node is measured
LEAST_RATE = 200e3  # bytes per second, below which a node is slow
KEPT = "What was fetched is kept, and the next fetch goes on from there."

Bytes = bytes | bytearray | memoryview


class Failed(Exception):
    """A node that is of no use any more, and why."""


class PartRefused(Failed):
    """A node that does not have what was asked for; it may have other parts."""


class TooSlow(Failed):
    """A node that is slow, while another has time for what it was asked for."""


class Stopped(WeightsUnavailable):
    """Fetching was broken off."""

    def __init__(self) -> None:
        super().__init__("Fetching weights was broken off, since this node leaves.", hint=KEPT)


class RequestTracker:
    """Numbers the asks of this node, and gives each answer to the stream that waits for it."""

    def __init__(
        self,
        send: Callable[[str, AskWeights], None],
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self.timeout, self.clock = send, timeout, clock
        self._lock = threading.Lock()
        self._asked: dict[int, Stream] = {}  # by request
        self._numbers = itertools.count(1)
        self._streams: set[Stream] = set()
        self.closed = threading.Event()

    def stream(self, peer: str, wanted: AskWeights, total: int | None) -> Stream:
        """The bytes of the part from `wanted.offset` on; `total` is None where only the other node knows."""
        return Stream(self, peer, wanted, total)

    def on_part(self, sender: str, answer: WeightsPart) -> None:
        with self._lock:
            stream = self._asked.get(answer.request)
            if stream is None or stream.peer != sender:
                return  # too late, or nobody asked it
            del self._asked[answer.request]
        stream.put(answer)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            for stream in self._streams:
                stream.put(Stopped())

    # ---- for streams ----

    def enter(self, stream: Stream) -> None:
        with self._lock:
            if self.closed.is_set():
                raise Stopped
            self._streams.add(stream)

    def leave(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def ask(self, stream: Stream, ask: AskWeights) -> AskWeights:
        """The ask, with its number."""
        with self._lock:
            ask = replace(ask, request=next(self._numbers))
            self._asked[ask.request] = stream
        self._send(stream.peer, ask)
        return ask

    def forget(self, requests: Iterable[int]) -> None:
        """Whoever answers these now is too late."""
        with self._lock:
            for request in requests:
                self._asked.pop(request, None)


class Stream:
    """A part, or the rest of one, from one node: going through it gives its bytes in order.

    That raises Failed when the node is of no use any more, Refused when it does not have this part, and what another thread
    has `put`.
    """

    def __init__(self, desk: RequestTracker, peer: str, wanted: AskWeights, total: int | None) -> None:
        self.peer = peer
        self._desk, self._wanted, self._total = desk, wanted, total
        self._mailbox: SimpleQueue[WeightsPart | Exception] = SimpleQueue()  # its own: no answer to another part gets in
        self._at = self._end = wanted.offset  # what was handed on, and what was asked for
        self._asked: dict[int, AskWeights] = {}  # by request
        self._put_off: list[AskWeights] = []  # the node was busy; they wait until nothing else is under way
        self._pause = 0.0  # seconds, then
        self._arrived: dict[int, Bytes] = {}  # by offset
        self._heard, self._silences = desk.clock(), 0
        self._measured, self._slow = (desk.clock(), self._at), False  # when and where it was then

    def __iter__(self) -> Iterator[Bytes]:
        self._desk.enter(self)
        try:
            while not self.done:
                yield from self._next()
        finally:
            self._desk.leave(self)
            self._desk.forget(self._asked)

    @property
    def done(self) -> bool:
        return self._at == self._total

    def put(self, answer: WeightsPart | Exception) -> None:
        """Called by any thread; an exception ends it."""
        self._mailbox.put(answer)

    def is_slow(self) -> bool:
        """Whether less than LEAST_RATE came in the last SPAN that is over. Called by one thread, which looks after the stream."""
        now, (then, before) = self._desk.clock(), self._measured
        if now - then >= SPAN:
            self._slow = self._at - before < LEAST_RATE * (now - then)
            self._measured = now, self._at
        return self._slow and not self.done

    def _next(self) -> Iterator[Bytes]:
        """Hear one answer, and hand on what is in order now."""
        if not self._asked:
            self._ask_those_put_off()
        self._ask_ahead()
        answer = self._hear()
        if answer is None:
            self._ask_again()
            return
        ask = self._asked.pop(answer.request, None)
        if ask is None:
            return  # it came just when it was asked for again
        if answer.reason:
            self._put_off.append(ask)
            self._check_refusal(answer)
            return
        self._heard, self._total = self._desk.clock(), _checked(ask, answer, self._total)
        self._arrived[ask.offset] = answer.data
        while self._at in self._arrived:
            data = self._arrived.pop(self._at)
            self._at += len(data)
            yield data

    def _ask_ahead(self) -> None:
        window = 1 if self._total is None else WINDOW
        while len(self._asked) + len(self._put_off) + len(self._arrived) < window and self._end != self._total:
            length = PIECE if self._total is None else min(PIECE, self._total - self._end)
            self._ask(replace(self._wanted, offset=self._end, length=length))
            self._end = self._end + length if self._total is None else min(self._end + length, self._total)

    def _ask(self, ask: AskWeights) -> None:
        ask = self._desk.ask(self, ask)
        self._asked[ask.request] = ask

    def _hear(self) -> WeightsPart | None:
        """The next answer; None when there was none for too long."""
        try:
            answer = self._mailbox.get(timeout=self._desk.timeout)
        except Empty:
            return None
        if isinstance(answer, Exception):
            raise answer
        self._silences = 0
        return answer

    def _ask_again(self) -> None:
        self._silences += 1
        if self._silences == TRIES:
            raise Failed(f"did not answer for {self._desk.timeout * TRIES:g} seconds")
        again, self._asked = self._asked, {}
        self._desk.forget(again)
        for ask in again.values():
            self._ask(ask)

    def _check_refusal(self, answer: WeightsPart) -> None:
        reason = "".join(letter if letter.isprintable() else "?" for letter in answer.reason[:200])  # it will be logged
        if not answer.retry_after:
            raise PartRefused(f"says that {reason}")
        if self._desk.clock() - self._heard > BUSY:
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
