"""Origin: this node's own sequences, the route that their Spans take, what is in flight on it, and recovery when it breaks."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.messages import Bounce, BounceReason, CloseRoute, OpenRoute, Ping, Pong, RouteOffer
from penstock.domain.route import Hop, RouteId, legs_of
from penstock.domain.sequence import HOLDS_KV, Sequence, SequenceState
from penstock.domain.span import NetworkJob, Refusal, Span, Verdict
from penstock.engine.engine_sequences import EngineSequenceManager
from penstock.engine.predictor import StepTimePredictor
from penstock.engine.route_host import RouteHost
from penstock.engine.scheduler import Scheduler
from penstock.engine.window import Window
from penstock.errors import ComputeFailed, NotReady, PenstockError
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.route")

LEAST_WAIT = 2.0  # seconds: nothing in flight is given up before
PATIENCE = 5.0  # ... nor before so many times what it should take
UNKNOWN_WAIT = 20.0  # seconds, while nobody knows how long it should take; doubled each time that it was too short
OPEN_WAIT = 10.0  # seconds for an offer: the node may be in the middle of a long pass
ASK_AGAIN = 1.0  # seconds: the question may have been lost, or the answer
OVERTAKEN = 0.25  # seconds for a NetworkJob that a later one has overtaken
PING_EVERY = 0.5  # seconds
SILENT = 4.0  # seconds without a word from a node's compute thread
AVOID = 30.0  # seconds for which a node that failed is taken only if there is no other
LOSSES = 3  # in a row, and the route counts as broken
REFUSALS, FINAL_REFUSALS = 24, 64  # of one sequence in a row: then another route is tried, then its job ends
WEIGHT = 8  # a refusal counts for so many, unless the loss of a message explains it
RETRY_LEAST, RETRY_MOST = 0.05, 2.0  # seconds between attempts to open a route
MOST_BLOCKS = 1 << 20  # of a lease, whatever other nodes say that they have
LEASE_WAIT = 20.0  # seconds that a prompt waits for memory that other nodes have leased


@dataclass(slots=True)
class Route:
    """The origin's side of a route. `lives` is which life of each node it was opened with."""

    id: RouteId
    hops: tuple[Hop, ...]
    why: str
    reach: int  # blocks of the smallest segment: what a sequence could have if nobody else had any
    lives: Mapping[str, int]
    waiting: list[str] = field(default_factory=list)  # nodes still to be asked, in the order of their names
    asked: float = 0.0  # the first of them
    told: float = 0.0  # ... and when it was last told so
    granted: dict[str, int] = field(default_factory=dict)  # blocks, by node
    shares: dict[str, int] = field(default_factory=dict)  # ... and what each finds fair
    credits: int = 1 << 16
    heard: dict[str, float] = field(default_factory=dict)  # by remote node
    answered: dict[str, float] = field(default_factory=dict)  # by remote node: when the newest Ping left that it answered
    stalled: float = 0.0  # when a node was last seen not to answer: it is in the middle of a pass
    served: bool = False  # a NetworkJob came home
    resized: int = 0  # the notice that tells the stages how many blocks we count on
    settled: float | None = None  # when all stages had heard it: what they grant was said with it in mind from then on

    @property
    def nodes(self) -> set[str]:
        return {hop.node for hop in self.hops}

    @property
    def blocks(self) -> int:
        """What can be counted on: what every node has granted, and finds fair."""
        return min(self.reach, *self.granted.values(), *self.shares.values())


@dataclass(slots=True)
class InFlight:
    spans: tuple[Span, ...]
    tokens: int
    sent: float
    deadline: float
    notice: int  # the newest that it took along
    home: bool = False  # it is back, and waits for its turn


class Origin:
    def __init__(
        self,
        config: EngineConfig,
        pipe: Pipe,
        host: RouteHost,
        sequences: EngineSequenceManager,
        predictor: StepTimePredictor,
        stats: EngineStats,
        *,
        epoch: int,
        width: int,
        lease: float,
        recovery_timeout: float,
        route_numbers: Iterator[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sequences, self.window, self.stats = sequences, Window(), stats
        self.route: Route | None = None
        self.opening: Route | None = None
        self.trouble = ""  # why there is no route, or was none lately
        self.round_trips: dict[str, float] = {}
        self.in_flight: dict[int, InFlight] = {}
        self.at_home: set[int] = set()  # NetworkJobs that came back and are not sampled from yet
        self.ends_seconds = 0.0  # what embedding and head take, smoothed
        self._config, self._pipe, self._host, self._scheduler = config, pipe, host, Scheduler(config, predictor)
        self.epoch, self._width, self._lease, self._recovery_timeout = epoch, width, lease, recovery_timeout
        self._clock = clock
        self._route_numbers, self._next_number = route_numbers, 0
        self._retry_at = self._retry_wait = 0.0
        self._ping_at = 0.0
        self._losses = 0
        self._last_home = 0.0  # when a NetworkJob came home
        self._suspect = ""  # who sent back something else since then
        self._fruitless = 0  # routes in a row on which nothing came home
        self._cramped: dict[int, float] = {}  # since when a sequence waits for more memory than the route has
        self._avoid: dict[str, float] = {}  # node -> until when
        self._broken_since: float | None = None  # when the route broke that running answers had
        self._pause_ends = False  # the next token ends the pause of a recovery
        self._unserved_since: float | None = None

    # ---- granting ----

    def grant(self) -> tuple[NetworkJob | None, bool]:
        """A NetworkJob for whoever can go on now, and whether anything was decided at all."""
        route, sequences = self.route, self.sequences
        if route is None or not (sequences.queued or sequences.holders or sequences.has_news):
            return None, False
        now = self._clock()
        window = self._window(route)
        if len(self.in_flight) + len(self.at_home) >= window:
            return None, False
        output = self._scheduler.schedule(
            sequences.pool,
            sequences.queued.values(),
            sequences.holders.values(),
            now,
            window=window,
            pipelined=len(route.nodes) > 1,
            reach=route.reach,
        )
        self.stats.prompt_tokens += sum(grant.n for grant in output.grants if not grant.seq.decoding)
        spans = sequences.on_schedule(output)
        if not spans and (not sequences.has_news or self.in_flight or self.at_home):
            return None, bool(output)
        # with nothing to compute, an empty NetworkJob still carries the notices: stages get their blocks back
        job = NetworkJob(route.id, self._next_number, spans, sequences.take_notices())
        self._next_number += 1
        tokens = sum(span.n for span in spans)
        newest = job.notices[-1].number if job.notices else -1
        self.in_flight[job.number] = InFlight(tuple(spans), tokens, now, now + self._patience(tokens), newest)
        return job, True

    def _window(self, route: Route) -> int:
        if self._config.window is not None:
            return min(self._config.window, route.credits)
        if route.nodes == {self._pipe.node}:
            return len(route.hops)
        return self.window.size

    def _patience(self, tokens: int) -> float:
        """Seconds after which a NetworkJob of so many tokens counts as lost."""
        if not self.window.measured:
            return UNKNOWN_WAIT * 2.0 ** min(self._losses, 8)
        return max(LEAST_WAIT, PATIENCE * (self.window.predicted(tokens) + self.window.round_trip))

    # ---- coming home ----

    def expects(self, sender: str, job: NetworkJob) -> bool:
        """Whether this came from the end of our route, and is what we sent. Late and repeated ones are normal."""
        sent = self.in_flight.get(job.number)
        if self.route is None or job.route != self.route.id or sent is None or sender != self.route.hops[-1].node:
            return False
        if sent.home:
            return False
        spans = set(job.spans)
        right = len(spans) == len(job.spans) and spans <= set(sent.spans)
        if right and (job.hidden is None or job.hidden.width == self._width):
            sent.home = True
            return True
        logger.warning("node %s sent back something else than it was sent", sender)
        self._lose_to(sender, job.number)
        return False

    def came_home(self, job: NetworkJob) -> None:
        """A NetworkJob has passed all stages."""
        sent = self.in_flight.pop(job.number, None)
        if sent is None or self.route is None:
            return
        now = self._clock()
        self.at_home.add(job.number)
        self._losses, self._retry_wait, self._fruitless, self._suspect = 0, 0.0, 0, ""
        self.route.served, self._last_home = True, now
        self.sequences.acknowledge(sent.notice)
        if self.route.settled is None and sent.notice >= self.route.resized:
            self.route.settled = now
        if sent.tokens and self.route.nodes != {self._pipe.node}:
            self._measure(self.route, sent, job, now)
        for number, other in self.in_flight.items():
            if number < job.number:  # overtaken: it will hardly come any more
                other.deadline = min(other.deadline, now + OVERTAKEN)
        last = self.route.hops[-1].node
        self._on_refusals(self.route, job.refusals)
        for span in {*sent.spans} - {*job.spans}:  # no stage ran it, and none complained
            seq = self.sequences.get(span)
            if seq is not None and not self._is_enough(seq, last, "lost track of it", WEIGHT):
                self._go_back([span])

    def done(self, job: NetworkJob) -> None:
        """Nothing is left to do for a NetworkJob that came home: whoever was in it can be granted again."""
        self.at_home.discard(job.number)

    def on_tokens(self) -> None:
        """Tokens came out: if answers had stood still, they go on now."""
        if self._pause_ends and self._broken_since is not None:
            self.stats.last_pause = self._clock() - self._broken_since
            self.stats.recoveries += 1
            logger.warning("answers go on after a pause of %.2f s", self.stats.last_pause)
        if self._pause_ends:
            self._pause_ends, self._broken_since = False, None

    def _measure(self, route: Route, sent: InFlight, job: NetworkJob, now: float) -> None:
        elapsed = now - sent.sent
        services = {self._pipe.node: self.ends_seconds}
        for hop, seconds in zip(route.hops, job.services, strict=False):
            services[hop.node] = services.get(hop.node, 0.0) + min(seconds, elapsed)  # others may say anything
        decodes = sent.tokens == len(sent.spans)  # a prompt of one token is like one
        self.window.observe(sent.tokens, elapsed, services, decodes=decodes)
        holders = self.sequences.holders.values()
        reading = bool(self.sequences.queued) or any(seq.remaining > 1 for seq in holders)
        self.window.aim(sum(seq.decoding for seq in holders), self._config.chunk if reading else 0, route.credits)

    def _on_refusals(self, route: Route, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            seq = self.sequences.holders.get(refusal.seq_id)
            if seq is None or (seq.incarnation, seq.attempt) != (refusal.incarnation, refusal.attempt):
                continue
            lost = refusal.verdict is Verdict.GAP and refusal.kv_len >= seq.step_processed
            logger.info("node %s refused a span of sequence %d: %s", refusal.node, seq.seq_id, refusal.verdict.name)
            what = "could not compute it" if refusal.verdict is Verdict.FAILED else "lost track of it"
            node = refusal.node if refusal.node in route.nodes else route.hops[-1].node  # others may say anything
            if self._is_enough(seq, node, what, 1 if lost else WEIGHT):
                continue
            if lost:
                self.sequences.rewind_seq(seq)
            else:
                seq.prefix_trusted = seq.prefix_trusted and refusal.verdict is not Verdict.GAP
                self.sequences.preempt_seq(seq)

    def _is_enough(self, seq: Sequence, node: str, what: str, weight: int) -> bool:
        """A node did not do its part for a sequence. Where that goes on, another route is taken, or the job ends."""
        seq.refused += weight
        if seq.refused >= FINAL_REFUSALS:
            self.sequences.fail(seq.job, ComputeFailed(f"Node {node} {what}." if node else what, hint="Try the request again."))
            return True
        if seq.refused < REFUSALS or self.route is None or node not in self.route.nodes or not self._other_path({node}):
            return False
        self.lose_route(f"node {node} refuses work", avoid=[node])
        return True

    # ---- losses ----

    def lose_job(self, number: int) -> None:
        """A NetworkJob will not come home: its sequences go back to what has passed all stages."""
        sent = self.in_flight.pop(number, None)
        if sent is None:
            return
        self.stats.lost_jobs += 1
        self.sequences.resend_notices()
        self._go_back(sent.spans)

    def _lose_to(self, node: str, number: int) -> None:
        """... because of this node; which happens, but not all the time."""
        sent = self.in_flight.get(number)
        if sent is None:
            return
        self._losses, self._suspect = self._losses + 1, node
        for span in sent.spans:
            seq = self.sequences.get(span)
            if seq is not None:
                self._is_enough(seq, node, "sent back something else", 1)
        self.lose_job(number)

    def _go_back(self, spans: Iterable[Span]) -> None:
        for span in spans:
            seq = self.sequences.get(span)
            if seq is not None and seq.step_processed < span.end:
                self.sequences.rewind_seq(seq)
            elif seq is not None:
                seq.in_flight -= 1  # a later one of its Spans came home

    def lose_route(self, reason: str, avoid: Iterable[str] = ()) -> None:
        """Drop the route: whoever was on it waits (WAITING_PREEMPT) for another one."""
        now = self._clock()
        for node in avoid:
            self._avoid[node] = now + AVOID
        lost = self.route or self.opening
        if lost is None:
            return
        if self.route is not None:
            logger.warning("the route %s broke: %s", _shown(lost.hops), reason)
            self.stats.last_break = reason
            if self.sequences.holders and self._broken_since is None:
                # answers stand still from when that was sent which never came back, not only since it was noticed
                self._broken_since = min((sent.sent for sent in self.in_flight.values()), default=now)
        self._close(lost)
        self.route = self.opening = None
        self.trouble, self._retry_at, self._losses = reason, now, 0
        if not lost.served:
            self._fruitless += 1
            self._back_off()
        self.in_flight.clear()
        self.at_home.clear()
        self.window = Window()
        for seq in list(self.sequences.holders.values()):
            if seq.state in HOLDS_KV:  # the job may have ended just now, with another of its outputs
                self.sequences.preempt_seq(seq)
                self._is_enough(seq, "", f"Routes break again and again: {reason}.", 1)

    def leave(self) -> None:
        """Free what is held elsewhere; this node goes."""
        for route in (self.route, self.opening):
            if route is not None:
                self._close(route)
        self.route = self.opening = None

    def _close(self, route: Route) -> None:
        self._host.close(route.id)
        for node in route.nodes - {self._pipe.node}:
            self._pipe.tell(node, CloseRoute(route.id))

    # ---- opening a route ----

    def open_route(self) -> None:
        """Ask for a route over the best path there is, node by node in the order of their names, so that two origins which
        want the same memory never wait for each other."""
        now = self._clock()
        avoid = [node for node, until in self._avoid.items() if until > now]
        path = self._pipe.path(avoid=avoid, round_trips=self.round_trips, block_size=self._config.block_size)
        if path is None:
            self.trouble = self._pipe.explain()
            self._retry_at = now + RETRY_MOST  # a change in the network is told at once
            return
        route = Route(
            id=RouteId(self._pipe.node, self.epoch, next(self._route_numbers)),
            hops=path.hops,
            why=path.why,
            reach=min(MOST_BLOCKS, self._pipe.kv_blocks_on(path)),
            lives={hop.node: self._pipe.lives().get(hop.node, -1) for hop in path.hops},
        )
        route.waiting = sorted(route.nodes)
        self.opening = route
        self._ask_next(route)

    def _ask_next(self, route: Route) -> None:
        legs = legs_of(route.hops, self._pipe.node)
        while route.waiting:
            node = route.waiting[0]
            ask = OpenRoute(
                route=route.id,
                model=self._pipe.model,
                shape=self._pipe.shape,
                legs=legs[node],
                width=self._width,
                block_size=self._config.block_size,
                blocks=route.reach,
                prefix_cache=self._config.prefix_cache,
                lease=self._lease,
            )
            if node != self._pipe.node:
                route.told = self._clock()
                route.asked = route.asked or route.told
                self._pipe.tell(node, ask)
                return
            if not self._take_offer(route, node, self._host.open(node, ask)):
                return
        self._use(route)

    def on_offer(self, sender: str, offer: RouteOffer) -> None:
        route = self.opening
        if offer.blocks and self._is_forgotten(offer.route):
            self._pipe.tell(sender, CloseRoute(offer.route))  # the question was overtaken by our taking it back
        if route is None or offer.route != route.id or not route.waiting or sender != route.waiting[0]:
            return
        if self._take_offer(route, sender, offer):
            self._ask_next(route)

    def _is_forgotten(self, route: RouteId) -> bool:
        return route.origin == self._pipe.node and all(known is None or known.id != route for known in (self.route, self.opening))

    def _take_offer(self, route: Route, node: str, offer: RouteOffer) -> bool:
        if offer.blocks <= 0:
            logger.info("node %s opens no route: %s", node, offer.reason)
            self._close_asked(route, node)
            self.opening, self.trouble = None, f"node {node} says that {offer.reason}"
            if not offer.retry_after:
                self._avoid[node] = self._clock() + AVOID
            self._back_off(offer.retry_after)
            return False
        route.waiting.remove(node)
        route.asked = 0.0
        route.granted[node] = offer.blocks
        route.credits = max(1, min(route.credits, offer.credits))
        route.heard[node] = self._clock()
        return True

    def _close_asked(self, route: Route, refused: str) -> None:
        """All or nothing: give back what the others have granted. The one that refused keeps our place in the queue."""
        for node in [node for node in route.nodes if node not in route.waiting and node != refused]:
            if node == self._pipe.node:
                self._host.close(route.id)
            else:
                self._pipe.tell(node, CloseRoute(route.id))

    def _back_off(self, least: float = 0.0) -> None:
        self._retry_wait = min(RETRY_MOST, max(RETRY_LEAST, 2 * self._retry_wait))
        self._retry_at = self._clock() + max(least, self._retry_wait) * (0.75 + 0.5 * random.random())

    def _use(self, route: Route) -> None:
        self.opening, self.route, self.trouble = None, route, ""
        self._next_number = 0
        route.heard.pop(self._pipe.node, None)
        route.answered = dict.fromkeys(route.heard, self._clock())
        pool = BlockPool(route.blocks, self._config.block_size, prefix_cache=self._config.prefix_cache)
        self.sequences.use(pool)
        if not any(seq.state is SequenceState.WAITING_PREEMPT for seq in self.sequences.queued.values()):
            self._broken_since = None  # nobody who stood still is left
        self._pause_ends = self._broken_since is not None
        if self._pipe.networked:
            logger.info("the route is %s, with KV for %d tokens", _shown(route.hops), pool.capacity * pool.block_size)

    # ---- keeping it ----

    def on_pong(self, sender: str, pong: Pong) -> None:
        route = self.route
        if route is None or pong.route != route.id or sender not in route.nodes:
            return
        now = self._clock()
        if sender != self._pipe.node:
            route.heard[sender] = now
        route.shares[sender] = max(1, pong.target)
        asked = pong.stamp / 1e9
        if route.settled is not None and asked >= route.settled:
            route.granted[sender] = max(1, pong.blocks)
        if pong.stamp and sender != self._pipe.node:
            self.round_trips[sender] = max(0.0, now - asked)
            route.answered[sender] = max(route.answered[sender], min(asked, now))
        elif not pong.stamp and pong.target < self.sequences.pool.capacity:  # nobody asked: blocks are called back
            self._shrink(route.blocks)
        elif not pong.stamp and pong.blocks > self.sequences.pool.capacity and route.settled is not None:
            self._resize(self.sequences.pool.capacity)  # ... that we do not count on, since other nodes have fewer
        if route.blocks > self.sequences.pool.capacity:
            self._resize(route.blocks)

    def _resize(self, blocks: int) -> None:
        assert self.route is not None
        self.sequences.resize(blocks)
        self.route.resized, self.route.settled = self.sequences.newest_notice, None

    def _shrink(self, blocks: int) -> None:
        """Others need memory too: come down to this, at the cost of those who came last."""
        pool, holders = self.sequences.pool, self.sequences.holders
        for seq in sorted(holders.values(), key=lambda seq: (seq.job.priority, -seq.job.arrival, -seq.seq_id)):
            if pool.available >= pool.capacity - blocks:
                break
            self.sequences.preempt_seq(seq)
        self._resize(blocks)

    def on_bounce(self, sender: str, bounce: Bounce) -> None:
        route = self.route
        if route is None or bounce.route != route.id or sender not in route.nodes:
            return
        match bounce.reason:
            case BounceReason.UNKNOWN_ROUTE:
                self.lose_route(f"node {sender} does not know it any more", avoid=() if route.served else [sender])
            case BounceReason.UNREACHABLE:
                after = [leg.successor for leg in legs_of(route.hops, self._pipe.node).get(sender, ())]
                self.lose_route(f"node {sender} cannot reach {' or '.join(after)}", avoid=set(after) - {self._pipe.node})
            case _:
                self._lose_to(sender, bounce.number)

    def on_unsent(self, node: str, number: int) -> None:
        """A NetworkJob of ours could not be handed to the first node of its route."""
        if self.route is not None and number in self.in_flight:
            self.lose_route(f"node {node} cannot be reached", avoid=[node])

    def on_change(self) -> None:
        """The network has changed: nodes came, went, or say that they will go."""
        lives = self._pipe.lives()
        route = self.route or self.opening
        if route is not None:
            gone = [node for node, life in route.lives.items() if lives.get(node, -1) != life]
            if gone:
                self.lose_route(f"node {' and '.join(gone)} is gone")
            elif leaving := self._leaving(route):
                self.lose_route(f"node {leaving} is leaving")
        if self.route is None and self.opening is None:
            self._retry_at = self._clock()

    def _leaving(self, route: Route) -> str:
        """The nodes of the route that announced to leave, if there is a way without them; otherwise they finish what runs."""
        draining = (self._pipe.draining() & route.nodes) - {self._pipe.node}
        needed = bool(self.sequences.holders or self.sequences.queued) and not self._other_path(set(draining))
        return " and ".join(sorted(draining)) if draining and not needed else ""

    def _other_path(self, without: set[str]) -> bool:
        path = self._pipe.path(avoid=without, round_trips=self.round_trips, block_size=self._config.block_size)
        return path is not None and not without & {hop.node for hop in path.hops}

    # ---- time ----

    def tick(self) -> None:
        now = self._clock()
        if self.route is None and self.opening is None and now >= self._retry_at:
            self.open_route()
        if self.opening is not None and self.opening.waiting and now - self.opening.asked > OPEN_WAIT:
            self.lose_route(f"node {self.opening.waiting[0]} does not answer", avoid=[self.opening.waiting[0]])
        if self.opening is not None and self.opening.waiting and now - self.opening.told > ASK_AGAIN:
            self._ask_next(self.opening)
        overdue = [number for number, sent in self.in_flight.items() if self._is_overdue(sent, now)]
        for number in overdue:
            self._losses += self.in_flight[number].sent >= self._last_home  # or else only this one was lost
            self.lose_job(number)
        if self.route is not None and self._pipe.networked:
            self._keep(self.route, now)
        if self.route is not None and (leaving := self._leaving(self.route)):
            self.lose_route(f"node {leaving} is leaving")
        self._end_hopeless(now)

    def _is_overdue(self, sent: InFlight, now: float) -> bool:
        if sent.home:
            return False
        if sent.deadline <= now or self.window.measured or self.route is None:
            return sent.deadline <= now
        # nobody knows how long it should take, but all nodes have answered all the time, so it is in no long pass
        return now - max(sent.sent, self.route.stalled) > LEAST_WAIT * 2.0 ** min(self._losses, 8)

    def _keep(self, route: Route, now: float) -> None:
        if now >= self._ping_at:
            self._ping_at = now + PING_EVERY
            wanted = min([route.reach, *route.shares.values()])  # no more than we could use
            for node in route.nodes:
                ping = Ping(route.id, int(now * 1e9), wanted)
                if node == self._pipe.node:
                    answer = self._host.ping(node, ping)
                    if isinstance(answer, Bounce):
                        self.on_bounce(node, answer)
                        return
                    self.on_pong(node, answer)
                else:
                    self._pipe.tell(node, ping)
        if any(now - answered > LEAST_WAIT - PING_EVERY for answered in route.answered.values()):
            route.stalled = now
        patience = max(SILENT, self._patience(self._config.chunk))
        silent = [node for node, heard in route.heard.items() if now - heard > patience]
        if silent:
            self.lose_route(f"node {' and '.join(silent)} is silent", avoid=silent)
        elif self._losses >= LOSSES:
            slowest = min(route.heard, key=lambda node: route.heard[node], default="")
            self.lose_route("nothing comes back", avoid={self._suspect or slowest} - {""})

    def _end_hopeless(self, now: float) -> None:
        """Nothing waits for ever: neither for a route, nor for memory that other nodes hold."""
        waiting = list(self.sequences.queued.values())
        served = self.route is not None and (self.route.served or not self._fruitless)
        if not served:
            waiting += self.sequences.holders.values()
        if served or not waiting:
            self._unserved_since = None
            pool, before = self.sequences.pool, self._cramped
            cramped = [seq for seq in waiting if pool.blocks_for(len(seq.tokens) + 1) > pool.capacity]
            self._cramped = {seq.seq_id: before.get(seq.seq_id, now) for seq in cramped}
            for seq in cramped:
                if now - self._cramped[seq.seq_id] > LEASE_WAIT and seq.job.open:
                    self._fail(
                        seq,
                        NotReady(
                            f"The prompt needs KV memory for {len(seq.tokens) + 1} tokens, and other nodes' work leaves "
                            f"{pool.capacity * pool.block_size}.",
                            hint="Try again later, shorten it, or give the nodes more KV memory (kv_memory).",
                        ),
                    )
            return
        if self._unserved_since is None:
            self._unserved_since = now
        if now - self._unserved_since < self._recovery_timeout:
            return
        for seq in waiting:
            if now - max(seq.job.arrival, self._unserved_since) >= self._recovery_timeout and seq.job.open:
                why = self._pipe.explain() or f"No route could be opened: {self.trouble or self.stats.last_break}."
                self._fail(seq, NotReady(why, hint="Start the nodes that hold them (`penstock network status` shows how)."))

    def _fail(self, seq: Sequence, error: PenstockError) -> None:
        self.sequences.fail(seq.job, error)


def _shown(hops: Iterable[Hop]) -> str:
    return " → ".join(f"{hop.node} {hop.layers}" for hop in hops)
