"""Engine: the compute thread of one model on this node. It runs the local stages for every route that passes here and, where
the node has the model's ends, is the origin of its own jobs."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.fsm import DONE, HEAD_STEP, TOKENIZE_STEP, VALIDATING, Facts, next_state
from penstock.domain.job import Job
from penstock.domain.kv_need import KvNeed
from penstock.domain.messages import (
    Bounce,
    BounceReason,
    CloseRoute,
    Lease,
    Message,
    OpenRoute,
    Ping,
    Pong,
    RouteOffer,
    StageProgress,
)
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobFailed
from penstock.engine.commands import AddSegment, Cancel, Deliver, DropSegment, NetworkChanged, Stop, Submit, Unsent
from penstock.engine.fault_handler import FaultHandler
from penstock.engine.inbox import Inbox
from penstock.engine.reception import Reception
from penstock.engine.routing.config import RoutingConfig
from penstock.engine.routing.host.heartbeat import Heartbeat
from penstock.engine.routing.host.route_host import RouteHost
from penstock.engine.routing.host.stage import Stage
from penstock.engine.routing.origin.no_origin import NoOrigin
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.scheduling.policies import fair_deadline
from penstock.engine.scheduling.predictor import StepTimePredictor
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.engine.sequences.output_text import TextStreams
from penstock.engine.visit.job_context import Ends, JobContext
from penstock.engine.visit.job_processor import JobProcessor
from penstock.errors import EngineError, EngineStopped, NotReady, PenstockError
from penstock.model.segment import Segment
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.engine")

IDLE_POLL_S = 0.05  # while there is work that cannot continue yet
TICK_S = 0.01  # between checks of timeouts in a network
RECALL_INTERVAL_S = 0.25


class Engine:
    """Owns all sequences and stages of a model. `ends` and `text` are None on a node that only runs layers for others."""

    def __init__(
        self,
        config: EngineConfig,
        pipe: Pipe,
        ends: Ends | None = None,
        text: TextStreams | None = None,
        *,
        routing: RoutingConfig | None = None,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        routing = routing or RoutingConfig()
        self.config = config
        self.pipe = pipe
        self.stats = EngineStats()
        self._clock = clock
        self._epoch = routing.epoch
        self.heartbeat = heartbeat or Heartbeat(clock)
        self._predictor = StepTimePredictor()
        self.stages = {segment.layers.start: self._stage(segment) for segment in pipe.segments}
        self.host = RouteHost(
            self.stages,
            model=pipe.model,
            shape=pipe.shape,
            width=routing.width,
            block_size=config.block_size,
            heartbeat=self.heartbeat,
            clock=clock,
        )
        self.origin: Origin | NoOrigin = NoOrigin()
        if ends is not None and text is not None:
            sequences = EngineSequenceManager(
                BlockPool(0, config.block_size, windows=pipe.kv_windows),
                eos_ids=ends.eos_ids,
                text_stream=text,
                secret=secrets.token_bytes(32),
                stats=self.stats,
                clock=clock,
            )
            self.origin = Origin(config, routing, pipe, self.host, sequences, self._predictor, self.stats, clock=clock)
            if not pipe.networked and pipe.is_complete():
                self.origin.open_route()
        self._context = JobContext(
            config, pipe, self.host, self.stats, self._predictor, ends, self.origin, self.heartbeat, logger, clock, device
        )
        self._processor = JobProcessor(self._context)
        self._faults = FaultHandler(self.origin, self.stats, networked=pipe.networked)
        self._inbox = Inbox()
        self._reception = Reception(pipe, self.host, self.origin, self.heartbeat, self._inbox, self.count_refused, clock)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._closing = threading.Lock()  # a job is either seen by the loop or refused, never lost in between
        self._next_tick = 0.0
        self._next_recall = 0.0

    @property
    def sequences(self) -> EngineSequenceManager:
        return self.origin.sequences

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and output together, that the KV memory can hold."""
        route, config = self.origin.route, self.config
        need = KvNeed(self.pipe.kv_windows, config.block_size, config.max_pass_tokens)
        return need.longest(self.pipe.kv_blocks if route is None else route.reach)

    # ---- from any thread ----

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-compute", daemon=True)
        self._thread.start()
        if self.pipe.networked:
            threading.Thread(target=self._reception.run, name="penstock-keeper", daemon=True).start()

    def submit(self, job: Job) -> None:
        with self._closing:
            if self._stopped:
                raise EngineStopped("The engine has stopped.", hint="Make a new one.")
            self._inbox.put(Submit(job))

    def cancel(self, job: Job) -> None:
        self._inbox.put(Cancel(job))

    def deliver(self, sender: str, message: Message, size: int = 0) -> None:
        """Take a decoded message from another node; called on the network's thread. `size`: bytes that it had on the wire."""
        if not self._stopped:
            self._reception.take(sender, message, size)

    def keep_alive(self) -> None:
        """Keep this node's route open."""
        self._reception.keep_alive()

    def count_refused(self, why: str, sender: str, detail: str = "") -> None:
        """Count a message from another node that was not accepted. Each kind is logged now and then."""
        self._context.count_refused(why, sender, detail)

    def on_unsent(self, node: str, message: Message) -> None:
        """Report that a message could not be sent to another node."""
        self._inbox.put(Unsent(node, message))

    def on_network_change(self) -> None:
        self._inbox.put(NetworkChanged())

    def add_segment(self, segment: Segment) -> None:
        """Run these layers too from now on. Waits for the compute thread."""
        start, end = segment.layers
        assert all(held.layers.end <= start or end <= held.layers.start for held in self.pipe.segments), "no layer is held twice"
        if self._thread is None:
            self._add(segment)
        else:
            self._run_on_compute_thread(AddSegment(segment, Future()))

    def drop_segment(self, layers: LayerRange) -> None:
        """Stop running these layers, and close all routes through them. Waits for the compute thread."""
        self._run_on_compute_thread(DropSegment(layers, Future()))

    def _run_on_compute_thread(self, command: AddSegment | DropSegment) -> None:
        self._inbox.put(command)
        while self.running and not command.result.done():
            with contextlib.suppress(TimeoutError):
                command.result.result(IDLE_POLL_S)

    @property
    def resting(self) -> bool:
        """Whether a turn would find nothing to do, on a node that only runs layers for others."""
        return not self._processor.visits and isinstance(self.origin, NoOrigin) and self._inbox.empty

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._stopped

    def concerns(self, route: RouteId) -> bool:
        """Whether a route passes this node, or is its own."""
        return route in self.host.routes or self.origin.owns(route)

    def stop(self) -> None:
        """Fail all open jobs and end the compute thread."""
        with self._closing:
            self._stopped = True
            self._inbox.put(Stop())
        if self._thread is None:
            self._end_all(EngineStopped("The engine was stopped before it was started."))
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the compute thread ----

    def _run(self) -> None:
        idle = running = True
        try:
            while running:
                try:
                    running = self.take_commands(wait=idle)
                except Exception as error:
                    self._faults.on_command_failed(error)
                started = time.perf_counter()
                try:
                    idle = not running or not self.turn()
                except Exception as error:
                    self._faults.on_turn_failed(error)
                    idle = False
                else:
                    self._faults.on_turn_completed()
                if not idle:
                    self.stats.busy += time.perf_counter() - started
        except BaseException as error:
            logger.critical("the compute thread failed", exc_info=error)
            self._end_all(EngineError(f"The engine failed: {type(error).__name__}: {error}.", hint="Start it again."))
            raise
        else:
            self._end_all(EngineStopped("The engine was stopped before the job was done.", hint="Submit it again."))
        finally:
            self._reception.stop()
            if self.pipe.networked:
                self.leave()

    def leave(self) -> None:
        """Close all routes, so that their origins find other ones at once."""
        self.origin.leave()
        for route in list(self.host.routes):
            self._close(route)

    def _close(self, route: RouteId) -> None:
        self.host.close(route)
        gone = Bounce(route, -1, BounceReason.UNKNOWN_ROUTE)
        if route.origin != self.pipe.node:
            self.pipe.send_control(route.origin, gone)
        else:
            self.origin.on_bounce(self.pipe.node, gone)

    def _stage(self, segment: Segment) -> Stage:
        pipe, size = self.pipe, self.config.block_size
        shared, windows, context = pipe.networked, pipe.kv_windows, pipe.context
        return Stage(segment, size, pipe.node, self._clock, shared=shared, windows=windows, context=context)

    def _add(self, segment: Segment) -> None:
        self.stages[segment.layers.start] = self._stage(segment)
        self.pipe.segments = sorted([*self.pipe.segments, segment], key=lambda segment: segment.layers)

    def _drop(self, layers: LayerRange) -> None:
        self._processor.forget()  # otherwise its memory would only become free for other layers at the next step
        stage = self.stages[layers.start]
        for route in list(stage.leases):
            self._close(route)
        del self.stages[layers.start]
        self.pipe.segments = [segment for segment in self.pipe.segments if segment.layers != layers]

    def turn(self) -> bool:
        """Grant what can be granted, then run one batch. Returns False if there was nothing to do."""
        networked, origin = self.pipe.networked, self.origin
        if networked:
            self.heartbeat.beat()
            self._tick()
        if origin.route is not None and self._processor.decode():
            return True
        job, decided = origin.grant()
        if job is not None:
            if networked:
                self.host.on_granted(job)
            self._processor.accept(job)
        if not self._processor.visits:
            return decided
        self._processor.step()
        return True

    def take_commands(self, *, wait: bool) -> bool:
        """Apply all commands in the inbox. `wait`: block until there is one. Returns False if the engine must stop."""
        timeout = self.idle_timeout() if wait else 0.0
        if self._inbox.taken_bytes:  # some of it may have been used since
            self._inbox.count_waiting(self._waiting())
        while True:
            command = self._inbox.take(timeout)
            if command is None:
                return True
            timeout = 0.0
            match command:
                case Deliver(sender, message, at, memory):
                    try:
                        self._handle(sender, message, at)
                    finally:
                        if memory:
                            self._inbox.release(sender, memory, self._waiting() if isinstance(message, NetworkJob) else None)
                case Submit(job):
                    self._enter(job)
                case Cancel(job):
                    self.sequences.cancel(job)
                case Unsent(node, message):
                    self._on_unsent(node, message)
                case NetworkChanged():
                    self._on_change()
                case AddSegment(segment, result):
                    _complete(result, partial(self._add, segment))
                case DropSegment(layers, result):
                    _complete(result, partial(self._drop, layers))
                case Stop():
                    return False

    def _waiting(self) -> Mapping[str, int]:
        """Return the bytes of NetworkJobs that wait for earlier ones or for a pass, by sender. They are counted anew each time,
        since there are many ways for them to be used or dropped."""
        waiting: dict[str, int] = {}
        self._processor.visits.count_pending(waiting)
        if self.host.reordering:
            self.host.count_pending(waiting)
        return waiting

    def idle_timeout(self) -> float | None:
        """Seconds that the thread may sleep when there is nothing to do; None for any time."""
        if self.pipe.networked:
            return TICK_S if self.host.reordering or self.origin.awaits_network else IDLE_POLL_S
        return IDLE_POLL_S if self.origin.has_jobs else None

    def _enter(self, job: Job) -> None:
        """Take a new job from VALIDATING to EMBED, where it waits for the scheduler."""
        try:
            missing = self.pipe.explain()  # read once, since the network may change at any time
            facts = Facts(step=TOKENIZE_STEP, pipe_complete=not missing)
            if next_state(VALIDATING, facts) is DONE:
                hint = "`penstock network status` shows which node holds what, and what to run."
                raise NotReady(missing, hint=hint)
            # fixed here, so that later predictions do not reorder jobs
            reading = self._predictor.prefill(len(job.prompt_ids) + len(job.request.resume), self.config.busy_chunk)
            wanted = job.request.deadline or fair_deadline(reading)
            job.deadline = max(wanted, reading)  # an impossible deadline would come before all possible ones
            self.sequences.add(job)
            logger.debug(
                "job %s taken: %d prompt tokens, at most %d to generate, priority %d",
                job.job_id,
                len(job.prompt_ids),
                job.max_tokens,
                job.priority,
            )
        except Exception as error:
            known = error if isinstance(error, PenstockError) else EngineError(f"The job could not be started: {error}.")
            self.sequences.fail(job, known)

    def _end_all(self, error: EngineError) -> None:
        """Fail all open jobs with this error, and those submitted in the meantime."""
        with self._closing:
            self._stopped = True
        open_jobs = self.origin.jobs()
        while True:
            command = self._inbox.take(0.0)
            if command is None:
                break
            if isinstance(command, Submit):
                open_jobs.add(command.job)
        for job in open_jobs:  # the sequence manager is left alone: its state may be broken, and is not needed any more
            if job.open:
                job.open = False
                job.emit(JobFailed(error))

    # ---- the network ----

    def _handle(self, sender: str, message: Message, at: float) -> None:
        match message:
            case NetworkJob():
                self._handle_job(sender, message)
            case OpenRoute():
                self.pipe.send_control(sender, self.host.open(sender, message))
            case CloseRoute(route):
                if route.origin == sender:
                    self.host.close(route)
            case Ping():
                if (lease := self.host.renew(sender, message)) is not None:
                    self._reception.reply(sender, lease)
            case RouteOffer():
                self.origin.on_offer(sender, message)
            case Pong():
                self.origin.on_pong(sender, message, at)
            case Lease():
                self.origin.on_lease(sender, message)
            case StageProgress():
                if not self.origin.on_stage_progress(sender, message):
                    self.count_refused(BounceReason.MALFORMED.name.lower(), sender)
            case Bounce():
                self.origin.on_bounce(sender, message)

    def _handle_job(self, sender: str, job: NetworkJob) -> None:
        if job.step is HEAD_STEP:
            self._processor.accept_returned(sender, job)
            return
        arrived = self.host.arrive(sender, job)
        if isinstance(arrived, Bounce):
            self.count_refused(arrived.reason.name.lower(), sender)
            known = arrived.reason is BounceReason.UNKNOWN_ROUTE and job.route.origin in self.pipe.epochs()
            if known or self.host.is_predecessor(sender, job.route):
                self.pipe.send_control(job.route.origin, arrived)
            return
        for ready in arrived:
            self._processor.accept(ready)

    def _on_unsent(self, node: str, message: Message) -> None:
        if isinstance(message, OpenRoute):
            self.origin.on_open_unsent(node, message.route)
        if not isinstance(message, NetworkJob):
            return  # other messages are repeated, or replaced by a lease that expires
        if message.route.origin != self.pipe.node:
            self.pipe.send_control(message.route.origin, Bounce(message.route, message.number, BounceReason.UNREACHABLE))
        else:
            self.origin.on_unsent(node, message)

    def _on_change(self) -> None:
        self.host.close_dead_origins({**self.pipe.epochs(), self.pipe.node: self._epoch})
        self.origin.on_change()

    def _tick(self) -> None:
        now = self._clock()
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_S
        for job in self.host.overdue():
            self._processor.accept(job)
        for report in self.host.take_progress():
            # what has passed the last layer is returned to the origin itself
            if report.route.origin != self.pipe.node and report.layer < self.pipe.num_layers:
                self.pipe.send_control(report.route.origin, report)
        if now >= self._next_recall:
            self._next_recall = now + RECALL_INTERVAL_S
            self.host.expire()
            for recall in self.host.recalls():
                self._reception.reply(recall.route.origin, recall)
        self.origin.tick()


def _complete(result: Future[None], action: Callable[[], None]) -> None:
    """Run an action that another thread waits for, and pass its result or error to that thread."""
    try:
        action()
    except Exception as error:
        result.set_exception(error)
    else:
        result.set_result(None)
