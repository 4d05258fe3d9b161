"""Origin: this node's own sequences, the route their Spans take, what is in flight on it, and recovery when it breaks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.hidden_format import row_bytes
from penstock.domain.job import HOLDS_KV, Job, Sequence
from penstock.domain.messages import (
    Bounce,
    BounceReason,
    CloseRoute,
    Lease,
    Mark,
    Ping,
    Pong,
    RouteOffer,
    StageProgress,
)
from penstock.domain.route import RouteId, legs_of
from penstock.domain.span import NetworkJob, Position, Span
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.host.route_host import RouteHost
from penstock.engine.routing.origin.in_flight import InFlight, InFlightJobs
from penstock.engine.routing.origin.lease_keeper import LeaseKeeper
from penstock.engine.routing.origin.outage import Outage, WaitLimits
from penstock.engine.routing.origin.pacing import Pacing
from penstock.engine.routing.origin.route_opener import ActiveRoute, RouteOpener
from penstock.engine.routing.origin.stage_progress import is_credible, stages_passed
from penstock.engine.routing.origin.track_record import TrackRecord
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.route")

STALLED_S = 30.0  # a route that has never worked counts as none after this long without any arrival; until then it gets a chance


class Origin:
    def __init__(
        self,
        config: EngineConfig,
        routing: RoutingConfig,
        pipe: Pipe,
        host: RouteHost,
        sequences: EngineSequenceManager,
        predictor: StepTimePredictor,
        stats: EngineStats,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sequences = sequences
        self.stats = stats
        self.route: ActiveRoute | None = None
        self.steady_since = -1  # `sequences.changes` when the scheduler last granted a decode to every sequence, and nothing else
        self.ends_seconds = 0.0  # seconds that embedding and head take, smoothed
        self.opener = RouteOpener(config, routing, pipe, host, clock)
        self._token_bytes = row_bytes(pipe.hidden_format, routing.width)
        self.pacing = Pacing(config, sequences, pipe, self._token_bytes)
        self._config = config
        self._width = routing.width
        self._pipe = pipe
        self._scheduler = Scheduler(config, predictor)
        self._clock = clock
        self._outage = Outage(stats)
        self._wait_limits = WaitLimits(config, pipe, sequences, routing.recovery_timeout)
        self._next_number = 0
        self._lease = LeaseKeeper(pipe, sequences, self.opener.round_trips, clock)
        self._record = TrackRecord()
        self._jobs = InFlightJobs(sequences, self._record, stats, clock, self._avoid)

    @property
    def in_flight(self) -> dict[int, InFlight]:
        """The NetworkJobs on their way, by number."""
        return self._jobs.sent

    @property
    def returned(self) -> dict[int, float]:
        """NetworkJobs that came back and are not sampled from yet, with their trip's seconds."""
        return self._jobs.returned

    @property
    def has_jobs(self) -> bool:
        return bool(self.sequences.queued or self.sequences.holders)

    @property
    def awaits_network(self) -> bool:
        """Whether NetworkJobs or requests for a route are on their way."""
        return bool(self.in_flight or self.opener.opening)

    @property
    def round_trips(self) -> Mapping[str, float]:
        """Seconds that each node took to answer its last ping."""
        return self.opener.round_trips

    def jobs(self) -> set[Job]:
        return {seq.job for seq in [*self.sequences.queued.values(), *self.sequences.holders.values()]}

    def owns(self, route: RouteId) -> bool:
        own, opening = self.route, self.opener.opening
        return (own is not None and own.id == route) or (opening is not None and opening.id == route)

    def is_predecessor(self, sender: str, route: RouteId) -> bool:
        """Whether that node returns the NetworkJobs of this route to us. Called from other threads."""
        own = self.route
        return own is not None and own.id == route and own.hops[-1].node == sender

    # ---- granting ----

    def grant(self) -> tuple[NetworkJob | None, bool]:
        """Return a NetworkJob for all sequences that can continue now, and whether anything was decided."""
        route, sequences = self.route, self.sequences
        if route is None or not (self.has_jobs or sequences.has_new_notices):
            return None, False
        now = self._clock()
        window = self.pacing.max_in_flight(route)
        if len(self.in_flight) + len(self.returned) >= window:
            return None, False
        output = self._scheduler.schedule(
            sequences.pool,
            sequences.queued,
            sequences.holders.values(),
            now,
            window=window,
            pipelined=len(route.nodes) > 1,
            reach=route.reach,
            max_chunk=self.pacing.max_chunk(route),
        )
        prompt_tokens = output.prompt_tokens
        self.stats.prompt_tokens += prompt_tokens
        # a decode for every sequence and nothing else: the next decision is the same, as long as nothing changes
        steady = not prompt_tokens and not output.has_events and len(output.grants) == len(sequences.holders)
        spans = sequences.on_schedule(output)
        self.steady_since = sequences.changes if steady else -1
        if not spans and (not sequences.has_new_notices or self.in_flight or self.returned):
            return None, bool(output)
        # an empty NetworkJob still carries the notices, so that stages get their blocks back
        job = NetworkJob(route.id, self._next_number, spans, sequences.take_notices())
        self._next_number += 1
        tokens = sum(span.n for span in spans)
        newest = job.notices[-1].number if job.notices else -1
        self.in_flight[job.number] = InFlight(tuple(spans), tokens, now, newest)
        route.health.on_sent(job.number, self.pacing.size(tokens), now)
        return job, True

    # ---- passing stages ----

    def on_layers_passed(self, layer: int, passed: Iterable[Span | Position]) -> None:
        """Record that Spans passed all layers below `layer`, and so the stages that end there or before."""
        stages = 0 if self.route is None else stages_passed(self.route.hops, layer)
        if stages:
            self.sequences.on_stage_completed(passed, stages - 1)

    def on_stage_progress(self, sender: str, report: StageProgress) -> bool:
        """Record what a stage on another node has done. Returns False if it cannot be true; those of older routes are fine."""
        if self.route is None or report.route != self.route.id:
            return report.route.origin == self._pipe.node
        if not is_credible(report, sender, self.route.hops, self.sequences):
            return False
        self.on_layers_passed(report.layer, report.positions)
        for position in report.positions:
            seq = self.sequences.get(position)
            if seq is not None and not seq.job.reachable:
                self.stats.unreachable_clients += 1
                self.sequences.cancel(seq.job)  # its client went away: free its memory at once
        return True

    # ---- returning ----

    def expects(self, sender: str, job: NetworkJob) -> bool:
        """Whether this NetworkJob is one of ours, returned by the last node of the route. Late and repeated ones are normal."""
        sent = self.in_flight.get(job.number)
        if self.route is None or job.route != self.route.id or sent is None or sender != self.route.hops[-1].node:
            return False
        if sent.returned:
            return False
        agreed = job.hidden is None or (job.hidden.dtype, job.hidden.width) == (self._pipe.hidden_format, self._width)
        if agreed and sent.includes(job.spans):
            sent.returned = True
            return True
        logger.warning("node %s returned Spans that it was not sent", sender)
        self._blame_loss(sender, job.number)
        return False

    def reject_returned(self, job: NetworkJob) -> None:
        """Count a NetworkJob with NaN or infinite values as lost."""
        if self.route is not None:
            logger.warning("node %s returned NaN or infinite values", self.route.hops[-1].node)
            self._blame_loss(self.route.hops[-1].node, job.number)

    def on_returned(self, job: NetworkJob) -> None:
        """A NetworkJob has passed all stages."""
        sent = self.in_flight.pop(job.number, None)
        if sent is None or self.route is None:
            return
        now = self._clock()
        self.returned[job.number] = now - sent.sent
        self._record.on_returned(now)
        self.route.health.on_returned(job.number)
        self.opener.on_success()
        self.route.served = True
        self.acknowledge(sent.notice)
        if sent.tokens and not self.route.is_local:
            decodes = sent.tokens == len(sent.spans)  # a prompt of one token counts as a decode
            self.pacing.measure(self.route, job, sent.tokens, now - sent.sent, decodes=decodes, ends=self.ends_seconds)
        last = self.route.hops[-1].node
        self._jobs.on_refusals(self.route, job.refusals)
        if len(job.spans) < len(sent.spans):
            self._jobs.on_dropped(last, {*sent.spans} - {*job.spans})

    def acknowledge(self, notice: int) -> None:
        """Record that all stages have the notices up to this number."""
        self.sequences.acknowledge(notice)
        if self.route is not None and self.route.settled_at is None and notice >= self.route.resized:
            self.route.settled_at = self._clock()

    def done(self, job: NetworkJob) -> None:
        """Forget a NetworkJob that is fully processed: its sequences can be granted again."""
        self.returned.pop(job.number, None)

    def on_progress(self, seqs: Iterable[Sequence]) -> None:
        """Record that these sequences got a token, or rows of an embedding: an outage is over for them."""
        self._outage.record_resumed(seqs, self._clock())

    def step_times(self, job: NetworkJob, here: float) -> tuple[float, float]:
        """Seconds of a NetworkJob at the slowest node or link of its way, and in all other places together.

        here: seconds of compute on this node since it returned.
        """
        if self.route is None or job.number not in self.returned:
            return here, 0.0
        return self.pacing.step_times(self.route, job, self.returned[job.number], here)

    # ---- losses ----

    def lose_job(self, number: int) -> None:
        """Give a NetworkJob up: its sequences are rewound to what has passed all stages."""
        self._jobs.lose(number, self.route)

    def _blame_loss(self, node: str, number: int) -> None:
        """Give a NetworkJob up because of this node, and count that against the node."""
        if self._jobs.blame(node, number):
            self.lose_job(number)

    def _avoid(self, node: str) -> bool:
        """Give up the route if it passes this node and there is another path."""
        if self.route is None or node not in self.route.nodes or not self.opener.other_path({node}):
            return False
        self.lose_route(f"node {node} refuses work", avoid=[node])
        return True

    def lose_route(self, reason: str, avoid: Iterable[str] = ()) -> None:
        """Drop the route. All its sequences become WAITING_PREEMPT and are computed again on another one."""
        lost = self.route or self.opener.opening
        if lost is None:
            return
        if self.route is not None:
            level = logging.INFO if reason.endswith("is leaving") else logging.WARNING
            logger.log(level, "gave up the route %s: %s", lost, reason)
            self.stats.broken_routes += 1
            self.stats.last_break = reason
            # the outage began when the first lost NetworkJob was sent, not when the loss was noticed
            since = min((sent.sent for sent in self.in_flight.values()), default=self._clock())
            self._outage.begin(since, self.sequences.holders.values())
            self.opener.close(self.route)
        self.opener.give_up(reason, avoid)
        self.route = None
        self._record.on_route_lost(served=lost.served)
        if not lost.served:
            self.opener.back_off()
        self._jobs.clear()
        for seq in list(self.sequences.holders.values()):
            if seq.state in HOLDS_KV:  # the job may just have failed with another of its outputs
                self.sequences.preempt_seq(seq)
                self._jobs.count_refusal(seq, "", f"Routes keep breaking: {reason}.", 1)

    def leave(self) -> None:
        """Close the route before this node leaves, so that others free its memory."""
        if self.route is not None:
            self.opener.close(self.route)
        self.opener.give_up("this node is leaving")
        self.route = None

    # ---- opening a route ----

    def open_route(self) -> None:
        """Start opening a route. If all layers are on this node, it is open at once."""
        self._use(self.opener.open())

    def on_offer(self, sender: str, offer: RouteOffer) -> None:
        if offer.blocks and offer.route.origin == self._pipe.node and not self.owns(offer.route):
            self._pipe.send_control(sender, CloseRoute(offer.route))  # we gave this route up before the offer came
        self._use(self.opener.on_offer(sender, offer))

    def on_open_unsent(self, node: str, route: RouteId) -> None:
        """Handle an OpenRoute that could not be sent to a node."""
        if self.opener.opening is not None and self.opener.opening.id == route:
            self.opener.give_up(f"node {node} cannot be reached", avoid=[node])
            self.opener.back_off()

    def _use(self, route: ActiveRoute | None) -> None:
        if route is None:
            return
        self.route, self._next_number = route, 0
        self.pacing = Pacing(self._config, self.sequences, self._pipe, self._token_bytes)
        config = self._config
        pool = BlockPool(route.blocks, config.block_size, prefix_cache=config.prefix_cache, windows=self._pipe.kv_windows)
        self.sequences.use(pool, len(route.hops))
        if self._pipe.networked:
            logger.info("opened the route %s, with KV for %d tokens", route, pool.capacity * pool.block_size)

    # ---- keeping the route ----

    def ping(self) -> Ping | None:
        """Ping the other nodes of the route when it is time; called on a thread that never computes.

        Returns the Ping if this node is on the route: it answers too.
        """
        route = self.route
        return None if route is None else self._lease.ping(route)

    def on_arrival(self, sender: str, job: NetworkJob, size: int) -> None:
        """Record a NetworkJob that has returned; called on the network's thread."""
        route = self.route
        if route is not None and self.is_predecessor(sender, job.route):
            route.received += size
            route.returns.arrived(job.number)

    def on_mark(self, sender: str, mark: Mark) -> None:
        """Record what should have returned by now; called on the network's thread."""
        route = self.route
        if route is not None and self.is_predecessor(sender, mark.route):
            route.returns.marked(mark.number)

    def on_pong(self, sender: str, pong: Pong, at: float) -> None:
        if self.route is not None and pong.route == self.route.id and sender in self.route.nodes:
            self._lease.on_pong(self.route, sender, pong, at)

    def on_lease(self, sender: str, lease: Lease) -> None:
        if self.route is not None and lease.route == self.route.id and sender in self.route.nodes:
            self._lease.on_lease(self.route, sender, lease)

    def on_handed_over(self, job: NetworkJob) -> None:
        """Record a NetworkJob that was given to the wire for the first node of the route."""
        if self.route is not None and job.route == self.route.id and job.current_layer == 0:
            self.route.handed = max(self.route.handed, job.number)

    def on_bounce(self, sender: str, bounce: Bounce) -> None:
        route = self.route
        if route is None or bounce.route != route.id or sender not in route.nodes:
            return
        match bounce.reason:
            case BounceReason.UNKNOWN_ROUTE:
                self.lose_route(f"node {sender} no longer knows it", avoid=() if route.served else [sender])
            case BounceReason.UNREACHABLE:
                after = [leg.successor for leg in legs_of(route.hops, self._pipe.node).get(sender, ())]
                self.lose_route(f"node {sender} cannot reach {' or '.join(after)}", avoid=set(after) - {self._pipe.node})
            case _:
                self._blame_loss(sender, bounce.number)

    def on_unsent(self, node: str, job: NetworkJob) -> None:
        """Handle a NetworkJob that could not be sent to the first node of its route."""
        if self.route is not None and job.route == self.route.id and job.number in self.in_flight:
            self.lose_route(f"node {node} cannot be reached", avoid=[node])

    def on_change(self) -> None:
        """React to nodes that joined, left, or announced that they will leave."""
        epochs = self._pipe.epochs()
        route = self.route or self.opener.opening
        if route is not None:
            gone = [node for node, epoch in route.epochs.items() if epochs.get(node, -1) != epoch]
            if gone:
                self.lose_route(f"node {' and '.join(gone)} is gone")
            elif leaving := self._leaving(route):
                self.lose_route(f"node {leaving} is leaving")
        if self.route is not None and self._is_idle() and self.opener.has_better_path(self.route):
            logger.info("closing the route %s: there is a better one", self.route)
            self.opener.close(self.route)
            self.route = None
        if self.route is None:
            self.opener.retry_now()

    def _is_idle(self) -> bool:
        return not (self.in_flight or self.returned or self.has_jobs)

    def _leaving(self, route: ActiveRoute) -> str:
        """Name the route's nodes that are leaving, if there is a path without them; otherwise they finish the current work."""
        draining = (self._pipe.draining() & route.nodes) - {self._pipe.node}
        if not draining:
            return ""
        needed = self.has_jobs and not self.opener.other_path(set(draining))
        return "" if needed else " and ".join(sorted(draining))

    # ---- time ----

    def tick(self) -> None:
        now = self._clock()
        if self.route is None:
            self._use(self.opener.tick())
        if self.route is not None and not self.route.is_local:
            self._check_health(self.route, now)
        if self.route is not None and (leaving := self._leaving(self.route)):
            self.lose_route(f"node {leaving} is leaving")
        route = self.route
        works = route is not None and (route.served or not self._record.failed_routes)
        if works or route is None or self._record.losses or now - route.health.progress > STALLED_S:
            self._wait_limits.enforce(route if works else None, self.opener.trouble or self.stats.last_break, now)

    def _check_health(self, route: ActiveRoute, now: float) -> None:
        health, back = route.health, route.health.stations[-1]
        if back.node == self._pipe.node:
            route.returns.settle(health.settled)
            health.on_report(back, route.returns.report(route.received), now)
        for number in health.lost(now):
            if self.in_flight[number].returned:
                continue
            self._record.on_lost(self.in_flight[number].sent, now, health.suspects(number))
            self.lose_job(number)
        trouble = health.trouble(now, self.pacing.bytes_per_second)
        if trouble is not None:
            self.lose_route(trouble.reason, avoid=trouble.nodes)
        elif self._record.is_suspicious and self._has_replacement():
            self.lose_route("no NetworkJob returns", avoid=self._record.suspects)

    def _has_replacement(self) -> bool:
        """Whether to try another route after several losses. A route without an alternative gets a longer trial."""
        suspects = self._record.suspects
        return self._record.is_broken or (bool(suspects) and self.opener.other_path(suspects))
