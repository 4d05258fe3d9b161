"""Membership: a node's part in a network. Its record, what the others publish, and the messages in both directions."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
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
from penstock.errors import BadMessage, PenstockError
from penstock.network.codec import PROTOCOL, decode, decode_record, encode_record
from penstock.network.router import Router
from penstock.network.trust.listening import reachable
from penstock.network.trust.peers import remember, usable
from penstock.network.wire import Wire
from penstock.pipes.meta_pipe import WeightsOf, differs
from penstock.pipes.pipe_manager import PipeManager
from penstock.weights.fetcher import WeightsFetcher
from penstock.weights.manifest import Manifest
from penstock.weights.server import WeightsServer

logger = logging.getLogger("penstock.network")

LONELY = 30.0  # seconds between two complaints that nobody is there
PUBLISH_EVERY = 1.0  # seconds, if anything has changed
HANDED_OVER_LOOK = 0.05  # seconds
MEETING = 1.5  # seconds for the first record of another node
OFFERING = 5.0  # ... and for the first that says what it has
REMEMBERED = 4  # endpoints of each other node
MOST_ENDPOINTS = 8  # of its own that a node tells


class Membership:
    """Joins when started, and hosts models from then on; `leave` says goodbye.

    `placements` tells people, by model, why this node holds what it holds.
    """

    def __init__(self, router: Router, config: NetworkConfig, *, node: str, epoch: int) -> None:
        self.node, self.epoch, self.config = node, epoch, config
        self.strangers: dict[str, str] = {}  # nodes whose records we cannot read, and why
        self._router = router
        self.engines: dict[str, Engine] = {}
        self._hosted: list[HostedLayers] = []
        self._offers: dict[str, Offer] = {}  # by model
        self._retired: set[tuple[str, LayerRange]] = set()  # segments that are about to be dropped
        self.placements: dict[str, str] = {}
        self.wire = Wire(router, on_lost=self._on_lost)
        self.receiver = JobReceiver(decode, self.engines, self.wire.send, self._on_weights)
        self._weights: dict[str, tuple[Path, Manifest]] = {}  # that others may have, by model
        self.giver = WeightsServer(self._weights.get, self.wire.send, rate=config.weights_rate, unsent=self.wire.waiting)
        self.taker = WeightsFetcher(self.wire.send, lambda: sorted(self.givers()))
        self.pipes = PipeManager(node, self.wire)
        self._endpoints = reachable(config.listen, ())[:MOST_ENDPOINTS] if config.peers_file is not None else ()
        self._known: dict[str, tuple[str, ...]] = {}  # endpoints of others
        self._remembered: list[str] = []
        self._draining = False
        self._published = b""
        self._read: dict[str, tuple[bytes, NodeRecord | None]] = {}
        self._changing, self._publishing = threading.Lock(), threading.Lock()
        self._left = threading.Event()
        self.loading = threading.Lock()  # held by whoever loads layers
        self.changed = threading.Condition()  # told whenever the network may look different
        self._busy: dict[str, tuple[float, float]] = {}
        self._met = False  # another node
        self._waited = False
        self.unfit: dict[str, str] = {}  # nodes whose layers we cannot use, and why
        self.expected: dict[str, WeightsOf] = {}  # what the weights of models should be
        self._publisher = threading.Thread(target=self._publish_often, name="penstock-records", daemon=True)

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """Of all nodes that are here and can be understood, this one too."""
        return self.pipes.records

    def start(self) -> None:
        """Join the network, with nothing to offer yet."""
        self._publish()
        self._router.start(self.receiver.on_message, self._on_change)
        self._on_change()
        self._publisher.start()

    def host(self, hosted: HostedLayers) -> None:
        """Let others use a model's layers, and this node's own jobs theirs. Its engine must be running."""
        self._hosted.append(hosted)
        self.engines[hosted.name] = hosted.engine
        if self._draining:
            hosted.engine.host.draining = True
        hosted.engine.on_network_change()
        self.publish()

    def offer(self, offer: Offer) -> None:
        """What this node could take of a model, and is about to."""
        self._offers[offer.model] = offer
        self.publish()

    def give(self, model: str, folder: Path, manifest: Manifest) -> None:
        """Hand the weights of a model to nodes that ask for them."""
        self._weights[model] = (folder, manifest)

    def givers(self) -> set[str]:
        """The nodes that hand out weights."""
        return {record.node for record in self._others if not record.draining and any(offer.gives for offer in record.offers)}

    def wait_for_others(self) -> None:
        """Until other nodes say what they have. Links are made in the background, and one who decides alone decides wrongly; a
        node that has just started takes a moment to know what it has."""
        if self._waited or not (self.config.connect or self.config.multicast):
            return
        self._waited = True  # once: who is not here by now is not coming soon
        with self.changed:
            if self.changed.wait_for(lambda: self._others, MEETING):
                self.changed.wait_for(lambda: any(record.offers for record in self._others), OFFERING)

    @property
    def _others(self) -> list[NodeRecord]:
        return [record for record in self.records if record.node != self.node]

    def retire(self, model: str, layers: LayerRange) -> None:
        """Tell the others not to count on these layers any more."""
        self._retired.add((model, layers))
        self.publish()

    def retired(self, model: str, layers: LayerRange) -> None:
        """They are gone."""
        self._retired.discard((model, layers))
        self.publish()

    def publish(self) -> None:
        """Say what is new, and count on it here too."""
        self._publish()
        self._on_change()

    def announce_leaving(self) -> None:
        """Tell the others that we are about to go, so that they find another way."""
        if not self._draining:
            self._draining = True
            for engine in list(self.engines.values()):
                engine.host.draining = True
            self._publish()

    def wait_until_unused(self, patience: float) -> None:
        """Until no other node's route passes here any more."""
        until = time.monotonic() + patience
        while time.monotonic() < until and self.foreign_routes:
            time.sleep(HANDED_OVER_LOOK)

    @property
    def foreign_routes(self) -> int:
        return sum(route.origin != self.node for engine in self.engines.values() for route in list(engine.host.routes))

    def leave(self) -> None:
        """The engines have stopped."""
        self._left.set()
        self.taker.close()
        self.giver.close()
        self.wire.close()
        self._router.close()

    def refused(self) -> dict[str, int]:
        """How often something from other nodes was not taken, by the kind of reason."""
        counts = Counter(self._router.refused())
        for engine in list(self.engines.values()):
            counts.update(dict(engine.stats.refused))
        return dict(counts)

    def expiry_warning(self) -> str | None:
        """That this node's certificate ends soon."""
        if self.config.certificate_file is None:
            return None
        from penstock.network.trust.expiry import expiry_warning

        try:
            return expiry_warning(self.config.certificate_file)
        except PenstockError as error:
            return str(error)

    # ---- inside ----

    def _on_lost(self, node: str, message: Message) -> None:
        if isinstance(message, NetworkJob | OpenRoute):
            for engine in list(self.engines.values()):
                if engine.concerns(message.route):
                    engine.on_unsent(node, message)

    def _on_weights(self, sender: str, message: AskWeights | WeightsPart) -> None:
        if isinstance(message, AskWeights):
            self.giver.on_ask(sender, message)
        else:
            self.taker.on_part(sender, message)

    def _on_change(self) -> None:
        with self._changing:
            found, records = [], self._router.records()
            self._read = {node: read for node, read in self._read.items() if node in records}
            self.strangers = {node: why for node, why in self.strangers.items() if node in records}
            for node, data in records.items():
                record = self._record(node, data)
                if record is not None:
                    found.append(record)
            self._tell_changes(found)
            self.pipes.update(found)
        for engine in list(self.engines.values()):
            engine.on_network_change()
        with self.changed:
            self.changed.notify_all()

    def _remember(self) -> None:
        """Where others can be reached, for the next start: some endpoints of each, those that are here now first."""
        if self.config.peers_file is None:
            return
        for record in self._others:
            self._known[record.node] = usable(record.endpoints)[:REMEMBERED]
        here = {record.node for record in self._others}
        order = sorted(self._known, key=lambda node: (node not in here, node))
        endpoints = [endpoint for node in order for endpoint in self._known[node]]
        if endpoints and endpoints != self._remembered:
            remember(self.config.peers_file, endpoints)
            self._remembered = endpoints

    def _tell_changes(self, found: list[NodeRecord]) -> None:
        before = {(record.node, record.epoch) for record in self.pipes.records}
        now = {(record.node, record.epoch): record for record in found}
        for node, _ in sorted(before - now.keys()):
            logger.info("node %s is gone", node)
        for node, epoch in sorted(now.keys() - before):
            if node != self.node:
                self._met = True
                layers = ", ".join(f"{meta.layers} of {meta.model}" for meta in now[node, epoch].segments)
                logger.info("node %s is here%s", node, f", with layers {layers}" if layers else "")
        for record in found:
            for meta in record.segments:
                self._tell_unfit(meta)
        for node in self.unfit.keys() - {record.node for record in found}:
            del self.unfit[node]

    def _tell_unfit(self, meta: MetaModel) -> None:
        """Once for each node that has layers which we cannot use."""
        engine, why = self.engines.get(meta.model), ""
        if engine is not None and meta.block_size != engine.config.block_size:
            why = (
                f"Node {meta.node} and this one cannot work together: KV blocks have {meta.block_size} tokens there and "
                f"{engine.config.block_size} here (--block-size)."
            )
        elif meta.node != self.node and differs(meta, self.expected.get(meta.model)):
            why = (
                f"Node {meta.node} has other weights for layers {meta.layers} of {meta.model}: it is left out (model_validation)."
            )
        if why and self.unfit.get(meta.node) != why:
            logger.warning("%s", why)
        if why:
            self.unfit[meta.node] = why
        else:
            self.unfit.pop(meta.node, None)

    def _record(self, node: str, data: bytes) -> NodeRecord | None:
        known = self._read.get(node)
        if known is not None and known[0] == data:
            return known[1]
        record: NodeRecord | None = None
        try:
            said = decode_record(data)
            if said.node == node:
                record = said
                self.strangers.pop(node, None)
            else:
                self.strangers[node] = f"it calls itself {said.node}"
        except BadMessage as error:
            if node not in self.strangers:
                logger.warning("node %s cannot take part: %s", node, error)
            self.strangers[node] = error.message
        self._read[node] = (data, record)
        return record

    def _publish_often(self) -> None:
        lonely = 0.0
        while not self._left.wait(PUBLISH_EVERY):
            lonely += PUBLISH_EVERY
            if lonely >= LONELY and not self._met and (self.config.connect or self.config.multicast):
                lonely = 0.0
                where = ", ".join(self.config.connect) or "multicast"
                logger.warning("no other node of the network '%s' was met yet (%s); trying on", self.config.name, where)
            try:
                self._publish()
                self._remember()
            except Exception as error:  # it is tried again in a second
                logger.warning("the record of this node could not be published: %s", error)

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
        )

    def _segments(self, hosted: HostedLayers) -> list[MetaModel]:
        engine, load = hosted.engine, self._load(hosted)
        return [
            MetaModel(
                node=self.node,
                process=f"{self.epoch}.{start}",
                model=hosted.name,
                pipe=f"{hosted.name}/{engine.pipe.shape}",
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
                seconds=float(f"{stage.mean_pass_seconds:.2g}"),  # rounded, or every look would be news
                load=load,
            )
            for start, stage in sorted(engine.stages.items())
            if (hosted.name, stage.segment.layers) not in self._retired
        ]

    def _load(self, hosted: HostedLayers) -> float:
        """The share of the time since the last look in which the engine had work, to a tenth."""
        now, busy = time.monotonic(), hosted.engine.stats.busy
        then, before = self._busy.get(hosted.name, (now, busy))
        self._busy[hosted.name] = (now, busy)
        return round(min(1.0, (busy - before) / (now - then)), 1) if now > then else 0.0
