"""ZenohRouter: a network of processes and machines over Eclipse Zenoh.

`Presence` is its Zenoh session, `PeerDirectory` is what it knows about other nodes; this file has the threads between them.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError, MalformedMessage, PenstockError, Unreachable
from penstock.network.members.blocklist import Blocklist
from penstock.network.members.isolation import IsolationMonitor
from penstock.network.members.peer_directory import PeerDirectory
from penstock.network.members.roster import Issue, Roster
from penstock.network.messenger import Messenger
from penstock.network.router import (
    MAX_MESSAGE_BYTES,
    MAX_RECORD_BYTES,
    Bytes,
    ChangeNotifier,
    OnChange,
    OnMessage,
    check_node_id,
    join,
    name_taken,
    unreachable,
)
from penstock.network.stream import Stream
from penstock.network.trust.keyring import ClosedKeyring, Keyring, OpenKeyring, Sealed, read_envelope
from penstock.network.zenoh.contacts import PeerContacts
from penstock.network.zenoh.link_guard import LinkGuard
from penstock.network.zenoh.presence import Address, Presence
from penstock.network.zenoh.session import check_certificates, open_session

LINK_TIMEOUT_S = 1.0  # for the first link of a starting node, before it checks whether its name is free
GOSSIP_DELAY_S = 0.3  # ... and for the links to nodes learnt through it
CHECK_INTERVAL_S = 1.0  # between checks for unanswered questions, unacknowledged records, revocations, expired certificates
REOPEN_INTERVAL_S = 0.2  # between attempts to open a port that our own last session may still hold

logger = logging.getLogger("penstock.network")


class ZenohRouter:
    def __init__(self, config: NetworkConfig, node_id: str, epoch: int) -> None:
        self._config = config
        self._node_id = check_node_id(node_id)
        self._epoch = epoch
        self._roster = Roster()
        self._roster.appeared(node_id, epoch)
        self._counter = 0
        self._store_own_record(None)
        self._publishing = threading.Lock()
        self._closing = threading.Event()
        self._maintain_now = threading.Event()
        self._publish_now = threading.Event()
        self._presence: Presence | None = None
        self._denied_at_open: Collection[str] = ()
        self._contacts = PeerContacts(config)
        self._isolation = self._new_isolation_monitor()
        self._notifier: ChangeNotifier | None = None
        self._maintainer = threading.Thread(target=self._maintain_loop, name=f"network-maintainer-{node_id}", daemon=True)
        self._publisher = threading.Thread(target=self._publish_loop, name=f"network-publisher-{node_id}", daemon=True)
        self._started = False

    @property
    def node_id(self) -> str:
        return self._node_id

    @property
    def seals(self) -> bool:
        return not self._config.open

    # ---- joining and leaving ----

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        assert not self._started and not self._closing.is_set(), "a router starts once"
        self._keyring, self._blocklist = self._load_trust()
        self._directory = PeerDirectory(
            self._keyring, self._roster, self._blocklist, on_change=self._notify, on_revoked=self._maintain_now.set
        )
        self._messenger = Messenger(self._directory, self._put, on_message)
        self._started = True
        atexit.register(self._close_at_exit)
        try:
            presence = self._connect()
            if presence is None:
                return
            self._claim_name(presence)
            self._notifier = ChangeNotifier(on_change, f"network-changes-{self._node_id}")
            presence.declare(self)
            self._maintainer.start()
            self._publisher.start()
        except BaseException:
            self.close()
            raise

    def _load_trust(self) -> tuple[Keyring, Blocklist | None]:
        config = self._config
        if config.open:
            return OpenKeyring(self._node_id, self._epoch), None
        check_certificates(config)
        assert config.ca_file is not None and config.certificate_file is not None and config.key_file is not None
        keyring = ClosedKeyring(
            network=config.name,
            node=self._node_id,
            epoch=self._epoch,
            ca_file=config.ca_file,
            certificate_file=config.certificate_file,
            key_file=config.key_file,
        )
        blocklist = Blocklist(config.revocations_file, keyring.authority)
        keyring.revoke(blocklist.current)
        return keyring, blocklist

    def _connect(self) -> Presence | None:
        presence = None if self._is_revoked() else self._open(self._config)
        if presence is not None:
            self._wait_for_links(presence)
            if self._learn_revocations(presence):
                presence = self._reopen(presence)
                if presence is not None:
                    self._wait_for_links(presence)
        return presence

    def _open(self, config: NetworkConfig) -> Presence | None:
        self._denied_at_open = self._revoked_names()
        session = open_session(config, self._closing, self._denied_at_open)
        if session is not None and self._closing.is_set():
            session.close()  # `close` has missed it
        elif session is not None:
            ports = {int(endpoint.rpartition(":")[2]) for endpoint in config.listen} - {0}
            guard = LinkGuard(ports, self._denied_at_open)
            guard.defer_silent()
            self._presence = Presence(session, Address(config.name, self._node_id, self._epoch), guard)
        return self._presence

    def _revoked_names(self) -> Collection[str]:
        return self._blocklist.current.common_names() if self._blocklist is not None else ()

    def _is_revoked(self) -> bool:
        """Whether this node's own certificate was revoked, so that no other node accepts it."""
        if not self._keyring.is_revoked:
            return False
        logger.error(
            "the certificate of this node was revoked: it is no longer a member of the network '%s'. To let it in again, run on "
            "the machine that created the network: penstock network invite %s",
            self._config.name,
            self._node_id,
        )
        return True

    def _wait_for_links(self, presence: Presence) -> None:
        """Wait until Zenoh has connected: in a network that still looks empty, every name would seem free."""
        if not (self._config.connect or self._config.multicast):
            return
        deadline = time.monotonic() + LINK_TIMEOUT_S
        while not presence.is_linked():
            if time.monotonic() > deadline:
                logger.warning("no answer from %s yet; still trying", ", ".join(self._config.connect) or "the network")
                return
            self._closing.wait(0.01)
        self._closing.wait(GOSSIP_DELAY_S)

    def _claim_name(self, presence: Presence) -> None:
        """Raise if another live node has this name.

        A token of this name can be left over from a crash, until its lease ends, or made up by a hostile member. Only a node
        that answers has the name.
        """
        deadline = time.monotonic() + self._config.lease_ms / 1000 + 1.0
        while presence.is_announced(self._node_id) and not self._closing.is_set():
            if any(self._accepts(*answer) for answer in presence.ask_and_wait(self._directory.question(), self._node_id)):
                raise name_taken(self._node_id)
            if time.monotonic() > deadline:
                logger.warning("another node announces the name %r but does not answer; using it anyway", self._node_id)
                return
            self._closing.wait(0.1)

    def _learn_revocations(self, presence: Presence) -> bool:
        """Ask all nodes for revocations that this node missed while it was off, before it announces itself. True if any."""
        if self._blocklist is None:
            return False
        for answer in presence.ask_and_wait(self._directory.question()):
            self._accepts(*answer)
        return self._revoked_names() != self._denied_at_open

    def _accepts(self, node: str, epoch: int, answer: bytes) -> bool:
        """Whether this is a valid answer of that node and epoch. No malformed answer may keep this node from starting."""
        try:
            self._directory.accept_answer(node, epoch, answer)
        except PenstockError as error:
            self._directory.refuse(error)
            return False
        except Exception as error:
            logger.debug("failed to handle an answer", exc_info=True)
            self._directory.refuse(MalformedMessage(f"Failed to handle the answer of '{node}': {error!r:.200}."))
            return False
        return True

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._stop_maintaining()
        atexit.unregister(self._close_at_exit)
        if self._presence is not None:
            self._presence.close(self._closing)
        self._end_threads()

    def _close_at_exit(self) -> None:
        """Close a router that was not closed. No thread can be started any more."""
        self._stop_maintaining()
        if self._presence is not None:
            self._presence.close_session()
        self._end_threads()

    def _stop_maintaining(self) -> None:
        """End the maintaining thread. After this only the caller changes `_presence`."""
        self._closing.set()
        if self._started:
            self._messenger.close()
        self._maintain_now.set()
        self._publish_now.set()
        if self._maintainer.ident is not None:
            join(self._maintainer)

    def _end_threads(self) -> None:
        if self._notifier is not None:
            self._notifier.stop()
        if self._publisher.ident is not None:
            join(self._publisher)
        if self._presence is not None:
            self._presence.join()
        self._roster.clear()

    # ---- records ----

    def publish(self, record: bytes) -> None:
        assert len(record) <= MAX_RECORD_BYTES, f"other nodes would refuse a record of {len(record):,} bytes"
        with self._publishing:
            self._counter += 1
            self._store_own_record(record)
        self._publish_now.set()
        self._notify()

    def _store_own_record(self, record: bytes | None) -> None:
        """Store this node's own record, as one that never needs to be asked for."""
        self._roster.store_record(self._node_id, Issue(self._epoch, self._counter), record, math.inf)

    def records(self) -> Mapping[str, bytes]:
        return self._roster.records()

    def refused(self) -> Mapping[str, int]:
        return dict(self._directory.refused) if self._started else {}

    def refused_from(self) -> Mapping[str, int]:
        return dict(self._directory.refused_from) if self._started else {}

    def _notify(self) -> None:
        if self._notifier is not None:
            self._notifier.notify()

    def _publish_loop(self) -> None:
        """Send records and receipts that are due. What does not arrive becomes due again."""
        while not self._closing.is_set():
            self._publish_now.wait(CHECK_INTERVAL_S)
            self._publish_now.clear()
            presence = self._presence
            if presence is not None and not self._closing.is_set():
                self._deliver(presence, self._directory.outgoing())

    def _deliver(self, presence: Presence, messages: list[tuple[str, Sealed]]) -> None:
        for node, sealed in messages:
            try:
                presence.put(node, read_envelope(sealed.envelope).stream, sealed, lambda: False)
            except Unreachable:
                pass
            except Exception:
                logger.exception("failed to send a message to %s", node)

    # ---- messages ----

    def send(self, node: str, data: Bytes, stream: Stream = Stream.DATA) -> None:
        assert len(data) <= MAX_MESSAGE_BYTES, f"other nodes would refuse a message of {len(data):,} bytes"
        if not self._started:
            raise unreachable(node)
        self._messenger.send(node, data, stream)

    def _put(self, node: str, stream: Stream, sealed: Sealed, *, wait: bool) -> None:
        presence = self._presence
        if presence is None or self._closing.is_set():
            raise unreachable(node)
        presence.put(node, stream, sealed, lambda: wait and self._roster.is_live(node))

    # ---- what arrives (PresenceListener) ----

    def on_sealed(self, sender: str, stream: Stream, sealed: Sealed) -> None:
        try:
            opened = self._directory.open(sender, sealed, stream)
        except PenstockError as error:
            self._directory.refuse(error, sender)
            return
        if opened is None:
            self._publish_now.set()  # a receipt may be due
        else:
            self._messenger.receive(sender, *opened)

    def on_question(self, question: bytes) -> bytes | None:
        try:
            return self._directory.answer(question)
        except PenstockError as error:
            self._directory.refuse(error)
            return None

    def on_answer(self, node: str, epoch: int, answer: bytes) -> None:
        if not self._accepts(node, epoch, answer):
            return
        if node == self._node_id:
            logger.warning("another node has taken the name %r; set another node_id and restart this node", node)
            self._roster.vanished(node, epoch)
        self._publish_now.set()  # the other node waits for our record

    def on_liveliness(self, node: str, epoch: int, *, alive: bool) -> None:
        if node == self._node_id and epoch <= self._epoch:
            return  # our own token, or one of an earlier start
        if alive:
            self._roster.appeared(node, epoch)
            self._maintain_now.set()
        else:
            self._roster.vanished(node, epoch)
            self._messenger.forget(node, epoch)
            self._notify()

    # ---- maintenance ----

    def _maintain_loop(self) -> None:
        wait = CHECK_INTERVAL_S
        while not self._closing.is_set():
            self._maintain_now.wait(wait)
            self._maintain_now.clear()
            try:
                wait = min(self._maintain(), CHECK_INTERVAL_S)
            except Exception:
                if not self._closing.is_set():
                    logger.exception("failed to maintain the network")

    def _maintain(self) -> float:
        """Refresh trust, reopen if a node was revoked, and ask silent nodes. Returns the seconds until the next question."""
        self._directory.refresh()
        presence = self._presence
        if presence is not None:
            self._contacts.note(presence.session)
        if presence is not None and self._revoked_names() != self._denied_at_open:
            presence = self._reopen(presence)
            if presence is not None:
                presence.declare(self)
        if presence is None or self._closing.is_set():
            return math.inf
        before = self._roster.records()
        due, wait = self._roster.questions_due(time.monotonic())
        for node, epoch in due:
            presence.ask(node, epoch, self._directory.question())
        if self._roster.records() is not before:
            self._notify()
        self._warn_if_isolated()
        return wait

    def _new_isolation_monitor(self) -> IsolationMonitor:
        return IsolationMonitor(expects_peers=bool(self._config.connect))

    def _warn_if_isolated(self) -> None:
        alone = set(self._roster.nodes()) <= {self._node_id}
        if self._isolation.should_warn(alone, time.monotonic()) and not self._config.open:
            logger.warning(
                "no other node of the network '%s' answers: they are off, cannot be reached, or refuse this node's certificate. "
                "To see whether it was revoked, run on the machine that created the network: penstock network list",
                self._config.name,
            )

    def _reopen(self, presence: Presence) -> Presence | None:
        """Open a new session that denies revoked nodes: Zenoh cannot add a rule to an open one.

        Other nodes do the same as soon as they know, so the revocations are sent to them first.
        """
        self._deliver(presence, self._directory.revocation_notices())
        self._contacts.note(presence.session)
        config = self._contacts.add_to(self._config, self._revoked_names())
        self._presence = None
        presence.close(self._closing)
        self._roster.keep_only(self._node_id, self._epoch)
        self._messenger.forget_all()
        self._isolation = self._new_isolation_monitor()  # all known nodes may be revoked now
        self._notify()
        if self._is_revoked():
            return None
        warned = False
        while not self._closing.is_set():
            try:
                return self._open(config)
            except ConfigError as error:
                if not warned:
                    logger.warning("cannot rejoin the network yet: %s", error)
                warned = True
                self._closing.wait(REOPEN_INTERVAL_S)
        return None
