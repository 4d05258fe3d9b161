"""Presence: an open Zenoh session and what a node declares in it. A node may have several, one after the other.

Keys, all under `penstock/<network>/`:

    alive/<node>/<epoch>                    a liveliness token; it vanishes with the process, or after a lease of silence
    meet/<node>/<epoch>/<asker>             questions to that epoch of a node, which it answers
    inbox/<destination>/<stream>/<sender>   sealed messages: the envelope as the attachment, and the body

Any member of the network can declare and write any of them. PeerDirectory decides what to believe.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.network.log_throttle import LogThrottle
from penstock.network.router import is_node_id, join, unreachable
from penstock.network.stream import Stream
from penstock.network.trust.keyring import Sealed
from penstock.network.zenoh.link_guard import CHECK_INTERVAL_S, LinkGuard

if TYPE_CHECKING:
    from zenoh import Publisher, Query, Reply, Sample

INBOX_DEPTH = 4096  # messages of a stream; a full inbox would stall the link and everything else that the sender sends
EVENTS_DEPTH = 1024
ANSWER_TIMEOUT_S = 2.0
SUBSCRIBER_TIMEOUT_S = 2.0  # for the inbox of a node that has just appeared
SUBSCRIBER_TTL_S = 0.05  # what is published just after a subscriber left is lost on the way anyhow
CLOSE_TIMEOUT_S = 2.0  # with a frozen peer and a full wire, closing Zenoh takes ten seconds
MAX_EPOCH = 1 << 63

logger = logging.getLogger("penstock.network")


class Address(NamedTuple):
    """The node whose presence this is."""

    network: str
    node: str
    epoch: int

    @property
    def root(self) -> str:
        return f"penstock/{self.network}"


class PresenceListener(Protocol):
    """Receives all that arrives. Methods are called on threads of their own; their exceptions are logged, now and then."""

    def on_sealed(self, sender: str, stream: Stream, sealed: Sealed) -> None:
        """Take a sealed message. Each stream has a thread of its own."""

    def on_question(self, question: bytes) -> bytes | None: ...

    def on_answer(self, node: str, epoch: int, answer: bytes) -> None: ...

    def on_liveliness(self, node: str, epoch: int, *, alive: bool) -> None: ...


class Presence:
    """An open session. Zenoh is never called from its own callbacks: events go through channels to threads of this object."""

    def __init__(self, session: Any, address: Address, guard: LinkGuard) -> None:
        self.session = session
        self._address = address
        self._guard = guard
        self._guard_now = threading.Event()
        self._guard_wait = 0.0  # seconds until the next check
        self._outlets: dict[tuple[str, Stream], _Outlet] = {}
        self._connecting = threading.Lock()
        self._ended = threading.Event()
        self._answers: queue.Queue[Reply | None] = queue.Queue(EVENTS_DEPTH)
        self._threads: list[threading.Thread] = []
        self._token: Any = None
        self._link_events: Any = None

    def declare(self, listener: PresenceListener) -> None:
        """Declare the keys of this node. The token comes last: a node that sees it can already send and ask."""
        from zenoh.handlers import FifoChannel

        session, (root, node, epoch) = self.session, (self._address.root, self._address.node, self._address.epoch)
        for stream in Stream:
            inbox = session.declare_subscriber(f"{root}/inbox/{node}/{_key_of(stream)}/*", FifoChannel(INBOX_DEPTH))
            self._start_reader(_key_of(stream), inbox, partial(self._on_sample, stream, listener))
        questions = session.declare_queryable(f"{root}/meet/{node}/{epoch}/*", FifoChannel(EVENTS_DEPTH))
        self._start_reader("questions", questions, lambda query: self._on_query(query, listener))
        self._start_reader("answers", iter(self._answers.get, None), lambda reply: self._on_reply(reply, listener))
        self._token = session.liveliness().declare_token(f"{root}/alive/{node}/{epoch}")
        tokens = session.liveliness().declare_subscriber(f"{root}/alive/*/*", FifoChannel(EVENTS_DEPTH), history=True)
        self._start_reader("liveliness", tokens, lambda sample: self._on_liveliness(sample, listener))
        self._link_events = session.info.declare_link_events_listener(FifoChannel(EVENTS_DEPTH), history=False)
        self._start_reader("links", self._link_events, lambda event: self._guard_now.set())
        self._start_reader("link-guard", self._guard_turns(), lambda _: self._check_links())

    def _start_reader(self, name: str, source: Iterable[Any], handle: Callable[[Any], None]) -> None:
        throttle = LogThrottle()

        def run() -> None:
            for item in source:  # ends when the session is closed
                if self._ended.is_set():
                    return
                try:
                    handle(item)
                except Exception:
                    if not self._ended.is_set():
                        level = logging.ERROR if throttle.should_log() else logging.DEBUG
                        logger.log(level, "failed to handle network input (%s)", name, exc_info=True)

        thread = threading.Thread(target=run, name=f"network-{name}-{self._address.node}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guard_turns(self) -> Iterator[None]:
        """Yield whenever the links should be checked: periodically, and when one was added."""
        while not self._ended.is_set():
            self._guard_now.wait(self._guard_wait)
            self._guard_now.clear()
            yield

    def _check_links(self) -> None:
        self._guard_wait = CHECK_INTERVAL_S
        self._guard_wait = self._guard.check(self.session.info.links())

    # ---- receiving ----

    def _on_sample(self, stream: Stream, listener: PresenceListener, sample: Sample) -> None:
        sender = str(sample.key_expr).rpartition("/")[2]
        envelope = sample.attachment.to_bytes() if sample.attachment is not None else b""
        if not is_node_id(sender):
            logger.debug("dropped a message without a sender (%.80s)", sample.key_expr)
            return
        listener.on_sealed(sender, stream, Sealed(envelope, sample.payload.to_bytes()))

    def _on_query(self, query: Query, listener: PresenceListener) -> None:
        with query:  # leaving it signals that no more answers come
            answer = listener.on_question(query.payload.to_bytes() if query.payload is not None else b"")
            if answer is not None:
                address, asker = self._address, str(query.key_expr).rpartition("/")[2]
                query.reply(f"{address.root}/meet/{address.node}/{address.epoch}/{asker}", answer)

    def _on_reply(self, reply: Reply, listener: PresenceListener) -> None:
        if reply.ok is None:
            return
        session_id = self._parse_key(str(reply.ok.key_expr), "meet")
        if session_id is not None:
            listener.on_answer(*session_id, reply.ok.payload.to_bytes())

    def _on_liveliness(self, sample: Sample, listener: PresenceListener) -> None:
        from zenoh import SampleKind

        session_id = self._parse_key(str(sample.key_expr), "alive")
        if session_id is None:
            logger.debug("dropped a malformed liveliness token (%.80s)", sample.key_expr)
            return
        if sample.kind != SampleKind.PUT:
            with self._connecting:
                for stream in Stream:
                    self._outlets.pop((session_id[0], stream), None)
        listener.on_liveliness(*session_id, alive=sample.kind == SampleKind.PUT)

    def _parse_key(self, key: str, kind: str) -> tuple[str, int] | None:
        node, number, *_ = [*key.removeprefix(f"{self._address.root}/{kind}/").split("/"), ""]
        if not is_node_id(node) or not (number.isascii() and number.isdecimal() and len(number) < 20):
            return None
        return (node, int(number)) if int(number) < MAX_EPOCH else None

    # ---- sending ----

    def is_linked(self) -> bool:
        return bool(self.session.info.transports())

    def ask(self, node: str, epoch: int, question: bytes) -> None:
        """Ask one epoch of a node. The listener gets the answers, all of them: a false one must not hide the true one."""

        def enqueue(reply: Reply) -> None:
            with contextlib.suppress(queue.Full):  # a node whose answer is dropped is asked again
                self._answers.put_nowait(reply)

        self._get(f"{node}/{epoch}", question, enqueue)

    def ask_and_wait(self, question: bytes, node: str = "*") -> list[tuple[str, int, bytes]]:
        """Ask all epochs of a node, or all nodes, and return (node, epoch, answer) of each that answers."""
        replies = [reply.ok for reply in self._get(f"{node}/*", question, None) if reply.ok is not None]
        answers = [(self._parse_key(str(reply.key_expr), "meet"), reply.payload.to_bytes()) for reply in replies]
        return [(*session_id, answer) for session_id, answer in answers if session_id is not None]

    def _get(self, epochs: str, question: bytes, handler: Any) -> Any:
        from zenoh import ConsolidationMode, Priority, QueryTarget

        return self.session.get(
            f"{self._address.root}/meet/{epochs}/{self._address.node}",
            handler,
            payload=question,
            target=QueryTarget.ALL,
            consolidation=ConsolidationMode.NONE,
            priority=Priority.REAL_TIME,  # also for the answer: at lower priority, both could wait for ever behind DATA
            timeout=ANSWER_TIMEOUT_S,
        )

    def is_announced(self, node: str) -> bool:
        """Whether there is a liveliness token for a node of this name."""
        replies = self.session.liveliness().get(f"{self._address.root}/alive/{node}/*", timeout=ANSWER_TIMEOUT_S)
        return any(reply.ok is not None for reply in replies)

    def put(self, node: str, stream: Stream, sealed: Sealed, is_wanted: Callable[[], bool]) -> None:
        """Hand a sealed message to the wire, waiting while it is full. Raises Unreachable.

        While `is_wanted` returns true, also waits a moment for the node to subscribe to its inbox.
        """
        try:
            outlet = self._outlet_to(node, stream)
            now = time.monotonic()
            deadline = now + SUBSCRIBER_TIMEOUT_S
            while not outlet.has_subscriber(now):  # without a subscriber the message would be lost silently
                if now > deadline or self._ended.is_set() or not is_wanted():
                    raise unreachable(node)
                time.sleep(0.001)
                now = time.monotonic()
            outlet.publisher.put(sealed.body, attachment=sealed.envelope)
        except Exception as error:
            if self._ended.is_set():
                raise unreachable(node) from error
            raise

    def _outlet_to(self, node: str, stream: Stream) -> _Outlet:
        outlet = self._outlets.get((node, stream))
        if outlet is not None:
            return outlet
        with self._connecting:
            if (node, stream) not in self._outlets:
                key = f"{self._address.root}/inbox/{node}/{_key_of(stream)}/{self._address.node}"
                self._outlets[node, stream] = _Outlet(self.session.declare_publisher(key, **_publisher_options(stream)))
            return self._outlets[node, stream]

    # ---- closing ----

    def close(self, give_up: threading.Event) -> None:
        """Leave the network. That may take long: once `give_up` is set, it goes on in the background."""
        self._ended.set()
        # Not a daemon thread: if Python ends a thread inside Zenoh, the process crashes.
        closer = threading.Thread(target=self.close_session, name=f"network-close-{self._address.node}")
        closer.start()
        while closer.is_alive() and not give_up.is_set():
            closer.join(0.02)
        closer.join(CLOSE_TIMEOUT_S)
        for thread in self._threads:
            while thread.is_alive() and not give_up.is_set():
                thread.join(0.02)

    def close_session(self) -> None:
        self._ended.set()
        try:
            self.session.close()  # ends the token and the channels first, then closes every link
        except Exception as error:
            logger.info("leaving the network was not announced to all nodes: %s", error)
        with contextlib.suppress(queue.Full):  # if it is full, its thread is not waiting
            self._answers.put_nowait(None)
        self._guard_now.set()

    def join(self) -> None:
        for thread in self._threads:
            join(thread)


def _key_of(stream: Stream) -> str:
    return stream.name.lower()


def _publisher_options(stream: Stream) -> dict[str, Any]:
    """Options of a stream: drop nothing, and send each message at once instead of in batches.

    Zenoh's priorities are strict, and it closes a link on which a message has waited too long, even if the link was busy with
    others. So DATA and BULK share a priority.
    """
    from zenoh import CongestionControl, Priority, Reliability

    return {
        "reliability": Reliability.RELIABLE,
        "congestion_control": CongestionControl.BLOCK,
        "priority": Priority.REAL_TIME if stream is Stream.CONTROL else Priority.DATA_HIGH,
        "express": True,
    }


class _Outlet:
    """A publisher, and when it was last seen to have a subscriber: asking Zenoh takes longer than publishing."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self._seen_at = -math.inf

    def has_subscriber(self, now: float) -> bool:
        if now - self._seen_at < SUBSCRIBER_TTL_S:
            return True
        status = self.publisher.matching_status
        if getattr(status, "matching", status):  # not a bool, as its stub says, but an object that is always true
            self._seen_at = now
            return True
        return False
