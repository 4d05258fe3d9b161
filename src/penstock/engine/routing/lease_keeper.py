"""LeaseKeeper: keeps an origin's lease of KV blocks at the nodes of its route alive, and grows or shrinks it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.domain.messages import Bounce, Ping, Pong
from penstock.engine.routing.route_host import RouteHost
from penstock.engine.routing.route_opener import ActiveRoute
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.pipes.pipe import Pipe

PING_INTERVAL_S = 0.5
IDLE_BLOCKS = 64  # that an origin without work asks for


class LeaseKeeper:
    """round_trips: filled with the seconds that each node took to answer its last ping."""

    def __init__(
        self,
        pipe: Pipe,
        host: RouteHost,
        sequences: EngineSequenceManager,
        round_trips: dict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self._pipe = pipe
        self._host = host
        self._sequences = sequences
        self._round_trips = round_trips
        self._clock = clock
        self._ping_at = 0.0

    def ping(self, route: ActiveRoute, now: float) -> Bounce | None:
        """Ping all nodes of the route when it is time. Returns a Bounce if this node itself no longer knows the route."""
        if now < self._ping_at:
            return None
        self._ping_at = now + PING_INTERVAL_S
        wanted = self._wanted(route)
        for node in sorted(route.nodes):
            ping = Ping(route.id, int(now * 1e9), wanted)
            if node != self._pipe.node:
                self._pipe.send_control(node, ping)
                continue
            answer = self._host.ping(node, ping)
            if isinstance(answer, Bounce):
                return answer
            self.on_pong(route, node, answer)
        return None

    def on_pong(self, route: ActiveRoute, sender: str, pong: Pong) -> None:
        now, sent_at, remote = self._clock(), pong.stamp / 1e9, sender != self._pipe.node
        if remote:
            route.last_heard[sender] = now
        route.shares[sender] = max(1, pong.target)
        if route.settled_at is not None and sent_at >= route.settled_at:
            route.granted[sender] = max(1, pong.blocks)
        if pong.stamp and remote:
            self._round_trips[sender] = max(0.0, now - sent_at)
            route.last_answered[sender] = max(route.last_answered[sender], min(sent_at, now))
        capacity = self._sequences.pool.capacity
        if not pong.stamp and pong.target < capacity:  # not an answer: the node recalls blocks
            self._shrink(route)
        elif not pong.stamp and pong.blocks > capacity and route.settled_at is not None:
            self._resize(route, capacity)  # ... that we do not use anyway, since other nodes granted fewer
        if route.blocks > self._sequences.pool.capacity:
            self._resize(route, route.blocks)

    def _wanted(self, route: ActiveRoute) -> int:
        """Blocks that we could use. Without work we leave them to other origins."""
        if self._sequences.queued or self._sequences.holders:
            return min([route.reach, *route.shares.values()])
        return min(route.reach, IDLE_BLOCKS)

    def _shrink(self, route: ActiveRoute) -> None:
        """Come down to our fair share, preempting the sequences that are least urgent and came last."""
        pool, blocks = self._sequences.pool, route.blocks
        holders = self._sequences.holders.values()
        for seq in sorted(holders, key=lambda seq: (seq.job.effective_priority, -seq.job.arrival, -seq.seq_id)):
            if pool.available >= pool.capacity - blocks:
                break
            self._sequences.preempt_seq(seq)
        self._resize(route, blocks)

    def _resize(self, route: ActiveRoute, blocks: int) -> None:
        self._sequences.resize(blocks)
        route.resized, route.settled_at = self._sequences.newest_notice, None
        for node, granted in route.granted.items():
            route.granted[node] = min(granted, blocks)  # the node takes the rest back when it gets the notice
