"""Presence: an open Zenoh session and all that a node has declared in it. A node may have several, one after the other.

Keys, all under `penstock/<network>/`:

    alive/<node>/<epoch>           a liveliness token; it vanishes with the process, or when its machine is silent for a lease
    meet/<node>/<epoch>/<asker>    questions to a life, which it answers
    inbox/<destination>/<sender>   letters: an envelope as the attachment, and a body

Whoever is in the network can declare and write any of them. What is to be believed is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from penstock.network.log_throttle import LogThrottle
from penstock.network.router import is_node_id, join, unreachable
from penstock.network.trust.keyring import Sealed

if TYPE_CHECKING:
    from zenoh import Publisher, Query, Reply, Sample

INBOX_DEPTH = 4096  # messages; a full one would stall the link, and with it everything else that the sender says
NEWS_DEPTH = 1024
ANSWER_WAIT = 2.0  # seconds for an answer
EAR_WAIT = 2.0  # for the inbox of a node that has just appeared
FAREWELL_WAIT = 2.0  # a peer that is frozen and has a full wire takes Zenoh ten seconds to leave
LAST_EPOCH = 1 << 63

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
    """What hears of all that comes. Each method is called on a thread of its own; what it raises is logged, now and then."""

    def on_letter(self, sender: str, sealed: Sealed) -> None: ...

    def on_question(self, question: bytes) -> bytes | None: ...

    def on_answer(self, node: str, epoch: int, answer: bytes) -> None: ...

    def on_life(self, node: str, epoch: int, *, begins: bool) -> None: ...


class Presence:
    """Zenoh is never called from its own callbacks: what it brings goes through channels to the threads of this object."""

    def __init__(self, session: Any, place: Address) -> None:
        self.session, self._place = session, place
        self._publishers: dict[str, Publisher] = {}
        self._connecting = threading.Lock()
        self._ended = threading.Event()
        self._answers: queue.Queue[Reply | None] = queue.Queue(NEWS_DEPTH)
        self._threads: list[threading.Thread] = []
        self._token: Any = None

    def declare(self, listener: PresenceListener) -> None:
        """The token comes last: whoever sees it finds the inbox, and somebody who answers."""
        from zenoh.handlers import FifoChannel

        session, (root, node, epoch) = self.session, (self._place.root, self._place.node, self._place.epoch)
        inbox = session.declare_subscriber(f"{root}/inbox/{node}/*", FifoChannel(INBOX_DEPTH))
        questions = session.declare_queryable(f"{root}/meet/{node}/{epoch}/*", FifoChannel(NEWS_DEPTH))
        self._listen("inbox", inbox, lambda sample: self._hear_letter(sample, listener))
        self._listen("questions", questions, lambda query: self._hear_question(query, listener))
        self._listen("answers", iter(self._answers.get, None), lambda reply: self._hear_answer(reply, listener))
        self._token = session.liveliness().declare_token(f"{root}/alive/{node}/{epoch}")
        lives = session.liveliness().declare_subscriber(f"{root}/alive/*/*", FifoChannel(NEWS_DEPTH), history=True)
        self._listen("lives", lives, lambda sample: self._hear_life(sample, listener))

    def _listen(self, name: str, source: Iterable[Any], handle: Callable[[Any], None]) -> None:
        telling = LogThrottle()

        def run() -> None:
            for item in source:  # ends when the session is closed
                if self._ended.is_set():
                    return
                try:
                    handle(item)
                except Exception:
                    if not self._ended.is_set():
                        level = logging.ERROR if telling.should_log() else logging.DEBUG
                        logger.log(level, "what the network brought could not be handled (%s)", name, exc_info=True)

        thread = threading.Thread(target=run, name=f"network-{name}-{self._place.node}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---- what comes ----

    def _hear_letter(self, sample: Sample, listener: PresenceListener) -> None:
        sender = str(sample.key_expr).rpartition("/")[2]
        envelope = sample.attachment.to_bytes() if sample.attachment is not None else b""
        if not is_node_id(sender):
            logger.debug("a letter without a sender was dropped (%.80s)", sample.key_expr)
            return
        listener.on_letter(sender, Sealed(envelope, sample.payload.to_bytes()))

    def _hear_question(self, query: Query, listener: PresenceListener) -> None:
        with query:  # leaving it tells the asker that no more comes
            answer = listener.on_question(query.payload.to_bytes() if query.payload is not None else b"")
            if answer is not None:
                place, asker = self._place, str(query.key_expr).rpartition("/")[2]
                query.reply(f"{place.root}/meet/{place.node}/{place.epoch}/{asker}", answer)

    def _hear_answer(self, reply: Reply, listener: PresenceListener) -> None:
        if reply.ok is None:
            return
        life = self._life(str(reply.ok.key_expr), "meet")
        if life is not None:
            listener.on_answer(*life, reply.ok.payload.to_bytes())

    def _hear_life(self, sample: Sample, listener: PresenceListener) -> None:
        from zenoh import SampleKind

        life = self._life(str(sample.key_expr), "alive")
        if life is None:
            logger.debug("a malformed sign of life was dropped (%.80s)", sample.key_expr)
            return
        if sample.kind != SampleKind.PUT:
            with self._connecting:
                self._publishers.pop(life[0], None)
        listener.on_life(*life, begins=sample.kind == SampleKind.PUT)

    def _life(self, key: str, kind: str) -> tuple[str, int] | None:
        node, number, *_ = [*key.removeprefix(f"{self._place.root}/{kind}/").split("/"), ""]
        if not is_node_id(node) or not (number.isascii() and number.isdecimal() and len(number) < 20):
            return None
        return (node, int(number)) if int(number) < LAST_EPOCH else None

    # ---- what goes ----

    def is_linked(self) -> bool:
        return bool(self.session.info.transports())

    def ask(self, node: str, epoch: int, question: bytes) -> None:
        """The answers come to the listener. Several may: somebody else may answer for that life, and must not keep it from
        being heard."""

        def keep(reply: Reply) -> None:
            with contextlib.suppress(queue.Full):  # whoever does not get through is asked again
                self._answers.put_nowait(reply)

        self._get(f"{node}/{epoch}", question, keep)

    def ask_and_wait(self, question: bytes, node: str = "*") -> list[tuple[str, int, bytes]]:
        """The answers of all lives of that node, or of everybody."""
        replies = [reply.ok for reply in self._get(f"{node}/*", question, None) if reply.ok is not None]
        answers = [(self._life(str(reply.key_expr), "meet"), reply.payload.to_bytes()) for reply in replies]
        return [(*life, answer) for life, answer in answers if life is not None]

    def _get(self, lives: str, question: bytes, handler: Any) -> Any:
        from zenoh import ConsolidationMode, QueryTarget

        return self.session.get(
            f"{self._place.root}/meet/{lives}/{self._place.node}",
            handler,
            payload=question,
            target=QueryTarget.ALL,
            consolidation=ConsolidationMode.NONE,
            timeout=ANSWER_WAIT,
        )

    def has_signs_of(self, node: str) -> bool:
        """Whether somebody declares that a node of this name lives."""
        replies = self.session.liveliness().get(f"{self._place.root}/alive/{node}/*", timeout=ANSWER_WAIT)
        return any(reply.ok is not None for reply in replies)

    def put(self, node: str, sealed: Sealed, still: Callable[[], bool]) -> None:
        """Hand a letter to the wire, waiting while it is full, or for an ear, `still` true. Raises Unreachable."""
        try:
            publisher = self._publisher_to(node)
            deadline = time.monotonic() + EAR_WAIT
            while not _is_heard(publisher):  # what is put for nobody is lost without a word
                if time.monotonic() > deadline or self._ended.is_set() or not still():
                    raise unreachable(node)
                time.sleep(0.001)
            publisher.put(sealed.body, attachment=sealed.envelope)
        except Exception as error:
            if self._ended.is_set():
                raise unreachable(node) from error
            raise

    def _publisher_to(self, node: str) -> Publisher:
        publisher = self._publishers.get(node)
        if publisher is not None:
            return publisher
        with self._connecting:
            if node not in self._publishers:
                key = f"{self._place.root}/inbox/{node}/{self._place.node}"
                self._publishers[node] = self.session.declare_publisher(key, **_wire())
            return self._publishers[node]

    # ---- leaving ----

    def end(self, hurry: threading.Event) -> None:
        """Say goodbye to everybody. That may take long; once `hurry` is set, it goes on without being waited for."""
        self._ended.set()
        # No daemon: a thread that Python ends inside of Zenoh takes the process down with it.
        farewell = threading.Thread(target=self.leave, name=f"network-farewell-{self._place.node}")
        farewell.start()
        while farewell.is_alive() and not hurry.is_set():
            farewell.join(0.02)
        farewell.join(FAREWELL_WAIT)
        for thread in self._threads:
            while thread.is_alive() and not hurry.is_set():
                thread.join(0.02)

    def leave(self) -> None:
        self._ended.set()
        try:
            self.session.close()  # ends the token and the channels first, then says goodbye on every link
        except Exception as error:
            logger.info("the goodbye did not reach everybody: %s", error)
        with contextlib.suppress(queue.Full):  # then its thread does not wait for one
            self._answers.put_nowait(None)

    def join(self) -> None:
        for thread in self._threads:
            join(thread)


def _wire() -> dict[str, Any]:
    """Nothing is dropped, and nothing waits to be sent together with something else."""
    from zenoh import CongestionControl, Priority, Reliability

    return {
        "reliability": Reliability.RELIABLE,
        "congestion_control": CongestionControl.BLOCK,
        "priority": Priority.REAL_TIME,
        "express": True,
    }


def _is_heard(publisher: Publisher) -> bool:
    status = publisher.matching_status
    return bool(getattr(status, "matching", status))  # an object, whatever its stub says, and one that is always true
