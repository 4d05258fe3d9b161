"""Membership: a node's part in a network: its record, the records of other nodes, and the messages in both directions."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock import __version__
from penstock.config.network import NetworkConfig
from penstock.domain.messages import AskWeights, Message, OpenRoute, WeightsPart
from penstock.domain.meta_model import MetaModel, NodeRecord, Offer
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.engine.engine import Engine
from penstock.engine.hosted_model import HostedLayers, HostedModel
from penstock.engine.job_receiver import JobReceiver
from penstock.errors import BadMessage
from penstock.network.codec import PROTOCOL, decode, decode_record, encode_record
from penstock.network.link_monitor import LinkMonitor
from penstock.network.router import Router
from penstock.network.trust.known_endpoints import save_endpoints, valid_endpoints
from penstock.network.trust.listening import reachable_endpoints
from penstock.network.wire import Wire
from penstock.peers.revocation_age import RevocationAge, certificate_warning
from penstock.peers.weights_trust import WeightsTrust
from penstock.pipes.meta_pipe import MetaPipe, WeightsOf, differs
from penstock.pipes.pipe_ids import PipeIds, pipe_of
from penstock.pipes.pipe_manager import PipeManager
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.manifest import Manifest
from penstock.weights.server import WeightsServer

logger = logging.getLogger("penstock.network")

ISOLATION_WARNING_INTERVAL_S = 30.0  # between two warnings that there is no other node
PUBLISH_INTERVAL_S = 1.0  # between two records, if anything has changed
ROUTE_POLL_INTERVAL_S = 0.05
FIRST_RECORD_TIMEOUT_S = 1.5  # for the first record of another node
FIRST_OFFER_TIMEOUT_S = 5.0  # ... and for the first that says what it has
MAX_SAVED_PER_NODE = 4  # endpoints of each other node
MAX_PUBLISHED_ENDPOINTS = 8  # of this node


class Membership:
    """Joins the network with `start`, hosts models from then on, and leaves it with `leave`.

    placements: by model, why this node holds its layers, for people.
    unreadable_peers: nodes whose records cannot be read, and why.
    incompatible_peers: nodes whose layers cannot be used, and why.
    expected_weights: by model, the hashes that its weights should have.
    trust: which weights this node takes from the others.
    revocations: how old the list of revocations is that this node has.
    links: what was measured between this node and the others.
    loading: a lock to hold while loading layers.
    changed: notified when the network may have changed.
    """

    def __init__(self, router: Router, config: NetworkConfig, *, node: str, epoch: int) -> None:
        self.node = node
        self.epoch = epoch
        self.config = config
        self.unreadable_peers: dict[str, str] = {}
        self._router = router
        self.engines: dict[str, Engine] = {}
        self._hosted: list[HostedLayers] = []
        self._offers: dict[str, Offer] = {}  # by model
        self._retired: set[tuple[str, LayerRange]] = set()  # segments about to be dropped
        self._pipe_ids = PipeIds(node, epoch)
        self.placements: dict[str, str] = {}
        self.wire = Wire(router, on_lost=self._on_lost)
        self.trust = WeightsTrust(config)
        self.revocations = RevocationAge(config)
        self.links = LinkMonitor(self.wire.send, time.monotonic)
        self.receiver = JobReceiver(
            functools.partial(decode, sealed=router.seals),
            self.engines,
            self.wire.send,
            self._on_weights,
            self.links.on_echo,
            self.links.observe_transfer,
        )
        self._weights: dict[str, tuple[Path, Manifest]] = {}  # served to other nodes, by model
        self.weights_server = WeightsServer(self._weights.get, self.wire.send, rate=config.weights_rate, unsent=self.wire.waiting)
        self.weights_fetcher = WeightsFetcher(self.wire.send, lambda: sorted(self.weights_peers()))
        self.pipes = PipeManager(node, self.wire, wire_format=config.wire)
        self._endpoints = reachable_endpoints(config.listen)[:MAX_PUBLISHED_ENDPOINTS] if config.peers_file is not None else ()
        self._peer_endpoints: dict[str, tuple[str, ...]] = {}  # by node
        self._saved_endpoints: list[str] = []
        self._draining = False
        self._published = b""
        self._decoded: dict[str, tuple[bytes, NodeRecord | None]] = {}  # by node
        self._changing = threading.Lock()
        self._publishing = threading.Lock()
        self._left = threading.Event()
        self.loading = threading.Lock()
        self.changed = threading.Condition()
        self._busy: dict[str, tuple[float, float]] = {}  # by model: when it was last measured, and its busy seconds then
        self._met_peer = False
        self._waited_for_peers = False
        self.incompatible_peers: dict[str, str] = {}
        self.expected_weights: dict[str, WeightsOf] = {}
        self._publisher = threading.Thread(target=self._publish_loop, name="penstock-records", daemon=True)

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """The readable records of all live nodes, including this one."""
        return self.pipes.records

    def start(self) -> None:
        """Join the network, offering nothing yet."""
        self._publish()
        self._router.start(self.receiver.on_message, self._on_change)
        self.trust.open()
        self.revocations.open()
        self._on_change()
        self._publisher.start()

    def host(self, hosted: HostedLayers) -> None:
        """Share a model's layers with other nodes, and use theirs for its jobs. Its engine must be running."""
        self._hosted.append(hosted)
        self.engines[hosted.name] = hosted.engine
        if self._draining:
            hosted.engine.host.draining = True
        hosted.engine.on_network_change()
        self.publish()

    def offer(self, offer: Offer) -> None:
        """Publish how many layers of a model this node could load, and which it is about to."""
        self._offers[offer.model] = offer
        self.publish()

    def serve_weights(self, model: str, folder: Path, manifest: Manifest) -> None:
        """Send the weights of a model to nodes that ask for them."""
        self._weights[model] = (folder, manifest)

    def weights_peers(self) -> set[str]:
        """Return the nodes that serve weights."""
        peers = (record for record in self._peer_records if not record.draining)
        return {peer.node for peer in peers if any(offer.gives for offer in peer.offers)}

    def wait_for_peers(self) -> None:
        """Wait until other nodes have published what they hold, so that the first decisions are not made without them.

        Connections are made in the background, and a node that has just started takes a moment to know what it has.
        """
        if self._waited_for_peers or not self.config.looks_for_peers:
            return
        self._waited_for_peers = True  # once: nodes that are not here by now will not come soon
        with self.changed:
            if self.changed.wait_for(lambda: self._peer_records, FIRST_RECORD_TIMEOUT_S):
                self.changed.wait_for(lambda: any(record.offers for record in self._peer_records), FIRST_OFFER_TIMEOUT_S)

    def wait_for_trust(self, model: str) -> bool:
        """Wait for a record that says which weights of a model are trusted: the first nodes to answer may not know it."""
        with self.changed:
            return self.changed.wait_for(lambda: bool(self.trust.expected(model)), FIRST_OFFER_TIMEOUT_S)

    @property
    def _peer_records(self) -> list[NodeRecord]:
        return [record for record in self.records if record.node != self.node]

    def retire(self, model: str, layers: LayerRange) -> None:
        """Stop publishing these layers, because they are about to be dropped."""
        self._retired.add((model, layers))
        self.publish()

    def finish_retiring(self, model: str, layers: LayerRange) -> None:
        """Note that these layers were dropped."""
        self._retired.discard((model, layers))
        self.publish()

    def publish(self) -> None:
        """Publish what has changed, and apply it here too."""
        self._publish()
        self._on_change()

    def announce_leaving(self) -> None:
        """Tell other nodes that this one is about to leave, so that they choose other routes."""
        if not self._draining:
            self._draining = True
            for engine in list(self.engines.values()):
                engine.host.draining = True
            self._publish()

    def wait_until_unused(self, timeout: float) -> None:
        """Wait until no other node's route passes through this node."""
        until = time.monotonic() + timeout
        while time.monotonic() < until and self.foreign_routes:
            time.sleep(ROUTE_POLL_INTERVAL_S)

    @property
    def foreign_routes(self) -> int:
        return sum(route.origin != self.node for engine in self.engines.values() for route in list(engine.host.routes))

    def leave(self) -> None:
        """Leave the network, after the engines have stopped."""
        self._left.set()
        self.weights_fetcher.close()
        self.weights_server.close()
        self.wire.close()
        self._router.close()

    def refused(self) -> dict[str, int]:
        """Count what was refused from other nodes, by reason."""
        counts = Counter(self._router.refused())
        for engine in list(self.engines.values()):
            counts.update(dict(engine.stats.refused))
        return dict(counts)

    def refused_from(self) -> dict[str, int]:
        """Count what the router has refused, by the sender that a message names. Not every router counts that."""
        counts: Callable[[], Mapping[str, int]] = getattr(self._router, "refused_from", dict)
        return dict(counts())

    def warnings(self) -> list[str]:
        """Return warnings about the certificate of this node and the list of revocations."""
        return [warning for warning in (certificate_warning(self.config), self.revocations.warning()) if warning]

    # ---- inside ----

    def _on_lost(self, node: str, message: Message) -> None:
        if isinstance(message, NetworkJob | OpenRoute):
            for engine in list(self.engines.values()):
                if engine.concerns(message.route):
                    engine.on_unsent(node, message)

    def _on_weights(self, sender: str, message: AskWeights | WeightsPart) -> None:
        if isinstance(message, AskWeights):
            self.weights_server.on_ask(sender, message)
        else:
            self.weights_fetcher.on_part(sender, message)

    def _on_change(self) -> None:
        with self._changing:
            found, records = [], self._router.records()
            self._decoded = {node: read for node, read in self._decoded.items() if node in records}
            self.unreadable_peers = {node: why for node, why in self.unreadable_peers.items() if node in records}
            for node, data in records.items():
                record = self._record(node, data)
                if record is not None:
                    found.append(record)
            for record in found:
                self.trust.merge(record.node, record.trusted)
                self.revocations.merge(record.node, record.stamp)
            self._log_changes(found)
            self.pipes.update(found)
            self.links.set_peers(record.node for record in found if record.node != self.node)
        for engine in list(self.engines.values()):
            engine.on_network_change()
        with self.changed:
            self.changed.notify_all()

    def _save_peer_endpoints(self) -> None:
        """Save endpoints of other nodes for the next start, those of live nodes first."""
        if self.config.peers_file is None:
            return
        for record in self._peer_records:
            self._peer_endpoints[record.node] = valid_endpoints(record.endpoints)[:MAX_SAVED_PER_NODE]
        here = {record.node for record in self._peer_records}
        order = sorted(self._peer_endpoints, key=lambda node: (node not in here, node))
        endpoints = [endpoint for node in order for endpoint in self._peer_endpoints[node]]
        if endpoints and endpoints != self._saved_endpoints:
            save_endpoints(self.config.peers_file, endpoints)
            self._saved_endpoints = endpoints

    def _log_changes(self, found: list[NodeRecord]) -> None:
        before = {(record.node, record.epoch) for record in self.pipes.records}
        now = {(record.node, record.epoch): record for record in found}
        for node, _ in sorted(before - now.keys()):
            logger.info("node %s has left", node)
        for node, epoch in sorted(now.keys() - before):
            if node != self.node:
                self._met_peer = True
                layers = ", ".join(f"{meta.layers} of {meta.model} (pipe {pipe_of(meta)})" for meta in now[node, epoch].segments)
                logger.info("node %s has joined%s", node, f" with layers {layers}" if layers else "")
        for record in found:
            for meta in record.segments:
                self._check_compatible(meta)
        for node in self.incompatible_peers.keys() - {record.node for record in found}:
            del self.incompatible_peers[node]

    def _check_compatible(self, meta: MetaModel) -> None:
        """Note and log, once per node, that its layers cannot be used."""
        engine, why = self.engines.get(meta.model), ""
        if engine is not None and meta.block_size != engine.config.block_size:
            why = (
                f"Node {meta.node} cannot work with this one: its KV blocks have {meta.block_size} tokens, those here "
                f"{engine.config.block_size}. Use the same --block-size."
            )
        elif meta.node != self.node and differs(meta, self.expected_weights.get(meta.model)):
            why = (
                f"Node {meta.node} is not used: its weights for layers {meta.layers} of {meta.model} are different "
                "(model_validation)."
            )
        if why and self.incompatible_peers.get(meta.node) != why:
            logger.warning("%s", why)
        if why:
            self.incompatible_peers[meta.node] = why
        else:
            self.incompatible_peers.pop(meta.node, None)

    def _record(self, node: str, data: bytes) -> NodeRecord | None:
        known = self._decoded.get(node)
        if known is not None and known[0] == data:
            return known[1]
        record: NodeRecord | None = None
        try:
            decoded = decode_record(data)
            if decoded.node == node:
                record = decoded
                self.unreadable_peers.pop(node, None)
            else:
                self.unreadable_peers[node] = f"its record has the name {decoded.node}"
        except BadMessage as error:
            if node not in self.unreadable_peers:
                logger.warning("the record of node %s cannot be read, so it is not used: %s", node, error)
            self.unreadable_peers[node] = error.message
        self._decoded[node] = (data, record)
        return record

    def _publish_loop(self) -> None:
        waited = 0.0
        while not self._left.wait(PUBLISH_INTERVAL_S):
            waited += PUBLISH_INTERVAL_S
            if waited >= ISOLATION_WARNING_INTERVAL_S and not self._met_peer and self.config.looks_for_peers:
                waited = 0.0
                where = ", ".join(self.config.connect) or ("multicast" if self.config.multicast else self.config.router)
                logger.warning("no other node of the network '%s' found yet (%s); still trying", self.config.name, where)
            try:
                self.links.tick()
                self.trust.reload()
                self.revocations.reload()
                self._publish()
                self._save_peer_endpoints()
            except Exception as error:  # tried again in a second
                logger.warning("failed to publish the record of this node: %s", error)

    def _publish(self) -> None:
        with self._publishing:
            data = encode_record(self._own_record())
            if data != self._published:
                self._router.publish(data)
                self._published = data

    def _own_record(self) -> NodeRecord:
        return NodeRecord(
            node=self.node,
            epoch=self.epoch,
            version=__version__,
            protocol=PROTOCOL,
            pid=os.getpid(),
            draining=self._draining,
            serves=tuple(hosted.name for hosted in self._hosted if isinstance(hosted, HostedModel)),
            segments=tuple(segment for hosted in self._hosted if hosted.engine.running for segment in self._segments(hosted)),
            endpoints=self._endpoints,
            offers=tuple(self._offers.values()),
            links=self.links.published(),
            trusted=self.trust.data,
            stamp=self.revocations.data,
        )

    def _segments(self, hosted: HostedLayers) -> list[MetaModel]:
        engine, load = hosted.engine, self._load(hosted)
        found = [
            MetaModel(
                node=self.node,
                process=f"{self.epoch}.{start}",
                model=hosted.name,
                pipe="",
                shape=engine.pipe.shape,
                num_layers=engine.pipe.num_layers,
                layers=stage.segment.layers,
                weight_hash=stage.segment.weight_hash,
                dtype=hosted.dtype,
                device=hosted.device,
                kv_blocks=stage.segment.kv_blocks,
                kv_free=stage.unleased,
                kv_held=stage.held,
                block_size=engine.config.block_size,
                seconds=float(f"{stage.mean_pass_seconds:.2g}"),  # rounded, or every measurement would change the record
                load=load,
            )
            for start, stage in sorted(engine.stages.items())
            if (hosted.name, stage.segment.layers) not in self._retired
        ]
        offer = self._offers.get(hosted.name)
        return self._pipe_ids.assign(found, self._usable_peers(engine), 1 if offer is None else offer.max_pipes)

    def _usable_peers(self, engine: Engine) -> MetaPipe:
        """The segments of other nodes that can work with this one's."""
        pipe = self.pipes.find(engine.pipe.model, engine.pipe.shape, engine.pipe.num_layers).sharing(engine.config.block_size)
        expected = self.expected_weights.get(pipe.model)
        return replace(pipe, segments=tuple(s for s in pipe.segments if s.node != self.node and not differs(s, expected)))

    def _load(self, hosted: HostedLayers) -> float:
        """Return the share of time since the last call in which the engine was busy, to a tenth."""
        now, busy = time.monotonic(), hosted.engine.stats.busy
        then, before = self._busy.get(hosted.name, (now, busy))
        self._busy[hosted.name] = (now, busy)
        return round(min(1.0, (busy - before) / (now - then)), 1) if now > then else 0.0
