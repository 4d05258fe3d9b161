"""The origin's side of a route: opening one over the best path there is, node by node, or none at all."""

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

OFFER_TIMEOUT_S = 10.0  # seconds for an offer: the node may be in the middle of a long pass
QUICK_OFFER_TIMEOUT_S = 1.0  # ... where there is another way, on which nobody failed lately
RESEND_INTERVAL_S = 1.0  # seconds: the question may have been lost, or the answer
AVOID_S = 30.0  # seconds for which a node that failed is taken only if there is no other
MIN_RETRY_S, MAX_RETRY_S = 0.05, 2.0  # seconds between attempts to open a route
MAX_BUSY_REFUSALS = 5  # refusals in a row of a node that says it will have memory soon
MAX_LEASE_BLOCKS = 1 << 20  # of a lease, whatever other nodes say that they have


@dataclass(slots=True)
class ActiveRoute:
    """`epochs` is which life of each node it was opened with."""

    id: RouteId
    hops: tuple[Hop, ...]
    why: str
    reach: int  # blocks of the smallest segment: what a sequence could have if nobody else had any
    epochs: Mapping[str, int]
    choices: frozenset[Hop] = frozenset()  # that there were
    waiting: list[str] = field(default_factory=list)  # nodes still to be asked, in the order of their names
    first_asked_at: float = 0.0  # the first of them
    last_asked_at: float = 0.0  # ... and when it was last told so
    granted: dict[str, int] = field(default_factory=dict)  # blocks, by node
    shares: dict[str, int] = field(default_factory=dict)  # ... and what each finds fair
    credits: int = 1 << 16
    last_heard: dict[str, float] = field(default_factory=dict)  # by remote node
    last_answered: dict[str, float] = field(default_factory=dict)  # by remote node: when the newest Ping left that it answered
    stalled_at: float = 0.0  # when a node was last seen not to answer: it is in the middle of a pass
    served: bool = False  # a NetworkJob came home
    resized: int = 0  # the notice that tells the stages how many blocks we count on
    settled_at: float | None = None  # when all stages had heard it: what they grant was said with it in mind from then on

    @property
    def nodes(self) -> set[str]:
        return {hop.node for hop in self.hops}

    @property
    def blocks(self) -> int:
        """What can be counted on: what every node has granted, and finds fair."""
        return min(self.reach, *self.granted.values(), *self.shares.values())

    def __str__(self) -> str:
        return " → ".join(f"{hop.node} {hop.layers}" for hop in self.hops)


class RouteOpener:
    """Asks the nodes of a path for a lease in the order of their names, so that two origins which want the same memory never
    wait for each other; all or nothing, and again after a while."""

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
        self._refusals: dict[str, int] = {}  # in a row

    def open(self) -> ActiveRoute | None:
        """Begin to open a route. It is returned where nobody has to be asked; others come from `on_offer`."""
        now = self._clock()
        avoid = [node for node, until in self._avoid.items() if until > now]
        # read before the path: where the network changes in between, the difference shows at the next `on_change`
        epochs, choices = self._pipe.epochs(), self._pipe.choices()
        path = self._best(avoid)
        if path is None:
            self.trouble = self._pipe.explain()
            self._retry_at = now + MAX_RETRY_S  # a change in the network is told at once
            return None
        route = ActiveRoute(
            id=RouteId(self._pipe.node, self._routing.epoch, next(self._routing.route_numbers)),
            hops=path.hops,
            why=path.why,
            reach=min(MAX_LEASE_BLOCKS, path.kv_blocks),
            epochs={hop.node: epochs.get(hop.node, -1) for hop in path.hops},
            choices=choices,
        )
        route.waiting = sorted(route.nodes)
        self.opening = route
        return self._request_next(route)

    def on_offer(self, sender: str, offer: RouteOffer) -> ActiveRoute | None:
        """The route, if this was the last offer that it lacked."""
        route = self.opening
        if route is None or offer.route != route.id or not route.waiting or sender != route.waiting[0]:
            return None
        return self._request_next(route) if self._take_offer(route, sender, offer) else None

    def tick(self) -> ActiveRoute | None:
        """Begin when it is time, ask again, or give up on a node that does not answer."""
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
        """Whatever route there is or was about to be is none: try again, now if nothing else is said."""
        now = self._clock()
        for node in avoid:
            self._avoid[node] = now + AVOID_S
        if self.opening is not None:
            self.close(self.opening)
        self.opening, self.trouble, self._retry_at = None, reason, now

    def back_off(self, least: float = 0.0) -> None:
        self._retry_wait = min(MAX_RETRY_S, max(MIN_RETRY_S, 2 * self._retry_wait))
        self._retry_at = self._clock() + max(least, self._retry_wait) * (0.75 + 0.5 * random.random())

    def on_success(self) -> None:
        """A route works: the next one is opened without delay."""
        self._retry_wait = 0.0

    def retry_now(self) -> None:
        """The network has changed: what did not work may work now."""
        if self.opening is None:
            self._retry_at = self._clock()

    def close(self, route: ActiveRoute) -> None:
        self._close(route.id, route.nodes)

    def has_better_path(self, route: ActiveRoute) -> bool:
        """Whether there is a better way now than when the route was opened."""
        choices = self._pipe.choices()
        if choices == route.choices:
            return False
        route.choices, path = choices, self._best([node for node, until in self._avoid.items() if until > self._clock()])
        return path is not None and path.hops != route.hops

    def other_path(self, without: set[str]) -> bool:
        """Whether there is a way that avoids these nodes."""
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
            logger.info("node %s opens no route: %s", node, offer.reason)
            # all or nothing; the one that refused keeps our place in its queue
            self._close(route.id, route.nodes - {*route.waiting, node})
            self.opening, self.trouble = None, f"node {node} says that {offer.reason}"
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
