"""ZenohRouter: a network of processes and machines, carried by Eclipse Zenoh.

`Presence` is what it has in the network, `PeerDirectory` what it knows and believes; this file has the threads between them.
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
from penstock.network.blocklist import Blocklist
from penstock.network.isolation import IsolationMonitor
from penstock.network.peer_directory import MOST_RECORD, PeerDirectory
from penstock.network.roster import Issue, Roster
from penstock.network.router import ChangeNotifier, OnChange, OnMessage, check_node_id, join, name_taken, unreachable
from penstock.network.trust.keyring import ClosedKeyring, Keyring, OpenKeyring, Sealed
from penstock.network.zenoh_presence import Address, Presence
from penstock.network.zenoh_session import MAX_MESSAGE, check_certificates, knowing, open_session

LINK_WAIT = 1.0  # seconds for the first link of a starting node, before it looks whether its name is free
GOSSIP_WAIT = 0.3  # and for the links that follow from it
LOOK_EVERY = 1.0  # for lives that have not answered, records without a receipt, revocations, certificates that end
OPEN_AGAIN = 0.2  # until a port is tried again that our own last session may not have left yet

logger = logging.getLogger("penstock.network")


class ZenohRouter:
    def __init__(self, config: NetworkConfig, node_id: str, epoch: int) -> None:
        self._config, self._node_id, self._epoch = config, check_node_id(node_id), epoch
        self._roster = Roster()
        self._roster.appeared(node_id, epoch)
        self._counter = 0
        self._note_own_record(None)
        self._publishing = threading.Lock()
        self._closing = threading.Event()
        self._asking, self._telling = threading.Event(), threading.Event()
        self._presence: Presence | None = None
        self._denying: Collection[str] = ()
        self._solitude = self._expecting()
        self._bell: ChangeNotifier | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"network-keeper-{node_id}", daemon=True)
        self._herald = threading.Thread(target=self._tell, name=f"network-herald-{node_id}", daemon=True)
        self._started = False

    @property
    def node_id(self) -> str:
        return self._node_id

    # ---- joining and leaving ----

    def start(self, on_message: OnMessage, on_change: OnChange) -> None:
        assert not self._started and not self._closing.is_set(), "a router starts once"
        self._on_message = on_message
        self._keyring, self._blocklist = self._trust()
        self._known = PeerDirectory(
            self._keyring, self._roster, self._blocklist, on_change=self._ring, on_revoked=self._asking.set
        )
        self._started = True
        atexit.register(self._close_at_exit)
        try:
            presence = self._arrive()
            if presence is None:
                return
            self._claim_name(presence)
            self._bell = ChangeNotifier(on_change, f"network-changes-{self._node_id}")
            presence.declare(self)
            self._keeper.start()
            self._herald.start()
        except BaseException:
            self.close()
            raise

    def _trust(self) -> tuple[Keyring, Blocklist | None]:
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

    def _arrive(self) -> Presence | None:
        presence = None if self._is_out() else self._open(self._config)
        if presence is not None:
            self._wait_for_links(presence)
            if self._missed_a_list(presence):
                presence = self._open_again(presence)
                if presence is not None:
                    self._wait_for_links(presence)
        return presence

    def _open(self, config: NetworkConfig) -> Presence | None:
        self._denying = self._denied()
        session = open_session(config, self._closing, self._denying)
        if session is not None and self._closing.is_set():
            session.close()  # nobody else will
        elif session is not None:
            self._presence = Presence(session, Address(config.name, self._node_id, self._epoch))
        return self._presence

    def _denied(self) -> Collection[str]:
        return self._blocklist.current.common_names() if self._blocklist is not None else ()

    def _is_out(self) -> bool:
        """Whether this node's own certificate was revoked. Then it has nobody."""
        if not self._keyring.is_revoked:
            return False
        logger.error(
            "the certificate of this node was revoked: it is no member of the network '%s' any more. To let it in again, run "
            "where the network was made: penstock network invite %s",
            self._config.name,
            self._node_id,
        )
        return True

    def _wait_for_links(self, presence: Presence) -> None:
        """Zenoh connects in the background, and a look at an empty network would find every name free."""
        if not (self._config.connect or self._config.multicast):
            return
        deadline = time.monotonic() + LINK_WAIT
        while not presence.is_linked():
            if time.monotonic() > deadline:
                logger.warning("no answer from %s yet; trying on", ", ".join(self._config.connect) or "the network")
                return
            self._closing.wait(0.01)
        self._closing.wait(GOSSIP_WAIT)

    def _claim_name(self, presence: Presence) -> None:
        """A sign of life under this name may be left over from a crash, and then it vanishes within the lease; or somebody has
        made it up. Only one who answers has the name."""
        deadline = time.monotonic() + self._config.lease_ms / 1000 + 1.0
        while presence.has_signs_of(self._node_id) and not self._closing.is_set():
            if any(self._proves(*answer) for answer in presence.ask_and_wait(self._known.question(), self._node_id)):
                raise name_taken(self._node_id)
            if time.monotonic() > deadline:
                logger.warning("somebody shows signs of life of a node %r, but does not answer; going on", self._node_id)
                return
            self._closing.wait(0.1)

    def _missed_a_list(self, presence: Presence) -> bool:
        """Somebody may have been revoked while this node was away. It hears of that before anybody hears of it."""
        if self._blocklist is None:
            return False
        for answer in presence.ask_and_wait(self._known.question()):
            self._proves(*answer)
        return self._denied() != self._denying

    def _proves(self, node: str, epoch: int, answer: bytes) -> bool:
        """Whether that life has answered. One who sends what nobody thought of must not keep this node from starting."""
        try:
            self._known.hear_answer(node, epoch, answer)
        except PenstockError as error:
            self._known.refuse(error)
            return False
        except Exception as error:
            logger.debug("an answer could not be handled", exc_info=True)
            self._known.refuse(MalformedMessage(f"The answer of '{node}' could not be handled: {error!r:.200}."))
            return False
        return True

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._end_keeping()
        atexit.unregister(self._close_at_exit)
        if self._presence is not None:
            self._presence.end(self._closing)
        self._end_threads()

    def _close_at_exit(self) -> None:
        """For whoever forgot; no thread can be started any more."""
        self._end_keeping()
        if self._presence is not None:
            self._presence.leave()
        self._end_threads()

    def _end_keeping(self) -> None:
        """After this nobody but the caller changes `_presence`."""
        self._closing.set()
        self._asking.set()
        self._telling.set()
        if self._keeper.ident is not None:
            join(self._keeper)

    def _end_threads(self) -> None:
        if self._bell is not None:
            self._bell.stop()
        if self._herald.ident is not None:
            join(self._herald)
        if self._presence is not None:
            self._presence.join()
        self._roster.clear()

    # ---- records ----

    def publish(self, record: bytes) -> None:
        assert len(record) <= MOST_RECORD, f"a record of {len(record):,} bytes would be refused"
        with self._publishing:
            self._counter += 1
            self._note_own_record(record)
        self._telling.set()
        self._ring()

    def _note_own_record(self, record: bytes | None) -> None:
        """This node needs nobody to ask whether it lives."""
        self._roster.heard(self._node_id, Issue(self._epoch, self._counter), record, math.inf)

    def records(self) -> Mapping[str, bytes]:
        return self._roster.records()

    def refused(self) -> Mapping[str, int]:
        """How often something from the network was refused, by the kind of error."""
        return dict(self._known.refused) if self._started else {}

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def _tell(self) -> None:
        """The herald: brings records and receipts to those who wait for them. What does not reach them is due again."""
        while not self._closing.is_set():
            self._telling.wait(LOOK_EVERY)
            self._telling.clear()
            presence = self._presence
            if presence is not None and not self._closing.is_set():
                self._deliver(presence, self._known.letters())

    def _deliver(self, presence: Presence, letters: list[tuple[str, Sealed]]) -> None:
        for node, sealed in letters:
            try:
                presence.put(node, sealed, lambda: False)
            except Unreachable:
                pass
            except Exception:
                logger.exception("a letter could not be sent to %s", node)

    # ---- messages ----

    def send(self, node: str, data: bytes) -> None:
        assert len(data) <= MAX_MESSAGE, f"a message of {len(data):,} bytes would end the link"
        presence = self._presence
        if presence is None or self._closing.is_set() or not self._roster.is_live(node):
            raise unreachable(node)
        presence.put(node, self._known.seal(node, data), lambda: self._roster.is_live(node))

    # ---- what the presence hears ----

    def on_letter(self, sender: str, sealed: Sealed) -> None:
        try:
            message = self._known.open(sender, sealed)
        except PenstockError as error:
            self._known.refuse(error)
            return
        if message is None:
            self._telling.set()  # a receipt may be due
        else:
            self._on_message(sender, message)

    def on_question(self, question: bytes) -> bytes | None:
        try:
            return self._known.answer(question)
        except PenstockError as error:
            self._known.refuse(error)
            return None

    def on_answer(self, node: str, epoch: int, answer: bytes) -> None:
        if not self._proves(node, epoch, answer):
            return
        if node == self._node_id:
            logger.warning("another node took the name %r; set node_id to another and restart this one", node)
            self._roster.vanished(node, epoch)  # that is all there is to it
        self._telling.set()  # it waits for our record

    def on_life(self, node: str, epoch: int, *, begins: bool) -> None:
        if node == self._node_id and epoch <= self._epoch:
            return  # our own, or one that we have replaced
        if begins:
            self._roster.appeared(node, epoch)
            self._asking.set()
        else:
            self._roster.vanished(node, epoch)
            self._ring()

    # ---- keeping it so ----

    def _keep(self) -> None:
        wait = LOOK_EVERY
        while not self._closing.is_set():
            self._asking.wait(wait)
            self._asking.clear()
            try:
                wait = min(self._look(), LOOK_EVERY)
            except Exception:
                if not self._closing.is_set():
                    logger.exception("the network could not be looked after")

    def _look(self) -> float:
        """The time until somebody must be asked."""
        self._known.look()
        presence = self._presence
        if presence is not None and self._denied() != self._denying:
            presence = self._open_again(presence)
            if presence is not None:
                presence.declare(self)
        if presence is None or self._closing.is_set():
            return math.inf
        before = self._roster.records()
        due, wait = self._roster.due(time.monotonic())
        for node, epoch in due:
            presence.ask(node, epoch, self._known.question())
        if self._roster.records() is not before:
            self._ring()
        self._tell_of_solitude()
        return wait

    def _expecting(self) -> IsolationMonitor:
        return IsolationMonitor(expects=bool(self._config.connect))

    def _tell_of_solitude(self) -> None:
        alone = set(self._roster.nodes()) <= {self._node_id}
        if self._solitude.should_warn(alone, time.monotonic()) and not self._config.open:
            logger.warning(
                "no other node of the network '%s' can be met: they are off, or cannot be reached, or refuse this node's "
                "certificate. Whether it was revoked is told where the network was made by: penstock network list",
                self._config.name,
            )

    def _open_again(self, presence: Presence) -> Presence | None:
        """Zenoh cannot close one link, nor deny anybody anything later on: all links are closed, and opened again with the rule
        against those who were revoked. The others do the same as soon as they know, so tell them first."""
        self._deliver(presence, self._known.warnings())
        config = knowing(self._config, presence.session, self._denied())
        self._presence = None
        presence.end(self._closing)
        self._roster.keep_only(self._node_id, self._epoch)
        self._solitude = self._expecting()  # all who were met may be out now
        self._ring()
        if self._is_out():
            return None
        told = False
        while not self._closing.is_set():
            try:
                return self._open(config)
            except ConfigError as error:
                if not told:
                    logger.warning("the network cannot be joined again yet: %s", error)
                told = True
                self._closing.wait(OPEN_AGAIN)
        return None
