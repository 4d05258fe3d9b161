"""RouteHost: the routes that pass this node. Who may hand Spans over, in which order they go on, and what each has leased."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.domain.messages import Bounce, BounceReason, OpenRoute, Ping, Pong, RouteOffer
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.engine.routing.stage import Stage

CREDITS = 32  # NetworkJobs of one route on this node at once
MAX_ROUTES = 64  # of all origins together
MAX_LEASE_S = 600.0  # seconds, whatever is asked for
REORDER_TIMEOUT_S = 0.03  # seconds for a NetworkJob that others have overtaken
MIN_LEASE_BLOCKS = 2  # a lease with less is of no use
RECALL_RETRY_S = 0.3  # seconds until blocks that were recalled should have come back
RECALL_TIMEOUT_S = 30.0  # seconds after which an origin that keeps what was called back loses its route
WAITING_TTL_S = 4.0  # seconds for which an origin that found no memory counts: longer than it waits before it asks again


class Arrivals:
    """NetworkJobs of one leg, put back into the order in which the origin sent them.

    One that is missing is waited for a little; then the others go on, and it may still follow.
    """

    def __init__(self) -> None:
        self._next = 0
        self._held: dict[int, tuple[NetworkJob, float]] = {}
        self._skipped: set[int] = set()

    def take(self, job: NetworkJob, now: float) -> list[NetworkJob]:
        """Those that can go on now that this one is here. A repetition is dropped."""
        number = job.number
        if number < self._next:
            if number not in self._skipped:
                return []
            self._skipped.remove(number)
            return [job]
        if number in self._held:
            return []
        before: list[NetworkJob] = []
        if number > self._next + CREDITS:  # far ahead: what is missing before it will not come any more
            before = [self._held.pop(held)[0] for held in sorted(self._held)]
            self._next = number
        self._held[number] = (job, now + REORDER_TIMEOUT_S)
        return [*before, *self._ready()]

    def overdue(self, now: float) -> list[NetworkJob]:
        """Those that have waited long enough for the ones before them."""
        ready: list[NetworkJob] = []
        while self._held and min(until for _, until in self._held.values()) <= now:
            first = min(self._held)
            self._skipped.update(range(self._next, first))
            while len(self._skipped) > 4 * CREDITS:
                self._skipped.remove(min(self._skipped))
            self._next = first
            ready += self._ready()
        return ready

    @property
    def waiting(self) -> bool:
        return bool(self._held)

    def _ready(self) -> Iterator[NetworkJob]:
        while self._next in self._held:
            yield self._held.pop(self._next)[0]
            self._next += 1


class RoutePart(NamedTuple):
    """The layers of a stage that a route runs: it may enter and leave the stage in its middle."""

    stage: Stage
    layers: LayerRange


@dataclass(slots=True, eq=False)
class HostedRoute:
    id: RouteId
    legs: Mapping[int, Leg]  # by their first layer
    parts: Mapping[int, RoutePart]  # of the legs, one for each stage on them, by their first layer
    width: int
    lease: float
    last_heard: float  # when anything came of it
    wants: int = 0  # blocks
    overdue_since: float | None = None  # since when it keeps blocks that were called back
    arrivals: dict[int, Arrivals] = field(default_factory=dict)
    jobs_here: int = 0  # NetworkJobs that are on this node now

    def successor(self, layer: int) -> str:
        """Who comes after the leg that ends here."""
        return next(leg.successor for leg in self.legs.values() if leg.layers.end == layer)


class RouteHost:
    def __init__(
        self,
        stages: Mapping[int, Stage],
        *,
        model: str,
        shape: str,
        width: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routes: dict[RouteId, HostedRoute] = {}
        self.draining = False
        self._alive: set[str] = set()
        self._waiting: dict[str, float] = {}  # origins that found no memory, and until when they count
        self._stages, self._model, self._shape, self._block_size = stages, model, shape, block_size
        self._width, self._clock = width, clock

    def open(self, sender: str, request: OpenRoute) -> RouteOffer:
        """Lease blocks to a route, or say why not."""
        route = request.route
        problem = self._refusal_reason(sender, request)
        if problem:
            return RouteOffer(route, reason=problem)
        for known in [known for known in self.routes if known.origin == route.origin and known < route]:
            self.close(known)  # of a former life of that origin, or one that it has given up: it has one at a time
        if route not in self.routes:
            if len(self.routes) >= MAX_ROUTES:
                return RouteOffer(route, reason="too many routes pass this node", retry_after=1.0)
            parts = [part for leg in request.legs for part in self._parts(leg)]
            blocks = min(request.blocks, *(part.stage.unleased for part in parts))
            if (blocks < MIN_LEASE_BLOCKS or sender in self._waiting) and len(self._waiting) < MAX_ROUTES:
                self._waiting[sender] = self._clock() + WAITING_TTL_S
            if blocks < MIN_LEASE_BLOCKS:
                return RouteOffer(route, reason="all its KV memory is leased (some is called back)", retry_after=RECALL_RETRY_S)
            for part in parts:
                part.stage.open(route, blocks, prefix_cache=request.prefix_cache)
            self._enter(request, parts)
        return RouteOffer(route, blocks=self._granted(self.routes[route]), credits=CREDITS)

    def close(self, route: RouteId) -> None:
        if self.routes.pop(route, None) is not None:
            for stage in self._stages.values():
                stage.close(route)

    def close_dead_origins(self, alive: Mapping[str, int]) -> None:
        """Free what origins hold that are gone, or have started anew: `alive` has the epoch of every live node. One that was
        never seen alive may be quicker than the news of it."""
        gone = self._alive - alive.keys()
        self._alive = set(alive)
        for route in [route for route in self.routes if route.origin in gone or alive.get(route.origin, 0) > route.epoch]:
            self.close(route)

    def ping(self, sender: str, ping: Ping) -> Pong | Bounce:
        route = self.routes.get(ping.route)
        if route is None or sender != ping.route.origin:
            return Bounce(ping.route, -1, BounceReason.UNKNOWN_ROUTE)
        route.last_heard, route.wants = self._clock(), ping.blocks
        share = self._share(route)
        for stage in self._leased(route):
            if not self.draining:
                stage.extend(route.id, min(ping.blocks, share))
        return Pong(route.id, ping.stamp, self._granted(route), share)

    def recalls(self) -> list[Pong]:
        """What to tell origins that have more than their share while others have less than theirs, or nothing."""
        now = self._clock()
        self._waiting = {origin: until for origin, until in self._waiting.items() if until > now}
        have = {route: (self._granted(route), self._share(route)) for route in self.routes.values()}
        if not self._still_waiting and not any(granted < min(route.wants, share) for route, (granted, share) in have.items()):
            have = {}
        # who does not use what it has gives it back first
        have = {route: (granted, min(share, max(route.wants, MIN_LEASE_BLOCKS))) for route, (granted, share) in have.items()}
        over = {route: pong for route, pong in have.items() if pong[0] > pong[1]}
        for route in list(self.routes.values()):
            route.overdue_since = None if route not in over else now if route.overdue_since is None else route.overdue_since
            if route.overdue_since is not None and now - route.overdue_since > RECALL_TIMEOUT_S:
                self.close(route.id)
        return [Pong(route.id, 0, granted, share) for route, (granted, share) in over.items() if route.id in self.routes]

    def arrive(self, sender: str, job: NetworkJob) -> list[NetworkJob] | Bounce:
        """Those NetworkJobs that can be run now that this one is here."""
        route = self.routes.get(job.route)
        if route is None:
            return Bounce(job.route, job.number, BounceReason.UNKNOWN_ROUTE)
        leg = route.legs.get(job.current_layer)
        if leg is None or leg.predecessor != sender or (job.hidden is not None and job.hidden.width != route.width):
            return Bounce(job.route, job.number, BounceReason.MALFORMED)
        route.last_heard = self._clock()
        if route.jobs_here >= CREDITS * len(route.legs):
            return Bounce(job.route, job.number, BounceReason.FLOOD)
        return self._count_jobs(route, route.arrivals[job.current_layer].take(job, self._clock()))

    def is_predecessor(self, sender: str, route: RouteId) -> bool:
        """Whether this route's NetworkJobs come from that node. Anybody can name a route: what others send is not its origin's
        concern. Called from other threads too."""
        found = self.routes.get(route)
        return found is not None and any(leg.predecessor == sender for leg in found.legs.values())

    def overdue(self) -> list[NetworkJob]:
        now = self._clock()
        return [
            job
            for route in self.routes.values()
            for arrivals in route.arrivals.values()
            if arrivals.waiting
            for job in self._count_jobs(route, arrivals.overdue(now))
        ]

    @property
    def reordering(self) -> bool:
        """Whether NetworkJobs wait for others that were sent before them."""
        return any(arrivals.waiting for route in self.routes.values() for arrivals in route.arrivals.values())

    def on_job_left(self, route: RouteId) -> None:
        """A NetworkJob has left this node."""
        found = self.routes.get(route)
        if found is not None:
            found.jobs_here -= 1

    def expire(self) -> list[RouteId]:
        """Close the routes that nobody has spoken for."""
        now = self._clock()
        gone = [route.id for route in self.routes.values() if now - route.last_heard > route.lease]
        for route in gone:
            self.close(route)
        return gone

    # ---- inside ----

    def _refusal_reason(self, sender: str, request: OpenRoute) -> str:
        route = request.route
        if sender != route.origin:
            return "it was asked for in another node's name"
        if self.draining:
            return "the node is leaving"
        if request.model != self._model or request.shape != self._shape:
            return f"the model is not the same here ({self._model})"
        if request.width != self._width:
            return f"hidden states have {self._width} numbers here and {request.width} there"
        if request.block_size != self._block_size:
            return f"KV blocks have {self._block_size} tokens here and {request.block_size} there (scheduler.block_size)"
        if any(known.origin == route.origin and known.epoch > route.epoch for known in self.routes):
            return "a later start of that node has routes here"
        if not request.legs or any(not self._can_run(leg) for leg in request.legs):
            return "this node does not hold these layers"
        parts = [part for leg in request.legs for part in self._parts(leg)]
        if len({part.stage for part in parts}) < len(parts):  # the KV of a lease is one log for each stage
            return "a route passes a segment only once"
        return ""

    def _can_run(self, leg: Leg) -> bool:
        parts = self._parts(leg)
        return bool(parts) and parts[-1].layers.end == leg.layers.end

    def _parts(self, leg: Leg) -> list[RoutePart]:
        """What a leg runs of the stages here, as far as they hold its layers without a gap."""
        parts: list[RoutePart] = []
        layer = leg.layers.start
        while layer < leg.layers.end and (stage := self._holder(layer)) is not None:
            parts.append(RoutePart(stage, LayerRange(layer, min(stage.segment.layers.end, leg.layers.end))))
            layer = parts[-1].layers.end
        return parts

    def _holder(self, layer: int) -> Stage | None:
        found = (stage for stage in self._stages.values() if stage.segment.layers.start <= layer < stage.segment.layers.end)
        return next(found, None)

    def _enter(self, request: OpenRoute, parts: Iterable[RoutePart]) -> None:
        legs = {leg.layers.start: leg for leg in request.legs}
        stays = {part.layers.start: part for part in parts}
        route = HostedRoute(
            request.route, legs, stays, request.width, min(request.lease, MAX_LEASE_S), self._clock(), request.blocks
        )
        route.arrivals = {start: Arrivals() for start in legs}
        self.routes[request.route] = route

    def _leased(self, route: HostedRoute) -> list[Stage]:
        return [stage for stage in self._stages.values() if route.id in stage.leases]

    def _granted(self, route: HostedRoute) -> int:
        return min(stage.leases[route.id].granted for stage in self._leased(route))

    def _share(self, route: HostedRoute) -> int:
        """Every route that passes a segment, or waits to, may have an equal part of it; what one does not want is for others."""
        return min(self._share_of(stage, route) for stage in self._leased(route))

    def _share_of(self, stage: Stage, route: HostedRoute) -> int:
        left = stage.segment.kv_blocks
        others = sorted(self.routes[other].wants for other in stage.leases if other != route.id)
        parts = len(others) + 1 + self._still_waiting
        for wants in others:
            if wants >= left // parts:
                break
            left, parts = left - wants, parts - 1
        return left // parts

    @property
    def _still_waiting(self) -> int:
        """Origins that found no memory and have none now. Who got some keeps its place for a while: it may have to give it back
        and start again, because another node on its way has none."""
        return len(self._waiting.keys() - {route.origin for route in self.routes})

    def _count_jobs(self, route: HostedRoute, jobs: Iterable[NetworkJob]) -> list[NetworkJob]:
        ready = list(jobs)
        route.jobs_here += len(ready)
        return ready
