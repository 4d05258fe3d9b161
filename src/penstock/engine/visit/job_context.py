"""JobContext: what a visit needs on this node, and where its NetworkJob goes next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import NextLayer
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob
from penstock.engine.routing.no_origin import NoOrigin
from penstock.engine.routing.origin import Origin
from penstock.engine.routing.route_host import RouteHost, RoutePart
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats


class Ends(Protocol):
    """The part of an EndModel that the processor needs."""

    eos_ids: frozenset[int]

    def compute_embed(self, token_ids: list[int]) -> Tensor: ...

    def compute_norm(self, hidden: Tensor) -> Tensor: ...

    def compute_head(self, normed: Tensor) -> Tensor: ...


@dataclass(slots=True)
class JobContext:
    """What a visit needs on this node. `ends` is None where only layers are held."""

    config: EngineConfig
    pipe: Pipe
    host: RouteHost
    stats: EngineStats
    predictor: StepTimePredictor
    ends: Ends | None
    origin: Origin | NoOrigin
    clock: Callable[[], float] = time.monotonic
    device: str = "cpu"

    def next_layer(self, job: NetworkJob) -> NextLayer:
        hosted = self.host.routes.get(job.route)
        if hosted is None and not self.is_ours(job.route):
            return NextLayer.MISSING  # the route was closed
        if job.current_layer == self.pipe.num_layers:
            return NextLayer.COMPLETE
        if hosted is not None and job.current_layer in hosted.parts:
            return NextLayer.LOCAL
        return NextLayer.REMOTE

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

    @property
    def sequences(self) -> EngineSequenceManager:
        return self.origin.sequences

    @property
    def own_origin(self) -> Origin:
        assert isinstance(self.origin, Origin)
        return self.origin

    @property
    def own_ends(self) -> Ends:
        assert self.ends is not None
        return self.ends
