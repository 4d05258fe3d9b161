"""RouteOpener: opens a route for an origin over the best path, node by node, all or nothing."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.config.engine import EngineConfig
from penstock.domain.messages import CloseRoute, OpenRoute, RouteOffer
from penstock.domain.route import Hop, RouteId, legs_of
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.route_host import RouteHost
from penstock.pipes.path import Path
from penstock.pipes.pipe import Pipe

logger = logging.getLogger("penstock.route")

OFFER_TIMEOUT_S = 10.0  # for an offer: the node may be in the middle of a long pass
QUICK_OFFER_TIMEOUT_S = 1.0  # ... if there is another path over nodes that did not fail recently
RESEND_INTERVAL_S = 1.0  # the request or its answer may have been lost
AVOID_S = 30.0  # how long a node that failed is used only if there is no other
MIN_RETRY_S, MAX_RETRY_S = 0.05, 2.0  # between attempts to open a route
MAX_BUSY_REFUSALS = 5  # in a row, from a node that expects to have memory soon; then it is avoided
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
    pipes: tuple[str, ...] = ()  # ids of the pipes that it passes
    waiting: list[str] = field(default_factory=list)  # nodes that have not made an offer, in the order of their names
    first_asked_at: float = 0.0  # when the first of them was first asked
    last_asked_at: float = 0.0  # ... and last
    granted: dict[str, int] = field(default_factory=dict)  # blocks, by node
    shares: dict[str, int] = field(default_factory=dict)  # ... and the fair share that each allows
    credits: int = 1 << 16
    last_heard: dict[str, float] = field(default_factory=dict)  # by remote node
    last_answered: dict[str, float] = field(default_factory=dict)  # by remote node: when the newest answered ping was sent
    stalled_at: float = 0.0  # when a node last failed to answer: it is in the middle of a pass
    served: bool = False  # a NetworkJob has returned
    resized: int = 0  # number of the notice with our present size
    settled_at: float | None = None  # when all stages had it: later grants take it into account

    @property
    def nodes(self) -> set[str]:
        return {hop.node for hop in self.hops}

    @property
    def blocks(self) -> int:
        """Blocks that we may use: no more than any node has granted and finds fair."""
        return min(self.reach, *self.granted.values(), *self.shares.values())

    def __str__(self) -> str:
        pipes = f" (pipe {', '.join(self.pipes)})" if self.pipes else ""
        return " → ".join(f"{hop.node} {hop.layers}" for hop in self.hops) + pipes


class RouteOpener:
    """Asks the nodes of a path for a lease, in the order of their names, so that two origins which want the same memory never
    wait for each other. If one refuses, all leases are given back and the attempt is repeated later."""

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
        self._avoid: dict[str, float] = {}  # node -> until when
        self._refusals: dict[str, int] = {}  # by node, in a row

    def open(self) -> ActiveRoute | None:
        """Start opening a route. Returns it if all layers are on this node; otherwise `on_offer` returns it later."""
        now = self._clock()
        avoid = [node for node, until in self._avoid.items() if until > now]
        # read before the path: if the network changes in between, the next `on_change` notices
        epochs, choices = self._pipe.epochs(), self._pipe.choices()
        path = self._best(avoid)
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
            pipes=self._pipe.pipe_ids(path.hops),
        )
        route.waiting = sorted(route.nodes)
        self.opening = route
        return self._request_next(route)

    def on_offer(self, sender: str, offer: RouteOffer) -> ActiveRoute | None:
        """Take an offer. Returns the route if this was the last one missing."""
        route = self.opening
        if route is None or offer.route != route.id or not route.waiting or sender != route.waiting[0]:
            return None
        return self._request_next(route) if self._take_offer(route, sender, offer) else None

    def tick(self) -> ActiveRoute | None:
        """Start an attempt when it is time, repeat a request, or give up on a node that does not answer."""
        now, route = self._clock(), self.opening
        if route is None:
            return self.open() if now >= self._retry_at else None
        node = route.waiting[0]
        if now - route.first_asked_at > OFFER_TIMEOUT_S or (
            now - route.first_asked_at > QUICK_OFFER_TIMEOUT_S and self._can_do_without(node, now)
        ):
            self.give_up(f"node {node} does not answer", avoid=[node])
            self.back_off()
        elif now - route.last_asked_at > RESEND_INTERVAL_S:
            self._request_next(route)
        return None

    def give_up(self, reason: str, avoid: Iterable[str] = ()) -> None:
        """Drop the attempt to open a route, and retry at once unless `back_off` is called."""
        now = self._clock()
        for node in avoid:
            self._avoid[node] = now + AVOID_S
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
        """Whether there is a better path now than when the route was opened."""
        choices = self._pipe.choices()
        if choices == route.choices:
            return False
        route.choices, path = choices, self._best([node for node, until in self._avoid.items() if until > self._clock()])
        return path is not None and path.hops != route.hops

    def other_path(self, without: set[str]) -> bool:
        """Whether there is a path that avoids these nodes."""
        path = self._best(without)
        return path is not None and not without & {hop.node for hop in path.hops}

    # ---- inside ----

    def _best(self, avoid: Collection[str]) -> Path | None:
        return self._pipe.path(avoid=avoid, round_trips=self.round_trips, block_size=self._config.block_size)

    def _can_do_without(self, node: str, now: float) -> bool:
        return self.other_path({node, *(other for other, until in self._avoid.items() if until > now)})

    def _request_next(self, route: ActiveRoute) -> ActiveRoute | None:
        legs = legs_of(route.hops, self._pipe.node)
        while route.waiting:
            node = route.waiting[0]
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
            )
            if node != self._pipe.node:
                route.last_asked_at = self._clock()
                route.first_asked_at = route.first_asked_at or route.last_asked_at
                self._pipe.send_control(node, request)
                return None
            if not self._take_offer(route, node, self._host.open(node, request)):
                return None
        self.opening, self.trouble = None, ""
        return route

    def _take_offer(self, route: ActiveRoute, node: str, offer: RouteOffer) -> bool:
        if offer.blocks <= 0:
            logger.info("node %s refused a route: %s", node, offer.reason)
            # all or nothing; the node that refused remembers that we wait
            self._close(route.id, route.nodes - {*route.waiting, node})
            self.opening, self.trouble = None, f"node {node} refused: {offer.reason}"
            self._refusals[node] = self._refusals.get(node, 0) + 1
            if not offer.retry_after or self._refusals[node] >= MAX_BUSY_REFUSALS:
                self._avoid[node] = self._clock() + AVOID_S
            self.back_off(min(offer.retry_after, MAX_RETRY_S))
            return False
        self._refusals.pop(node, None)
        route.waiting.remove(node)
        route.first_asked_at = 0.0
        route.granted[node] = offer.blocks
        route.credits = max(1, min(route.credits, offer.credits))
        if node != self._pipe.node:
            route.last_heard[node] = self._clock()
        return True

    def _close(self, route: RouteId, nodes: Iterable[str]) -> None:
        for node in sorted(nodes):
            if node == self._pipe.node:
                self._host.close(route)
            else:
                self._pipe.send_control(node, CloseRoute(route))
