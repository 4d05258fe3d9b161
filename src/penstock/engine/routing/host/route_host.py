"""RouteHost: the routes of all origins that pass this node: their predecessors, the order of their jobs, their leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.domain.hidden_format import HiddenFormat
from penstock.domain.messages import (
    Bounce,
    BounceReason,
    Lease,
    Mark,
    OpenRoute,
    Ping,
    Pong,
    RouteOffer,
    StageProgress,
)
from penstock.domain.route import Leg, RouteId
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.engine.routing.host.arrivals import CREDITS, Arrivals
from penstock.engine.routing.host.heartbeat import Heartbeat
from penstock.engine.routing.host.leg_log import LegLog
from penstock.engine.routing.host.stage import Stage

MAX_ROUTES = 64  # of all origins together
MAX_LEASE_S = 600.0  # whatever an origin requests
MIN_LEASE_BLOCKS = 2  # a smaller lease is of no use
MEETING_RETRY_S = 0.1  # for nodes that have just joined to know each other
RECALL_RETRY_S = 0.3  # recalled blocks should be back after this
RECALL_TIMEOUT_S = 30.0  # an origin that keeps recalled blocks for longer loses its route
PROGRESS_INTERVAL_S = 0.1  # between two reports about one route
MARK_INTERVAL_S = 0.05  # between two Marks of one route, however many Pings its origin sends
WAITING_TTL_S = 15.0  # how long an origin that found no memory is remembered: it may try other paths before it requests again


class RoutePart(NamedTuple):
    """The layers of a stage that a route runs. It may enter and leave the stage in the middle."""

    stage: Stage
    layers: LayerRange


@dataclass(slots=True, eq=False)
class HostedRoute:
    id: RouteId
    legs: Mapping[int, Leg]  # by their first layer
    parts: Mapping[int, RoutePart]  # one for each stage of the legs, by its first layer
    width: int
    hidden_format: HiddenFormat
    lease: float
    last_heard: float  # when its last message came
    wants: int = 0  # blocks
    overdue_since: float | None = None  # since when it keeps recalled blocks
    arrivals: dict[int, Arrivals] = field(default_factory=dict)
    logs: dict[int, LegLog] = field(default_factory=dict)  # one for each leg, by its first layer
    handed: dict[int, int] = field(default_factory=dict)  # number of the newest NetworkJob sent on, by the last layer of its leg
    jobs_here: int = 0  # NetworkJobs that are on this node now
    next_report: float = 0.0  # when its origin may be sent the next StageProgress
    next_mark: float = 0.0  # when the nodes after this one may be sent the next Mark

    def successor(self, layer: int) -> str:
        """The node that comes after the leg that ends at this layer."""
        for leg in self.legs.values():
            if leg.layers.end == layer:
                return leg.successor
        raise AssertionError(f"no leg of the route {self.id} ends at layer {layer}")


class RouteHost:
    def __init__(
        self,
        stages: Mapping[int, Stage],
        *,
        model: str,
        shape: str,
        width: int,
        block_size: int,
        heartbeat: Heartbeat | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routes: dict[RouteId, HostedRoute] = {}
        self.draining = False
        self._alive: Mapping[str, int] = {}
        self._waiting: dict[str, float] = {}  # origins that found no memory -> until when they are remembered
        self._stages = stages
        self._model = model
        self._shape = shape
        self._block_size = block_size
        self._width = width
        self._clock = clock
        self._heartbeat = heartbeat or Heartbeat(clock)
        self._reordering: set[RouteId] = set()  # routes of which NetworkJobs are held back for earlier ones
        self._received: dict[str, int] = {}  # bytes of NetworkJobs by the node that sent them

    def open(self, sender: str, request: OpenRoute) -> RouteOffer:
        """Lease blocks to a route, or refuse with a reason."""
        route = request.route
        problem = self._refusal_reason(sender, request)
        if problem:
            return RouteOffer(route, reason=problem)
        for known in [known for known in self.routes if known.origin == route.origin and known < route]:
            self.close(known)  # from an earlier start of that origin, or given up: an origin has one route at a time
        if route not in self.routes:
            if len(self.routes) >= MAX_ROUTES:
                return RouteOffer(route, reason="too many routes pass it", retry_after=1.0)
            if strangers := self._alive and {leg.successor for leg in request.legs} - self._alive.keys() - {sender}:
                names = " and ".join(sorted(strangers))
                return RouteOffer(route, reason=f"it has not met node {names} yet", retry_after=MEETING_RETRY_S)
            parts = [part for leg in request.legs for part in self._parts(leg)]
            others = len(self._waiting.keys() - {sender, *(known.origin for known in self.routes)})  # leave them their part
            blocks = min(request.blocks, *(part.stage.unleased // (1 + others) for part in parts))
            if (blocks < MIN_LEASE_BLOCKS or sender in self._waiting) and len(self._waiting) < MAX_ROUTES:
                self._waiting[sender] = self._clock() + WAITING_TTL_S
            if blocks < MIN_LEASE_BLOCKS:
                return RouteOffer(route, reason="all its KV memory is leased (some was recalled)", retry_after=RECALL_RETRY_S)
            for part in parts:
                part.stage.open(route, blocks, prefix_cache=request.prefix_cache)
            self._enter(request, parts)
        self.routes[route].last_heard = self._clock()
        return RouteOffer(route, blocks=self._granted(self.routes[route]), credits=CREDITS)

    def close(self, route: RouteId) -> None:
        self._reordering.discard(route)
        if self.routes.pop(route, None) is not None:
            for stage in self._stages.values():
                stage.close(route)

    def close_dead_origins(self, alive: Mapping[str, int]) -> None:
        """Close the routes of origins that are gone or were restarted, and stop reserving memory for origins that waited for some
        and are gone. `alive` has the epoch of every live node.

        An origin that was never seen alive is spared: its OpenRoute may arrive before its record does.
        """
        before, self._alive = self._alive, alive

        def is_gone(origin: str) -> bool:
            return origin in before and origin not in alive

        self._waiting = {origin: until for origin, until in self._waiting.items() if not is_gone(origin)}
        for route in [route for route in self.routes if is_gone(route.origin) or alive.get(route.origin, 0) > route.epoch]:
            self.close(route)

    def renew(self, sender: str, ping: Ping) -> Lease | None:
        """Extend the lease of a route as far as its origin wants and others allow. None if the route is unknown."""
        route = self.routes.get(ping.route)
        if route is None or sender != ping.route.origin:
            return None
        route.last_heard, route.wants = self._clock(), ping.blocks
        share = self._share(route)
        for stage in self._leased(route):
            if not self.draining:
                stage.extend(route.id, min(ping.blocks, share))
        return Lease(route.id, ping.stamp, self._granted(route), share)

    def recalls(self) -> list[Lease]:
        """Make a Lease for every origin that has more than its share while another has less than its own, or nothing.

        Closes routes that have ignored a recall for too long.
        """
        now = self._clock()
        self._waiting = {origin: until for origin, until in self._waiting.items() if until > now}
        have = {route: (self._granted(route), self._share(route)) for route in self.routes.values()}
        if not self._waiting_origins and not any(granted < min(route.wants, share) for route, (granted, share) in have.items()):
            have = {}
        # origins that want less than they have give that back first
        have = {route: (granted, min(share, max(route.wants, MIN_LEASE_BLOCKS))) for route, (granted, share) in have.items()}
        over = {route: figures for route, figures in have.items() if figures[0] > figures[1]}
        for route in list(self.routes.values()):
            route.overdue_since = None if route not in over else now if route.overdue_since is None else route.overdue_since
            if route.overdue_since is not None and now - route.overdue_since > RECALL_TIMEOUT_S:
                self.close(route.id)
        return [Lease(route.id, 0, granted, share) for route, (granted, share) in over.items() if route.id in self.routes]

    def take_progress(self) -> list[StageProgress]:
        """Report the prompts that have advanced at a stage, for routes whose last report is at least PROGRESS_INTERVAL_S old."""
        now = self._clock()
        reports: list[StageProgress] = []
        for route in self.routes.values():
            if now < route.next_report:
                continue
            for stage, layers in route.parts.values():
                if positions := stage.leases[route.id].take_progress():
                    reports.append(StageProgress(route.id, layers.end, positions))
                    route.next_report = now + PROGRESS_INTERVAL_S
        return reports

    def arrive(self, sender: str, job: NetworkJob) -> list[NetworkJob] | Bounce:
        """Take a NetworkJob, and return those that can be run now."""
        route = self.routes.get(job.route)
        if route is None:
            return Bounce(job.route, job.number, BounceReason.UNKNOWN_ROUTE)
        leg = route.legs.get(job.current_layer)
        agreed = job.hidden is None or (job.hidden.dtype, job.hidden.width) == (route.hidden_format, route.width)
        if leg is None or leg.predecessor != sender or not agreed:
            return Bounce(job.route, job.number, BounceReason.MALFORMED)
        route.last_heard = self._clock()
        if route.jobs_here >= CREDITS * len(route.legs):
            return Bounce(job.route, job.number, BounceReason.FLOOD)
        return self._count_jobs(route, route.arrivals[job.current_layer].take(job, self._clock()))

    def is_predecessor(self, sender: str, route: RouteId) -> bool:
        """Whether that node hands this route's NetworkJobs to us. Any node can name any route, so messages from others are never
        bounced to its origin. Called from other threads too."""
        found = self.routes.get(route)
        if found is not None:
            for leg in found.legs.values():
                if leg.predecessor == sender:
                    return True
        return False

    def overdue(self) -> list[NetworkJob]:
        if not self._reordering:
            return []
        now = self._clock()
        return [
            job
            for route in self.routes.values()
            if route.id in self._reordering
            for arrivals in route.arrivals.values()
            for job in self._count_jobs(route, arrivals.overdue(now))
        ]

    @property
    def reordering(self) -> bool:
        """Whether NetworkJobs are held back for earlier ones."""
        return bool(self._reordering)

    def count_pending(self, by_sender: dict[str, int]) -> None:
        """Add the bytes of NetworkJobs that are held back for earlier ones."""
        for held in self._reordering:
            route = self.routes[held]
            for start, arrivals in route.arrivals.items():
                if arrivals.waiting:
                    sender = route.legs[start].predecessor
                    by_sender[sender] = by_sender.get(sender, 0) + arrivals.pending_bytes

    def on_granted(self, job: NetworkJob) -> None:
        """Record a NetworkJob of this node's own that begins its way here."""
        route = self.routes.get(job.route)
        if route is not None and job.current_layer in route.logs:
            route.logs[job.current_layer].arrived(job.number)

    def on_handed_over(self, job: NetworkJob) -> None:
        """Record a NetworkJob that was given to the wire, after all older ones of its leg."""
        route = self.routes.get(job.route)
        if route is not None:
            route.handed[job.current_layer] = max(job.number, route.handed.get(job.current_layer, -1))

    def on_job_left(self, job: NetworkJob, *, arrived: bool) -> None:
        """Record that a visit has ended. `arrived`: it came from another node."""
        route = self.routes.get(job.route)
        if route is None:
            return
        route.jobs_here -= arrived
        for start, leg in route.legs.items():
            if start <= job.current_layer <= leg.layers.end:
                route.logs[start].left(job.number)

    def expire(self) -> list[RouteId]:
        """Close the routes whose origins were silent for longer than their lease."""
        now = self._clock()
        gone = [route.id for route in self.routes.values() if now - route.last_heard > route.lease]
        for route in gone:
            self.close(route)
        return gone

    # ---- on the network's thread, also during a pass ----

    def answer(self, sender: str, ping: Ping) -> Pong | Bounce:
        """Report what has arrived on the route's legs here, and how the compute thread is. Keeps the route open."""
        route = self.routes.get(ping.route)
        if route is None or sender != ping.route.origin:
            return Bounce(ping.route, -1, BounceReason.UNKNOWN_ROUTE)
        route.last_heard = self._clock()
        for log in route.logs.values():
            log.settle(ping.settled)
        legs = tuple(log.report(self._received.get(route.legs[start].predecessor, 0)) for start, log in route.logs.items())
        beat = self._heartbeat
        return Pong(route.id, ping.stamp, beat.age, beat.expected, beat.passes, legs)

    def marks(self, sender: str, ping: Ping) -> list[tuple[str, Mark]]:
        """For each leg with NetworkJobs that the origin still waits for: a Mark for the node that comes next."""
        route = self.routes.get(ping.route)
        if route is None or sender != ping.route.origin:
            return []
        now = self._clock()
        if now < route.next_mark:
            return []
        handed = [(leg, route.handed.get(leg.layers.end, -1)) for leg in route.legs.values()]
        marks = [
            (leg.successor, Mark(route.id, leg.layers.end, number)) for leg, number in handed if number > max(ping.settled, -1)
        ]
        if marks:
            route.next_mark = now + MARK_INTERVAL_S
        return marks

    def on_arrival(self, sender: str, job: NetworkJob, size: int) -> None:
        log = self._log(sender, job.route, job.current_layer)
        if log is not None:
            self._received[sender] = self._received.get(sender, 0) + size
            log.arrived(job.number)

    def on_mark(self, sender: str, mark: Mark) -> None:
        log = self._log(sender, mark.route, mark.layer)
        if log is not None:
            log.marked(mark.number)

    def _log(self, sender: str, route: RouteId, layer: int) -> LegLog | None:
        """The log of a leg, if the sender is the node before it."""
        found = self.routes.get(route)
        leg = None if found is None else found.legs.get(layer)
        return None if found is None or leg is None or leg.predecessor != sender else found.logs[layer]

    # ---- inside ----

    def _refusal_reason(self, sender: str, request: OpenRoute) -> str:
        route = request.route
        if sender != route.origin:
            return "the request names another node as its origin"
        if self.draining:
            return "it is leaving"
        if request.model != self._model or request.shape != self._shape:
            return f"its model is a different one ({self._model})"
        if request.width != self._width:
            return f"its hidden states have {self._width} numbers, not {request.width}"
        if request.block_size != self._block_size:
            return f"its KV blocks have {self._block_size} tokens, not {request.block_size} (scheduler.block_size)"
        if any(known.origin == route.origin and known.epoch > route.epoch for known in self.routes):
            return "the origin was restarted and has newer routes"
        if not request.legs or any(not self._can_run(leg) for leg in request.legs):
            return "it does not hold these layers"
        parts = [part for leg in request.legs for part in self._parts(leg)]
        if len({part.stage for part in parts}) < len(parts):  # a lease has one KV log at each stage
            return "a route may pass a segment only once"
        return ""

    def _can_run(self, leg: Leg) -> bool:
        parts = self._parts(leg)
        return bool(parts) and parts[-1].layers.end == leg.layers.end

    def _parts(self, leg: Leg) -> list[RoutePart]:
        """The parts of our stages that a leg runs, up to the first layer that is not here."""
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
        by_layer = {part.layers.start: part for part in parts}
        route = HostedRoute(
            request.route,
            legs,
            by_layer,
            request.width,
            request.hidden_format,
            min(request.lease, MAX_LEASE_S),
            self._clock(),
            request.blocks,
        )
        route.arrivals = {start: Arrivals() for start in legs}
        route.logs = {start: LegLog(start, self._clock) for start in legs}
        self.routes[request.route] = route

    def _leased(self, route: HostedRoute) -> list[Stage]:
        return [stage for stage in self._stages.values() if route.id in stage.leases]

    def _granted(self, route: HostedRoute) -> int:
        return min(stage.leases[route.id].granted for stage in self._leased(route))

    def _share(self, route: HostedRoute) -> int:
        """The route's fair share: an equal part of each segment, plus what other routes do not want."""
        return min(self._share_of(stage, route) for stage in self._leased(route))

    def _share_of(self, stage: Stage, route: HostedRoute) -> int:
        left = stage.segment.kv_blocks
        others = sorted(self.routes[other].wants for other in stage.leases if other != route.id)
        parts = len(others) + 1 + self._waiting_origins
        for wants in others:
            if wants >= left // parts:
                break
            left, parts = left - wants, parts - 1
        return left // parts

    @property
    def _waiting_origins(self) -> int:
        """How many origins found no memory and still have none. One that got some is remembered for a while: it may have to give
        that back and start again, because another node of its path has none."""
        return len(self._waiting.keys() - {route.origin for route in self.routes})

    def _count_jobs(self, route: HostedRoute, jobs: Iterable[NetworkJob]) -> list[NetworkJob]:
        """Count NetworkJobs that can be run now, and note whether others still wait."""
        ready = list(jobs)
        route.jobs_here += len(ready)
        self._reordering.discard(route.id)
        for arrivals in route.arrivals.values():
            if arrivals.waiting:
                self._reordering.add(route.id)
        return ready
