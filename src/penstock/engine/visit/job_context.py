"""JobContext: what the visits of one engine need on this node, and where a NetworkJob goes next."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import COMPLETE, LOCAL, MISSING, REMOTE, NextLayer
from penstock.domain.messages import BounceReason
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob
from penstock.engine.routing.host.heartbeat import Heartbeat
from penstock.engine.routing.host.route_host import RouteHost, RoutePart
from penstock.engine.routing.origin.no_origin import NoOrigin
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.model.ends import StepDecoder
from penstock.model.sampling.picker import Picker
from penstock.model.segment import Segment
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats

LOG_INTERVAL_S = 10.0  # between two log lines of the same kind
EXPECTED_REFUSALS = (BounceReason.UNKNOWN_ROUTE.name.lower(), "not_expected", "closed_route")  # usual after a route broke


class Ends(Protocol):
    """The part of an EndModel that the processor needs."""

    eos_ids: frozenset[int]
    picker: Picker | None

    def decoder(self, segments: list[Segment]) -> StepDecoder | None: ...

    def compute_embed(self, token_ids: list[int]) -> Tensor: ...

    def compute_norm(self, hidden: Tensor) -> Tensor: ...

    def compute_head(self, normed: Tensor) -> Tensor: ...


@dataclass(slots=True)
class JobContext:
    """What visits need on this node; one for each engine. The jobs are `sequences`.

    end_model: None where only layers are held.
    """

    config: EngineConfig
    pipe: Pipe
    host: RouteHost
    stats: EngineStats
    predictor: StepTimePredictor
    end_model: Ends | None
    origin: Origin | NoOrigin
    heartbeat: Heartbeat
    logger: logging.Logger
    clock: Callable[[], float] = time.monotonic
    device: str = "cpu"
    _last_logged: dict[str, float] = field(default_factory=dict)  # by kind
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def next_layer(self, job: NetworkJob) -> NextLayer:
        hosted = self.host.routes.get(job.route)
        if hosted is None and not self.is_ours(job.route):
            return MISSING  # the route was closed
        if job.current_layer == self.pipe.num_layers:
            return COMPLETE
        if hosted is not None and job.current_layer in hosted.parts:
            return LOCAL
        return REMOTE

    def part(self, job: NetworkJob) -> RoutePart | None:
        """The layers that the job runs here next."""
        hosted = self.host.routes.get(job.route)
        return None if hosted is None else hosted.parts.get(job.current_layer)

    def successor(self, job: NetworkJob) -> str:
        """The node that comes next on the job's route."""
        if job.current_layer == 0:
            assert self.origin.route is not None
            return self.origin.route.hops[0].node
        return self.host.routes[job.route].successor(job.current_layer)

    def is_ours(self, route: RouteId) -> bool:
        return self.origin.route is not None and self.origin.route.id == route

    def count_refused(self, reason: str, sender: str, detail: str = "") -> None:
        """Count a message from another node that was not accepted. May be called by any thread."""
        with self._counting:
            count = self.stats.refused[reason] = self.stats.refused.get(reason, 0) + 1
        level = logging.DEBUG if reason in EXPECTED_REFUSALS else logging.WARNING
        self.log_throttled(
            reason, level, "refused a message from node %s: %s (%d so far) %s", sender, reason.replace("_", " "), count, detail
        )

    def log_throttled(self, kind: str, level: int, message: str, *values: object) -> None:
        """Log a line, unless one of its kind was logged shortly before."""
        now = self.clock()
        if now - self._last_logged.get(kind, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._last_logged[kind] = now
            self.logger.log(level, message, *values)

    @property
    def sequences(self) -> EngineSequenceManager:
        return self.origin.sequences

    @property
    def own_origin(self) -> Origin:
        assert isinstance(self.origin, Origin)
        return self.origin

    @property
    def own_end_model(self) -> Ends:
        assert self.end_model is not None
        return self.end_model
