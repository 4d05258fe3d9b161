"""RequestTracker: parts of a model as streams of bytes, each from one node. Detects nodes that are silent, busy or slow."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

from penstock.domain.messages import AskWeights, WeightsPart
from penstock.errors import WeightsUnavailable
from penstock.weights.manifest import MAX_MANIFEST_BYTES

PIECE_BYTES = 1 << 18  # per request
MAX_IN_FLIGHT = 8  # requests per node, including answers that arrived out of order
ANSWER_TIMEOUT_S = 5.0  # of silence, after which all open requests are sent again
MAX_TIMEOUTS = 2
MAX_BUSY_S = 30.0  # a node that is busy for longer has failed
MAX_PAUSE_S = 1.0  # before a busy node is asked again
RATE_PERIOD_S = 15.0  # over which the rate of a node is measured
MIN_BYTES_PER_S = 200e3  # a slower node is too slow
RESUME_HINT = "What was fetched is kept; the next attempt continues from there."

Bytes = bytes | bytearray | memoryview


class Failed(Exception):
    """A node cannot be used any more, and why."""


class PartRefused(Failed):
    """A node does not have this part; it may have others."""


class TooSlow(Failed):
    """A node is slow, and another has time to send the part."""


class Stopped(WeightsUnavailable):
    """Fetching was stopped."""

    def __init__(self) -> None:
        super().__init__("Fetching weights was stopped because this node is leaving.", hint=RESUME_HINT)


class RequestTracker:
    """Numbers the requests of this node, and passes each answer to its stream."""

    def __init__(
        self,
        send: Callable[[str, AskWeights], None],
        timeout: float = ANSWER_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self.timeout = timeout
        self.clock = clock
        self._lock = threading.Lock()
        self._pending: dict[int, WeightsStream] = {}  # by request
        self._numbers = itertools.count(1)
        self._streams: set[WeightsStream] = set()
        self.closed = threading.Event()

    def stream(self, peer: str, wanted: AskWeights, total: int | None) -> WeightsStream:
        """Stream the bytes of a part from `wanted.offset` on; `total` is its size, None if only the other node knows it."""
        return WeightsStream(self, peer, wanted, total)

    def on_part(self, sender: str, answer: WeightsPart) -> None:
        with self._lock:
            stream = self._pending.get(answer.request)
            if stream is None or stream.peer != sender:
                return  # too late, or from a node that was not asked
            del self._pending[answer.request]
        stream.put(answer)

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            for stream in self._streams:
                stream.put(Stopped())

    # ---- for streams ----

    def enter(self, stream: WeightsStream) -> None:
        with self._lock:
            if self.closed.is_set():
                raise Stopped
            self._streams.add(stream)

    def leave(self, stream: WeightsStream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def ask(self, stream: WeightsStream, ask: AskWeights) -> AskWeights:
        """Send a request; returns it with its number."""
        with self._lock:
            ask = replace(ask, request=next(self._numbers))
            self._pending[ask.request] = stream
        self._send(stream.peer, ask)
        return ask

    def forget(self, requests: Iterable[int]) -> None:
        """Ignore answers to these requests from now on."""
        with self._lock:
            for request in requests:
                self._pending.pop(request, None)


class WeightsStream:
    """A part, or the rest of one, from one node: iterate over it to get its bytes in order.

    Raises Failed if the node cannot be used any more, PartRefused if it does not have this part, and any exception that another
    thread has `put`.
    """

    def __init__(self, tracker: RequestTracker, peer: str, wanted: AskWeights, total: int | None) -> None:
        self.peer = peer
        self._tracker = tracker
        self._wanted = wanted
        self._total = total
        self._mailbox: SimpleQueue[WeightsPart | Exception] = SimpleQueue()
        self._delivered = wanted.offset  # all bytes before it were handed on
        self._requested = wanted.offset  # all bytes before it were asked for
        self._pending: dict[int, AskWeights] = {}  # by request
        self._deferred: list[AskWeights] = []  # the node was busy: asked again once no other request is open
        self._pause = 0.0  # seconds before that
        self._arrived: dict[int, Bytes] = {}  # by offset
        self._received_at = tracker.clock()
        self._timeouts = 0
        self._measured = (tracker.clock(), self._delivered)  # the time of the last measurement, and the offset then
        self._slow = False

    def __iter__(self) -> Iterator[Bytes]:
        self._tracker.enter(self)
        try:
            while not self.done:
                yield from self._next()
        finally:
            self._tracker.leave(self)
            self._tracker.forget(self._pending)

    @property
    def done(self) -> bool:
        return self._delivered == self._total

    def put(self, answer: WeightsPart | Exception) -> None:
        """Add an answer, or an exception that ends the stream. May be called by any thread."""
        self._mailbox.put(answer)

    def is_slow(self) -> bool:
        """Whether the rate of the last full RATE_PERIOD_S was below MIN_BYTES_PER_S. To be called by one thread only."""
        now, (then, before) = self._tracker.clock(), self._measured
        if now - then >= RATE_PERIOD_S:
            self._slow = self._delivered - before < MIN_BYTES_PER_S * (now - then)
            self._measured = now, self._delivered
        return self._slow and not self.done

    def _next(self) -> Iterator[Bytes]:
        """Wait for one answer, and yield the bytes that are in order now."""
        if not self._pending:
            self._retry_deferred()
        self._ask_ahead()
        answer = self._next_answer()
        if answer is None:
            self._ask_again()
            return
        ask = self._pending.pop(answer.request, None)
        if ask is None:
            return  # it arrived just as it was asked for again
        if answer.reason:
            self._deferred.append(ask)
            self._check_refusal(answer)
            return
        self._received_at, self._total = self._tracker.clock(), _checked_total(ask, answer, self._total)
        self._arrived[ask.offset] = answer.data
        while self._delivered in self._arrived:
            data = self._arrived.pop(self._delivered)
            self._delivered += len(data)
            yield data

    def _ask_ahead(self) -> None:
        window = 1 if self._total is None else MAX_IN_FLIGHT
        while len(self._pending) + len(self._deferred) + len(self._arrived) < window and self._requested != self._total:
            length = PIECE_BYTES if self._total is None else min(PIECE_BYTES, self._total - self._requested)
            self._ask(replace(self._wanted, offset=self._requested, length=length))
            self._requested = self._requested + length if self._total is None else min(self._requested + length, self._total)

    def _ask(self, ask: AskWeights) -> None:
        ask = self._tracker.ask(self, ask)
        self._pending[ask.request] = ask

    def _next_answer(self) -> WeightsPart | None:
        """Wait for the next answer; None after a timeout."""
        try:
            answer = self._mailbox.get(timeout=self._tracker.timeout)
        except Empty:
            return None
        if isinstance(answer, Exception):
            raise answer
        self._timeouts = 0
        return answer

    def _ask_again(self) -> None:
        self._timeouts += 1
        if self._timeouts == MAX_TIMEOUTS:
            raise Failed(f"did not answer for {self._tracker.timeout * MAX_TIMEOUTS:g} seconds")
        again, self._pending = self._pending, {}
        self._tracker.forget(again)
        for ask in again.values():
            self._ask(ask)

    def _check_refusal(self, answer: WeightsPart) -> None:
        reason = "".join(letter if letter.isprintable() else "?" for letter in answer.reason[:200])  # it gets logged
        if not answer.retry_after:
            raise PartRefused(f"says that {reason}")
        if self._tracker.clock() - self._received_at > MAX_BUSY_S:
            raise Failed(f"has been busy for {MAX_BUSY_S:g} seconds: {reason}")
        self._pause = min(answer.retry_after, MAX_PAUSE_S)

    def _retry_deferred(self) -> None:
        if self._deferred:
            self._tracker.closed.wait(self._pause)
        for ask in self._deferred:
            self._ask(ask)
        self._deferred.clear()


def _checked_total(ask: AskWeights, answer: WeightsPart, total: int | None) -> int:
    """Return the part's size, if the answer fits this request."""
    expected = answer.total if total is None else total
    if total is None and expected > MAX_MANIFEST_BYTES:
        raise Failed(f"has a manifest of {expected} bytes; the limit is {MAX_MANIFEST_BYTES}")
    if (answer.offset, answer.total, len(answer.data)) != (ask.offset, expected, min(ask.length, expected - ask.offset)):
        raise Failed("sent bytes that were not asked for")
    return expected
