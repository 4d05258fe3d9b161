"""LeaseKeeper: keeps an origin's lease of KV blocks at the nodes of its route alive, and grows or shrinks it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.domain.messages import Lease, Mark, Ping, Pong
from penstock.engine.routing.origin.route_health import PING_INTERVAL_S
from penstock.engine.routing.origin.route_opener import ActiveRoute
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.pipes.pipe import Pipe

IDLE_BLOCKS = 64  # that an origin without work requests


class LeaseKeeper:
    """round_trips: filled with the seconds that each node took to answer its last ping."""

    def __init__(
        self,
        pipe: Pipe,
        sequences: EngineSequenceManager,
        round_trips: dict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._pipe = pipe
        self._sequences = sequences
        self._round_trips = round_trips
        self._clock = clock
        self._ping_at = 0.0

    def ping(self, route: ActiveRoute) -> Ping | None:
        """Ping the other nodes of the route when it is time. Returns the Ping if this node is on the route: it answers too."""
        now = self._clock()
        if now < self._ping_at:
            return None
        self._ping_at = now + PING_INTERVAL_S
        route.health.pings += 1
        ping = Ping(route.id, int(now * 1e9), self._wanted(route), route.health.settled)
        first = route.hops[0].node
        if first != self._pipe.node and route.handed > ping.settled:
            self._pipe.send_mark(first, Mark(route.id, 0, route.handed))
        for node in sorted(route.nodes - {self._pipe.node}):
            self._pipe.send_control(node, ping)
        return ping if self._pipe.node in route.nodes else None

    def on_pong(self, route: ActiveRoute, sender: str, pong: Pong, at: float) -> None:
        took = route.health.on_pong(sender, pong, at)
        if took is not None:
            self._round_trips[sender] = took

    def on_lease(self, route: ActiveRoute, sender: str, lease: Lease) -> None:
        route.shares[sender] = max(1, lease.target)
        if route.settled_at is not None and lease.stamp / 1e9 >= route.settled_at:
            route.granted[sender] = max(1, lease.blocks)
        capacity = self._sequences.pool.capacity
        if not lease.stamp and lease.target < capacity:  # not an answer: the node recalls blocks
            self._shrink(route)
        elif not lease.stamp and lease.blocks > capacity and route.settled_at is not None:
            self._resize(route, capacity)  # ... that we do not use anyway, since other nodes granted fewer
        if route.blocks > self._sequences.pool.capacity:
            self._resize(route, route.blocks)

    def _wanted(self, route: ActiveRoute) -> int:
        """Blocks that we could use. Without work we leave them to other origins."""
        if self._sequences.queued or self._sequences.holders:
            return min([route.reach, *route.shares.values()])
        return min(route.reach, IDLE_BLOCKS)

    def _shrink(self, route: ActiveRoute) -> None:
        """Shrink to our fair share, preempting the least urgent sequences, the newest first."""
        pool, blocks = self._sequences.pool, route.blocks
        holders = self._sequences.holders.values()
        for seq in sorted(holders, key=lambda seq: (seq.job.effective_priority, -seq.job.arrival, -seq.seq_id)):
            if pool.available >= (pool.capacity - blocks) * pool.groups:
                break
            self._sequences.preempt_seq(seq)
        self._resize(route, blocks)

    def _resize(self, route: ActiveRoute, blocks: int) -> None:
        self._sequences.resize(blocks)
        route.resized, route.settled_at = self._sequences.newest_notice, None
        for node, granted in route.granted.items():
            route.granted[node] = min(granted, blocks)  # the node takes the rest back when it gets the notice
