"""ZenohRouter: a network of processes and machines, carried by Eclipse Zenoh.

Keys, all under `penstock/<network>/`:

    alive/<node>/<epoch>           a liveliness token; it vanishes with the process, or when its machine is silent for a lease
    record/<node>                  a node's record, put when it changes and answered to whoever asks
    inbox/<destination>/<sender>   messages
"""

from __future__ import annotations

import atexit
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.network import NetworkConfig
from penstock.network.roster import Issue, Roster
from penstock.network.router import Bell, OnChange, OnMessage, check_node_id, is_node_id, join, name_taken, unreachable
from penstock.network.zenoh_session import MAX_MESSAGE, open_session

if TYPE_CHECKING:
    from zenoh import Publisher, Query, Sample

INBOX_DEPTH = 4096  # messages; a full one would stall the link, and with it everything else that the sender says
NEWS_DEPTH = 1024
LINK_WAIT = 1.0  # seconds for the first link of a starting node, before it looks whether its name is free
GOSSIP_WAIT = 0.3  # and for the links that follow from it
ANSWER_WAIT = 2.0  # for a node's record
EAR_WAIT = 2.0  # for the inbox of a node that has just appeared
FAREWELL_WAIT = 2.0  # a peer that is frozen and has a full wire takes Zenoh ten seconds to leave
ISSUE = struct.Struct(">QQ")  # epoch, counter; the record follows

logger = logging.getLogger("penstock.network")


class ZenohRouter:
    """Zenoh is never called from its own callbacks: what it brings goes through channels to the threads of this object."""

    def __init__(self, config: NetworkConfig, node_id: str, epoch: int) -> None:
        self._config, self._node_id, self._epoch = config, check_node_id(node_id), epoch
        self._root = f"penstock/{config.name}"
        self._roster = Roster()
        self._roster.appeared(node_id, epoch)
        self._counter = 0
        self._record: bytes | None = None  # as it goes over the wire
        self._publishing = threading.Lock()
        self._publishers: dict[str, Publisher] = {}
        self._connecting = threading.Lock()
        self._closing = threading.Event()
        self._session: Any = None
        self._token: Any = None
        self._record_publisher: Publisher | None = None
        self._bell: Bell | None = None
        self._threads: list[threading.Thread] = []

    @property
    def node_id(self) -> str:
        return self._node_id

    # ---- joining and leaving ----

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        assert self._session is None and not self._closing.is_set(), "a router starts once"
        session = open_session(self._config, self._closing)
        if session is None:
            return
        self._session = session
        atexit.register(self._close_at_exit)
        try:
            self._wait_for_links()
            self._claim_name()
            self._bell = Bell(on_change, f"network-changes-{self._node_id}")
            self._declare(on_message)
        except BaseException:
            self.close()
            raise

    def _wait_for_links(self) -> None:
        """Zenoh connects in the background, and a look at an empty network would find every name free."""
        if not (self._config.connect or self._config.multicast):
            return
        deadline = time.monotonic() + LINK_WAIT
        while not self._session.info.transports():
            if time.monotonic() > deadline:
                logger.warning("no answer from %s yet; trying on", ", ".join(self._config.connect) or "the network")
                return
            self._closing.wait(0.01)
        self._closing.wait(GOSSIP_WAIT)

    def _claim_name(self) -> None:
        """A token of this name may be left over from a crash; it vanishes within the lease."""
        deadline = time.monotonic() + self._config.lease_ms / 1000 + 1.0
        while self._others_of_this_name():
            if time.monotonic() > deadline:
                raise name_taken(self._node_id)
            self._closing.wait(0.1)

    def _others_of_this_name(self) -> bool:
        replies = self._session.liveliness().get(f"{self._root}/alive/{self._node_id}/*", timeout=ANSWER_WAIT)
        return any(reply.ok is not None for reply in replies)

    def _declare(self, on_message: OnMessage) -> None:
        """The token comes last: whoever sees it finds the inbox and the record."""
        from zenoh.handlers import FifoChannel

        session = self._session
        record_key = f"{self._root}/record/{self._node_id}"
        inbox = session.declare_subscriber(f"{self._root}/inbox/{self._node_id}/*", FifoChannel(INBOX_DEPTH))
        records = session.declare_subscriber(f"{self._root}/record/*", FifoChannel(NEWS_DEPTH))
        questions = session.declare_queryable(record_key, FifoChannel(NEWS_DEPTH))
        self._listen("inbox", inbox, lambda sample: on_message(_last(sample), sample.payload.to_bytes()))
        self._listen("records", records, self._hear_record)
        self._listen("questions", questions, self._answer)
        with self._publishing:
            self._record_publisher = session.declare_publisher(record_key, **_wire())
            self._put_record()
        self._token = session.liveliness().declare_token(f"{self._root}/alive/{self._node_id}/{self._epoch}")
        lives = session.liveliness().declare_subscriber(f"{self._root}/alive/*/*", FifoChannel(NEWS_DEPTH), history=True)
        self._listen("lives", lives, self._hear_life)

    def _listen(self, name: str, source: Iterable[Any], handle: Callable[[Any], None]) -> None:
        def run() -> None:
            for item in source:  # ends when the session is closed
                if self._closing.is_set():
                    return
                try:
                    handle(item)
                except Exception:
                    if not self._closing.is_set():
                        logger.exception("what the network brought could not be handled (%s)", name)

        thread = threading.Thread(target=run, name=f"network-{name}-{self._node_id}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self._close_at_exit)
        if self._session is not None:
            # No daemon: a thread that Python ends inside of Zenoh takes the process down with it.
            farewell = threading.Thread(target=self._leave, name=f"network-farewell-{self._node_id}")
            farewell.start()
            farewell.join(FAREWELL_WAIT)
        self._end_threads()

    def _close_at_exit(self) -> None:
        """For whoever forgot; no thread can be started any more."""
        self._closing.set()
        self._leave()
        self._end_threads()

    def _end_threads(self) -> None:
        if self._bell is not None:
            self._bell.stop()
        for thread in self._threads:
            join(thread)
        self._roster.clear()

    def _leave(self) -> None:
        try:
            self._session.close()  # ends the token and the channels first, then says goodbye on every link
        except Exception as error:
            logger.info("the goodbye did not reach everybody: %s", error)

    # ---- records ----

    def publish(self, record: bytes) -> None:
        with self._publishing:
            self._counter += 1
            issue = Issue(self._epoch, self._counter)
            self._record = ISSUE.pack(*issue) + record
            self._roster.heard(self._node_id, issue, record)
            self._put_record()
        self._ring()

    def _put_record(self) -> None:
        if self._record is None or self._record_publisher is None or self._closing.is_set():
            return
        try:
            self._record_publisher.put(self._record)
        except Exception:
            if not self._closing.is_set():
                raise

    def records(self) -> Mapping[str, bytes]:
        return self._roster.records()

    def _hear_record(self, sample: Sample) -> None:
        node, value = _last(sample), sample.payload.to_bytes()
        if node == self._node_id:
            return
        if not is_node_id(node) or len(value) < ISSUE.size:
            logger.warning("a malformed record was dropped (%.80s, %d bytes)", node, len(value))
        elif self._roster.heard(node, Issue(*ISSUE.unpack_from(value)), value[ISSUE.size :]):
            self._ring()

    def _answer(self, query: Query) -> None:
        with query:  # leaving it tells the asker that no more comes
            record = self._record
            if record is not None:
                query.reply(f"{self._root}/record/{self._node_id}", record)

    def _ask(self, node: str) -> None:
        from zenoh import ConsolidationMode, QueryTarget

        replies = self._session.get(
            f"{self._root}/record/{node}",
            target=QueryTarget.ALL,
            consolidation=ConsolidationMode.NONE,  # two lives of a node answer under one key
            timeout=ANSWER_WAIT,
        )
        for reply in replies:
            if reply.ok is not None:
                self._hear_record(reply.ok)

    # ---- lives ----

    def _hear_life(self, sample: Sample) -> None:
        from zenoh import SampleKind

        node, _, number = str(sample.key_expr).removeprefix(f"{self._root}/alive/").partition("/")
        if not is_node_id(node) or not number.isdecimal():
            logger.warning("a malformed sign of life was dropped (%.80s)", sample.key_expr)
            return
        epoch = int(number)
        if node == self._node_id:
            if epoch > self._epoch and sample.kind == SampleKind.PUT:
                logger.warning("another node took the name %r; set node_id to another and restart this one", node)
        elif sample.kind == SampleKind.PUT:
            self._roster.appeared(node, epoch)
            self._ask(node)
            self._ring()
        else:
            self._roster.vanished(node, epoch)
            if not self._roster.is_live(node):
                with self._connecting:
                    self._publishers.pop(node, None)
            self._ring()

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    # ---- messages ----

    def send(self, node: str, data: bytes) -> None:
        assert len(data) <= MAX_MESSAGE, f"a message of {len(data):,} bytes would end the link"
        publisher = self._publisher_to(node)
        try:
            deadline = time.monotonic() + EAR_WAIT
            while not _is_heard(publisher):  # what is put for nobody is lost without a word
                if time.monotonic() > deadline or not self._reaches(node):
                    raise unreachable(node)
                time.sleep(0.001)
            publisher.put(data)
        except Exception as error:
            if self._closing.is_set():
                raise unreachable(node) from error
            raise

    def _publisher_to(self, node: str) -> Publisher:
        publisher = self._publishers.get(node)
        if publisher is not None:
            return publisher
        with self._connecting:
            if not self._reaches(node):
                raise unreachable(node)
            publisher = self._publishers.get(node)
            if publisher is None:
                publisher = self._session.declare_publisher(f"{self._root}/inbox/{node}/{self._node_id}", **_wire())
                self._publishers[node] = publisher
            return publisher

    def _reaches(self, node: str) -> bool:
        return self._session is not None and not self._closing.is_set() and self._roster.is_live(node)


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


def _last(sample: Sample) -> str:
    return str(sample.key_expr).rpartition("/")[2]
