"""The Engine: one compute thread that owns all sequences of this node, and the loop that keeps the pipe full."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.fsm import ComputeStep, Facts, JobState, next_state
from penstock.domain.job import JobFailed
from penstock.domain.sequence import Job
from penstock.domain.span import NetworkJob
from penstock.engine.engine_sequences import EngineSequenceManager
from penstock.engine.job_processor import Ends, JobContext, JobProcessor
from penstock.engine.output import TextStreams
from penstock.engine.policies import fair_deadline
from penstock.engine.predictor import StepTimePredictor
from penstock.engine.scheduler import Scheduler
from penstock.engine.stage import Stage
from penstock.errors import EngineError, EngineStopped, PenstockError
from penstock.pipes.pipe import Pipe
from penstock.stats import EngineStats

logger = logging.getLogger("penstock.engine")

IDLE_LOOK = 0.05  # seconds between looks when there is work that cannot go on yet


@dataclass(frozen=True, slots=True)
class _Submit:
    job: Job


@dataclass(frozen=True, slots=True)
class _Cancel:
    job: Job


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Engine:
    def __init__(self, config: EngineConfig, pipe: Pipe, ends: Ends, text: TextStreams, *, node_id: str = "local") -> None:
        self.config, self.pipe, self.stats = config, pipe, EngineStats()
        predictor = self._predictor = StepTimePredictor()
        ledger = BlockPool(pipe.kv_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.sequences = EngineSequenceManager(
            ledger, eos_ids=ends.eos_ids, text_stream=text, secret=secrets.token_bytes(32), stats=self.stats
        )
        # every stage counts like the origin does, so all have the blocks of the smallest
        self.stages = {segment.layers.start: Stage(segment, pipe.kv_blocks, config) for segment in pipe.segments}
        self._window = config.window or len(pipe.segments)
        self._scheduler = Scheduler(config, ledger, predictor, pipelined=self._window > 1)
        context = JobContext(config, pipe, ends, self.stages, self.sequences, predictor, self.stats)
        self._processor = JobProcessor(context)
        self._node_id, self._next_number = node_id, 0
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._closing = threading.Lock()  # a job is either seen by the loop or refused, never in between

    @property
    def max_tokens(self) -> int:
        """The longest sequence, prompt and output together, that the KV memory can hold."""
        return self.pipe.kv_blocks * self.config.block_size

    # ---- from any thread ----

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="penstock-compute", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._closing:
            if self._stopped:
                raise EngineStopped("The engine has stopped.", hint="Make a new one.")
            self._inbox.put(_Submit(job))

    def cancel(self, job: Job) -> None:
        self._inbox.put(_Cancel(job))

    def stop(self) -> None:
        """End all jobs with an error, then the thread."""
        with self._closing:
            self._stopped = True
            self._inbox.put(_Stop())
        if self._thread is None:
            self._end_all(EngineStopped("The engine was stopped before it was started."))
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # ---- the compute thread ----

    def _run(self) -> None:
        idle = True
        try:
            while self.take_commands(wait=idle):
                started = time.perf_counter()
                idle = not self.turn()
                if not idle:
                    self.stats.busy += time.perf_counter() - started
        except BaseException as error:
            logger.critical("the compute thread failed", exc_info=error)
            self._end_all(EngineError(f"The engine failed: {type(error).__name__}: {error}.", hint="Start it again."))
            raise
        self._end_all(EngineStopped("The engine was stopped before the job was done.", hint="Submit it again."))

    def turn(self) -> bool:
        """Grant what can be granted, then run one batch. False if there was nothing to do."""
        granted = self._processor.in_flight < self._window and self._grant()
        if not self._processor.in_flight:
            return granted
        self._processor.step()
        return True

    def _grant(self) -> bool:
        sequences = self.sequences
        if not sequences.queued and not sequences.holders and not sequences.notices:
            return False
        output = self._scheduler.schedule(sequences.queued.values(), sequences.holders.values(), time.monotonic())
        self.stats.prompt_tokens += sum(grant.n for grant in output.grants if not grant.seq.decoding)
        spans = sequences.on_schedule(output)
        if not spans and (not sequences.notices or self._processor.in_flight):
            return bool(output)
        # with nothing to compute, an empty NetworkJob still carries the notices: stages get their blocks back
        job = NetworkJob(self._next_number, self._node_id, spans, sequences.take_notices())
        self._next_number += 1
        self._processor.accept(job)
        return True

    def take_commands(self, *, wait: bool) -> bool:
        """Apply what other threads asked for; with nothing else to do, wait for it. False: stop."""
        timeout = None
        if self.sequences.queued or self.sequences.holders:
            timeout = IDLE_LOOK
        while True:
            try:
                command = self._inbox.get(block=wait, timeout=timeout)
            except queue.Empty:
                return True
            wait = False
            match command:
                case _Submit(job):
                    self._enter(job)
                case _Cancel(job):
                    self.sequences.cancel(job)
                case _Stop():
                    return False

    def _enter(self, job: Job) -> None:
        """A new job's first visit: from VALIDATING to the joint, where it waits for the scheduler."""
        facts = Facts(step=ComputeStep.TOKENIZE, pipe_complete=self.pipe.is_complete())
        if next_state(JobState.VALIDATING, facts) is JobState.DONE:
            self.sequences.fail(job, EngineError("The pipe is not complete: some layers are missing."))
        else:
            try:
                # decided once, here: what is predicted later must not change who was promised what
                reading = self._predictor.prefill(len(job.prompt_ids), self.config.chunk)
                wanted = job.request.deadline or fair_deadline(reading)
                job.deadline = max(wanted, reading)  # an impossible one would come before all that are possible
                self.sequences.add(job)
            except Exception as error:
                known = error if isinstance(error, PenstockError) else EngineError(f"The job could not be started: {error}.")
                self.sequences.fail(job, known)

    def _end_all(self, error: EngineError) -> None:
        """Whatever is still open ends with this error, also what was submitted in the meantime."""
        with self._closing:
            self._stopped = True
        open_jobs = {seq.job for seq in [*self.sequences.queued.values(), *self.sequences.holders.values()]}
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, _Submit):
                open_jobs.add(command.job)
        for job in open_jobs:  # no bookkeeping: whatever broke may have left it in pieces, and nobody will need it
            if job.open:
                job.open = False
                job.emit(JobFailed(error))
