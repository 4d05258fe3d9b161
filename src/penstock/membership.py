"""Membership: a node's part in a network. Its record, what the others publish, and the messages in both directions."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import threading
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from penstock import __version__
from penstock.config.network import NetworkConfig
from penstock.domain.messages import Message, OpenRoute
from penstock.domain.meta_model import MetaModel, NodeRecord
from penstock.domain.span import NetworkJob
from penstock.engine.engine import Engine
from penstock.engine.hosted_model import HostedLayers, HostedModel
from penstock.engine.job_receiver import JobReceiver
from penstock.engine.origin import Origin
from penstock.errors import BadMessage
from penstock.network.codec import PROTOCOL, decode, decode_record, encode_record
from penstock.network.router import Router
from penstock.network.wire import Wire
from penstock.pipes.meta_pipe import MetaPipe, weights_differ
from penstock.pipes.model_manager import LoadedModel
from penstock.pipes.pipe import Pipe
from penstock.pipes.pipe_manager import PipeManager

logger = logging.getLogger("penstock.network")

LONELY = 30.0  # seconds between two complaints that nobody is there
PUBLISH_EVERY = 1.0  # seconds, if anything has changed
CERTIFICATES = ["--ca-file", "CA.pem", "--certificate-file", "NODE.pem", "--key-file", "NODE.key"]
HANDED_OVER_LOOK = 0.05  # seconds


class Membership:
    """Joins when started; `leave` says goodbye."""

    def __init__(self, router: Router, config: NetworkConfig, *, node: str, epoch: int) -> None:
        self.node, self.epoch, self.config = node, epoch, config
        self.strangers: dict[str, str] = {}  # nodes whose records we cannot read, and why
        self._router = router
        self._engines: dict[str, Engine] = {}
        self._hosted: list[HostedLayers] = []
        self.wire = Wire(router, on_lost=self._on_lost)
        self.receiver = JobReceiver(decode, self._engines, self.wire.send)
        self.pipes = PipeManager(node, self.wire)
        self._draining = False
        self._published = b""
        self._read: dict[str, tuple[bytes, NodeRecord | None]] = {}
        self._changing, self._publishing = threading.Lock(), threading.Lock()
        self._left = threading.Event()
        self._busy: dict[str, tuple[float, float]] = {}
        self._met = False  # another node
        self._unfit: dict[tuple[str, int], str] = {}  # nodes whose layers we cannot use, and why
        self._publisher = threading.Thread(target=self._publish_often, name="penstock-records", daemon=True)

    def make_pipe(self, loaded: LoadedModel, block_size: int) -> Pipe:
        return self.pipes.make(loaded, block_size)

    def host(self, hosted: HostedLayers) -> None:
        self._hosted.append(hosted)
        self._engines[hosted.name] = hosted.engine

    def start(self) -> None:
        """Join the network. The engines must be running."""
        self._router.start(self.receiver.on_message, self._on_change)
        self._publish()
        self._on_change()
        self._publisher.start()

    def announce_leaving(self) -> None:
        """Tell the others that we are about to go, so that they find another way."""
        if not self._draining:
            self._draining = True
            for engine in self._engines.values():
                engine.host.draining = True
            self._publish()

    def wait_until_unused(self, patience: float) -> None:
        """Until no other node's route passes here any more."""
        until = time.monotonic() + patience
        while time.monotonic() < until and self.foreign_routes:
            time.sleep(HANDED_OVER_LOOK)

    @property
    def foreign_routes(self) -> int:
        return sum(route.origin != self.node for engine in self._engines.values() for route in list(engine.host.routes))

    def leave(self) -> None:
        """The engines have stopped."""
        self._left.set()
        self.wire.close()
        self._router.close()

    # ---- inside ----

    def _on_lost(self, node: str, message: Message) -> None:
        if isinstance(message, NetworkJob | OpenRoute):
            for engine in self._engines.values():
                if engine.concerns(message.route):
                    engine.on_unsent(node, message)

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
        for engine in self._engines.values():
            engine.on_network_change()

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

    def _tell_unfit(self, meta: MetaModel) -> None:
        """Once for each node that has layers which we cannot use."""
        engine = self._engines.get(meta.model)
        if engine is not None and meta.block_size != engine.config.block_size and (meta.node, meta.block_size) not in self._unfit:
            self._unfit[meta.node, meta.block_size] = (
                f"Node {meta.node} and this one cannot work together: KV blocks have {meta.block_size} tokens there and "
                f"{engine.config.block_size} here (--block-size)."
            )
            logger.warning("%s", self._unfit[meta.node, meta.block_size])

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
                seconds=float(f"{stage.lately:.2g}"),  # rounded, or every look would be news
                load=load,
            )
            for start, stage in engine.stages.items()
        ]

    def _load(self, hosted: HostedLayers) -> float:
        """The share of the time since the last look in which the engine had work, to a tenth."""
        now, busy = time.monotonic(), hosted.engine.stats.busy
        then, before = self._busy.get(hosted.name, (now, busy))
        self._busy[hosted.name] = (now, busy)
        return round(min(1.0, (busy - before) / (now - then)), 1) if now > then else 0.0

    # ---- what `penstock network status` shows ----

    def describe(self) -> dict[str, Any]:
        config, trips = self.config, self._round_trips()
        return {
            "network": {
                "name": config.name,
                "open": config.open,
                "listen": list(config.listen),
                "connect": list(config.connect),
                "node_id": self.node,
            },
            "nodes": [
                {
                    "node": record.node,
                    "self": record.node == self.node,
                    "version": record.version,
                    "pid": record.pid,
                    "draining": record.draining,
                    "serves": list(record.serves),
                    "round_trip": trips.get(record.node),
                }
                for record in sorted(self.pipes.records, key=lambda record: record.node)
            ],
            "strangers": dict(self.strangers),
            "refused": self._refused(),
            "traffic": {node: asdict(traffic) for node, traffic in self.wire.traffic().items()},
            "pipes": [self._pipe(pipe) for pipe in self.pipes.pipes()],
        }

    def _round_trips(self) -> dict[str, float]:
        return {
            node: trip
            for engine in self._engines.values()
            if engine.origin is not None
            for node, trip in list(engine.origin.opener.round_trips.items())
        }

    def _pipe(self, pipe: MetaPipe) -> dict[str, Any]:
        engine = self._engines.get(pipe.model)
        origin = None if engine is None or engine.pipe.shape != pipe.shape else engine.origin
        return {
            "model": pipe.model,
            "num_layers": pipe.num_layers,
            "complete": pipe.is_complete(),
            "missing": [list(layers) for layers in pipe.missing()],
            "explain": pipe.explain(),
            "warnings": [*map(str, weights_differ(pipe.segments)), *self._unfit.values()],
            "segments": [_segment(meta) for meta in pipe.segments],
            "route": None if origin is None else _route(origin),
            "run": self._how_to_fill(pipe),
        }

    def _refused(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for engine in self._engines.values():
            counts.update(dict(engine.stats.refused))
        return dict(counts)

    def _how_to_fill(self, pipe: MetaPipe) -> str:
        """What to run on another machine. It may be pasted into a shell, and a model's name may come from a peer."""
        hole = pipe.bridge()
        if hole is None:
            return ""
        layers = ",".join(map(str, pipe.missing())) or str(hole)
        words = ["penstock", "serve", "--model", pipe.model, "--layers", layers]
        if any(pipe.model in record.serves for record in self.pipes.records):
            words.append("--no-load-ends")
        words += ["--open-network"] if self.config.open else CERTIFICATES
        words += [] if self.config.name == "penstock" else ["--network", self.config.name]
        endpoints = [reachable(endpoint) for endpoint in self.config.listen] or list(self.config.connect)
        words += ["--connect", ",".join(endpoints)] if endpoints else ["--multicast"]
        return shlex.join(words)


def reachable(endpoint: str) -> str:
    """An endpoint that listens on every address, as others can reach it."""
    if "/0.0.0.0:" not in endpoint and "/[::]:" not in endpoint:
        return endpoint
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses the way out
            address = str(probe.getsockname()[0])
    except OSError:
        address = socket.gethostname()
    return endpoint.replace("/0.0.0.0:", f"/{address}:").replace("/[::]:", f"/{address}:")


def _segment(meta: MetaModel) -> dict[str, Any]:
    size = meta.block_size
    return {
        "node": meta.node,
        "layers": list(meta.layers),
        "device": meta.device,
        "dtype": meta.dtype,
        "kv_tokens": meta.kv_blocks * size,
        "kv_leased": (meta.kv_blocks - meta.kv_free) * size,
        "kv_used": meta.kv_held * size,
        "seconds": meta.seconds,
        "load": meta.load,
        "draining": meta.draining,
    }


def _route(origin: Origin) -> dict[str, Any]:
    """Read while the compute thread works: each figure is right, if not all of the same instant."""
    route, opening, stats = origin.route, origin.opener.opening, origin.stats
    shown = route or opening
    return {
        "state": "open" if route else "opening" if opening else "none",
        "hops": [{"node": hop.node, "layers": list(hop.layers)} for hop in shown.hops] if shown else [],
        "why": shown.why if shown else origin.opener.trouble,
        "in_flight": len(origin.in_flight),
        "window": origin.window.size,
        "round_trip": origin.window.round_trip,
        "between_nodes": origin.window.usual_hops,
        "kv_tokens": origin.sequences.pool.capacity * origin.sequences.pool.block_size,
        "lost": stats.lost_jobs,
        "recoveries": stats.recoveries,
        "last_pause": stats.last_pause,
        "longest_wait": stats.longest_wait,
        "last_reason": stats.last_break,
    }
