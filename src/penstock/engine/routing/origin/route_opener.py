"""RouteOpener: opens a route for an origin over the best path, all or nothing."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.config.engine import EngineConfig
from penstock.domain.messages import CloseRoute, OpenRoute, RouteOffer
from penstock.domain.meta_model import Link
from penstock.domain.route import Hop, RouteId, legs_of
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.host.leg_log import LegLog
from penstock.engine.routing.host.route_host import RouteHost
from penstock.engine.routing.origin.route_health import RouteHealth
from penstock.pipes.path import Path
from penstock.pipes.pipe import Pipe

logger = logging.getLogger("penstock.route")

ONLY_OFFER_TIMEOUT_S = 30.0  # for an offer of a node that every path needs: it may be in the middle of a long pass
OFFER_TIMEOUT_S = 5.0  # ... if there is another path
QUICK_OFFER_TIMEOUT_S = 1.0  # ... over nodes that did not fail recently
RESEND_INTERVAL_S = 0.3  # the request or its answer may have been lost
AVOID_S = 30.0  # how long a node that failed is used only if there is no other
MIN_RETRY_S, MAX_RETRY_S = 0.05, 2.0  # between attempts to open a route
MAX_BUSY_REFUSALS = 5  # in a row, from a node that expects to have memory soon; then it is avoided
MIN_GAIN = 0.8  # share of the present path's time that another one must stay below when only measurements of links have changed
MIN_GAIN_S = 0.005  # ... and by this much a token: round trips within one machine or room vary for no reason
MAX_LEASE_BLOCKS = 1 << 20  # whatever other nodes publish


@dataclass(slots=True)
class ActiveRoute:
    """A route that is open, or being opened."""

    id: RouteId
    hops: tuple[Hop, ...]
    why: str
    reach: int  # blocks of the smallest segment: what a sequence could have if no other origin had any
    epochs: Mapping[str, int]  # of each node when the route was opened
    choices: frozenset[Hop] = frozenset()  # that the path was chosen from
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)  # ... and with
    pipes: tuple[str, ...] = ()  # ids of the pipes that it passes
    waiting: set[str] = field(default_factory=set)  # nodes that have not made an offer
    first_asked_at: float = 0.0
    last_asked_at: float = 0.0
    granted: dict[str, int] = field(default_factory=dict)  # blocks, by node
    shares: dict[str, int] = field(default_factory=dict)  # ... and the fair share that each allows
    credits: int = 1 << 16
    served: bool = False  # a NetworkJob has returned
    handed: int = -1  # number of the newest NetworkJob that was sent to the first node
    received: int = 0  # bytes of NetworkJobs that have returned
    resized: int = 0  # number of the notice with our present size
    settled_at: float | None = None  # when all stages had it: later grants take it into account
    nodes: frozenset[str] = field(init=False)
    is_local: bool = field(init=False)  # all layers are on the origin itself
    health: RouteHealth = field(init=False)
    returns: LegLog = field(init=False)  # of the way back

    def __post_init__(self) -> None:
        self.nodes = frozenset(hop.node for hop in self.hops)
        self.is_local = self.nodes == {self.id.origin}

    @property
    def blocks(self) -> int:
        """Blocks that we may use: no more than any node has granted and finds fair."""
        return min(self.reach, *self.granted.values(), *self.shares.values())

    def __str__(self) -> str:
        pipes = f" (pipe {', '.join(self.pipes)})" if self.pipes else ""
        return " → ".join(f"{hop.node} {hop.layers}" for hop in self.hops) + pipes


class Failures(NamedTuple):
    """The failures of a node, which is avoided for a while."""

    until: float
    times: int


class RouteOpener:
    """Asks all nodes of a path for a lease at once. If one refuses, all leases are given back and the attempt is repeated after a
    random time, so that two origins that want the same memory do not collide forever."""

    def __init__(
        self,
        config: EngineConfig,
        routing: RoutingConfig,
        pipe: Pipe,
        host: RouteHost,
        clock: Callable[[], float],
    ) -> None:
        self.opening: ActiveRoute | None = None
        self.trouble = ""  # why there is no route
        self.round_trips: dict[str, float] = {}
        self._config = config
        self._routing = routing
        self._pipe = pipe
        self._host = host
        self._clock = clock
        self._retry_at = 0.0
        self._retry_wait = 0.0
        self._failures: dict[str, Failures] = {}  # by node
        self._refusals: dict[str, int] = {}  # by node, in a row

    def open(self) -> ActiveRoute | None:
        """Start opening a route. Returns it if all layers are on this node; otherwise `on_offer` returns it later."""
        now = self._clock()
        # read before the path: if the network changes in between, the next `on_change` notices
        epochs, choices, links = self._pipe.epochs(), self._pipe.choices(), self._pipe.links()
        path = self._best_path()
        if path is None:
            self.trouble = self._pipe.explain()
            self._retry_at = now + MAX_RETRY_S  # a change of the network triggers a retry at once
            return None
        route = ActiveRoute(
            id=RouteId(self._pipe.node, self._routing.epoch, next(self._routing.route_numbers)),
            hops=path.hops,
            why=path.why,
            reach=min(MAX_LEASE_BLOCKS, path.kv_blocks),
            epochs={hop.node: epochs.get(hop.node, -1) for hop in path.hops},
            choices=choices,
            links=links,
            pipes=self._pipe.pipe_ids(path.hops),
        )
        route.waiting = set(route.nodes)
        route.first_asked_at = now
        route.health = RouteHealth.of(path.hops, self._pipe.node, now)
        route.returns = LegLog(path.hops[-1].layers.end, self._clock)
        self.opening = route
        return self._request(route)

    def on_offer(self, sender: str, offer: RouteOffer) -> ActiveRoute | None:
        """Take an offer. Returns the route if this was the last one missing."""
        route = self.opening
        if route is None or offer.route != route.id or sender not in route.waiting:
            return None
        return self._completed(route) if self._take_offer(route, sender, offer) else None

    def tick(self) -> ActiveRoute | None:
        """Start an attempt when it is time, repeat a request, or give up on a node that does not answer."""
        now, route = self._clock(), self.opening
        if route is None:
            return self.open() if now >= self._retry_at else None
        if now - route.last_asked_at <= RESEND_INTERVAL_S:
            return None
        if now - route.first_asked_at <= self._offer_timeout(route):
            return self._request(route)
        self.give_up(f"node {' and '.join(sorted(route.waiting))} does not answer", avoid=sorted(route.waiting))
        self.back_off()
        return None

    def give_up(self, reason: str, avoid: Iterable[str] = ()) -> None:
        """Drop the attempt to open a route, and retry at once unless `back_off` is called."""
        now = self._clock()
        for node in avoid:
            self._record_failure(node)
        if self.opening is not None:
            self.close(self.opening)
        self.opening, self.trouble, self._retry_at = None, reason, now

    def back_off(self, min_wait: float = 0.0) -> None:
        """Wait before the next attempt: twice as long as last time, with jitter."""
        self._retry_wait = min(MAX_RETRY_S, max(MIN_RETRY_S, 2 * self._retry_wait))
        self._retry_at = self._clock() + max(min_wait, self._retry_wait) * (0.75 + 0.5 * random.random())

    def on_success(self) -> None:
        """Reset the back-off: the route works."""
        self._retry_wait = 0.0

    def retry_now(self) -> None:
        """Retry without waiting, because the network has changed."""
        if self.opening is None:
            self._retry_at = self._clock()

    def close(self, route: ActiveRoute) -> None:
        self._close(route.id, route.nodes)

    def has_better_path(self, route: ActiveRoute) -> bool:
        """Whether there is a better path now than when the route was opened. With only new measurements of links, it must be
        clearly better: they vary, and opening a route takes time."""
        choices, links = self._pipe.choices(), self._pipe.links()
        same_choices = choices == route.choices
        is_news = not choices <= route.choices or any(route.links.get(node) != found for node, found in links.items())
        route.choices, route.links = choices, links
        if not is_news:
            return False  # nothing was added, and no path gets better by what was removed
        path = self._best_path()
        if path is None or path.hops == route.hops:
            return False
        present = self._best(self._failing(), along=route.hops) if same_choices else None
        return present is None or path.seconds < min(MIN_GAIN * present.seconds, present.seconds - MIN_GAIN_S)

    def other_path(self, without: set[str]) -> bool:
        """Whether there is a path that avoids these nodes."""
        path = self._best(without)
        return path is not None and not without & {hop.node for hop in path.hops}

    # ---- inside ----

    def _record_failure(self, node: str) -> None:
        before = self._failing().get(node, 0)
        self._failures[node] = Failures(self._clock() + AVOID_S, before + 1)

    def _failing(self) -> dict[str, int]:
        """How often each node has failed of late."""
        return {node: failures.times for node, failures in self._failures.items() if failures.until > self._clock()}

    def _best_path(self) -> Path | None:
        """The best path over nodes that did not fail recently, else over those that failed least often."""
        failing = self._failing()
        for least in sorted({1, *failing.values()}):
            avoid = {node for node, count in failing.items() if count >= least}
            path = self._best(avoid)
            if path is None or not avoid & {hop.node for hop in path.hops}:
                break
        return path

    def _best(self, avoid: Collection[str], along: Sequence[Hop] = ()) -> Path | None:
        return self._pipe.path(avoid=avoid, round_trips=self.round_trips, block_size=self._config.block_size, along=along)

    def _offer_timeout(self, route: ActiveRoute) -> float:
        """How long to wait for nodes that make no offer: the better the path without them, the shorter."""
        if self.other_path({*route.waiting, *self._failing()}):
            return QUICK_OFFER_TIMEOUT_S
        return OFFER_TIMEOUT_S if self.other_path(route.waiting) else ONLY_OFFER_TIMEOUT_S

    def _request(self, route: ActiveRoute) -> ActiveRoute | None:
        """Ask all nodes for an offer, also those that have made one: they would forget the route while another takes long.

        Returns the route if this node was the only one.
        """
        route.last_asked_at = self._clock()
        legs = legs_of(route.hops, self._pipe.node)
        for node in sorted(route.nodes):
            request = OpenRoute(
                route=route.id,
                model=self._pipe.model,
                shape=self._pipe.shape,
                legs=legs[node],
                width=self._routing.width,
                block_size=self._config.block_size,
                blocks=route.reach,
                prefix_cache=self._config.prefix_cache,
                lease=self._routing.lease,
                hidden_format=self._pipe.hidden_format,
            )
            if node != self._pipe.node:
                self._pipe.send_control(node, request)
                continue
            offer = self._host.open(node, request)
            if node in route.waiting and not self._take_offer(route, node, offer):
                return None
        return self._completed(route)

    def _completed(self, route: ActiveRoute) -> ActiveRoute | None:
        if route.waiting:
            return None
        self.opening, self.trouble = None, ""
        return route

    def _take_offer(self, route: ActiveRoute, node: str, offer: RouteOffer) -> bool:
        if offer.blocks <= 0:
            logger.info("node %s refused a route: %s", node, offer.reason)
            # all or nothing; the node that refused remembers that we wait
            self._close(route.id, route.nodes - {node})
            self.opening, self.trouble = None, f"node {node} refused: {offer.reason}"
            self._refusals[node] = self._refusals.get(node, 0) + 1
            if not offer.retry_after or self._refusals[node] >= MAX_BUSY_REFUSALS:
                self._record_failure(node)
            self.back_off(min(offer.retry_after, MAX_RETRY_S))
            return False
        self._refusals.pop(node, None)
        route.waiting.remove(node)
        route.granted[node] = offer.blocks
        route.credits = max(1, min(route.credits, offer.credits))
        return True

    def _close(self, route: RouteId, nodes: Iterable[str]) -> None:
        for node in sorted(nodes):
            if node == self._pipe.node:
                self._host.close(route)
            else:
                self._pipe.send_control(node, CloseRoute(route))
