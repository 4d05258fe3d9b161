"""JobProcessor: takes NetworkJobs through the states of a visit, a batch at a time.

Each visit waits in its state until its turn comes; visits that wait for the same work are run together. The actions do the
work and gather the facts, and `next_state` decides every transition. A NetworkJob has Spans of many jobs: each is
decided by its own facts, and the visit continues with the Spans that remain. Those that could not be computed end their jobs,
or are refused if the jobs are another origin's.
"""

from __future__ import annotations

import logging
from itertools import accumulate

from penstock.domain.fsm import (
    COMPLETE,
    DONE,
    EMBED,
    EMBED_STEP,
    HEAD,
    HEAD_STEP,
    LAYER_STEP,
    LOCAL,
    NORM_STEP,
    PROCESS_LAYERS,
    SEND,
    VALIDATING,
    Facts,
    NextLayer,
    next_state,
)
from penstock.domain.job import Job
from penstock.domain.span import NetworkJob, PackedHidden, Span
from penstock.engine.run_in_halves import all_finite, join, run_in_halves, to_compute_error
from penstock.engine.sequences.engine_sequences import Step
from penstock.engine.visit.answer_times import AnswerTimes
from penstock.engine.visit.head import Head, ReturnedSpan
from penstock.engine.visit.job_context import JobContext
from penstock.engine.visit.steady_decode import SteadyDecode
from penstock.engine.visit.visit_queue import Visit, VisitQueue
from penstock.errors import PenstockError
from penstock.model.transfer import pick_rows
from penstock.pipes.hidden_codec import unpack

ARRIVED = Facts(step=LAYER_STEP)
SENT = Facts()  # nothing that is known about it makes a difference
PASSES = (PROCESS_LAYERS, HEAD)  # what is done for a batch at once; the rest is done for each visit


class JobProcessor:
    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._at_head = Head(context)
        self._times = AnswerTimes(context)
        self.visits = VisitQueue(context)
        self._failed_passes = 0
        self._steady = SteadyDecode(context, self._at_head, self._times, self._after_head)
        self._actions = {
            VALIDATING: self._validate,
            EMBED: self._embed,
            PROCESS_LAYERS: self._process_layers,
            HEAD: self._head,
            SEND: self._send,
        }

    def accept(self, job: NetworkJob) -> None:
        """Start the visit of a NetworkJob that was granted here, or that came from another node to pass our layers."""
        tokens = sum([span.n for span in job.spans])
        context = tokens + sum([span.start_pos for span in job.spans])
        visit = Visit(job, VALIDATING, tokens, context, arrived=job.step is LAYER_STEP)
        visit.phases, visit.pending_bytes = self._times.phases_of(job), job.memory
        if job.step is EMBED_STEP:
            visit.state = next_state(visit.state, Facts(step=job.step))  # granted a moment ago: there is nothing to wait for
        self.visits.append(visit)

    def accept_returned(self, sender: str, job: NetworkJob) -> None:
        """Start the visit of a NetworkJob that another node sent to the head, if it is one of ours. Its content is checked
        when its turn comes; whether it is ours is decided at once, since its time-out ends here."""
        at_origin, has_ends = job.route.origin == self._context.pipe.node, self._context.end_model is not None
        expected = not (at_origin and has_ends) or self._context.own_origin.expects(sender, job)
        facts = Facts(step=job.step, at_origin=at_origin, has_ends=has_ends, job_exists=expected)
        if next_state(VALIDATING, facts) is DONE:
            reason = "not_at_origin" if not at_origin else "not_expected" if has_ends else "no_end_model"
            self._context.count_refused(reason, sender, f"on the route {job.route}")
            return
        job.step = NORM_STEP
        self.accept(job)

    def decode(self) -> bool:
        """Take a step for all running sequences at once, if they are all on this node and nothing else is to be done."""
        return not self.visits and self._steady.step()

    def forget(self) -> None:
        """Drop what steady steps hold of sequences and stages; the next one collects it again."""
        self._steady.forget()

    def step(self) -> None:
        """Run one action on all visits that wait for the same work as the oldest."""
        batch = self.visits.take_batch()
        if not batch:
            return
        state = batch[0].state
        action, gone = self._actions[state], batch
        try:
            for part in [batch] if len(batch) == 1 or state in PASSES else [[visit] for visit in batch]:
                try:
                    action(part)
                except Exception as error:
                    self._fail(part, error)
                    action(part)  # without their Spans: later stages still need their notices, in order
            gone = [visit for visit in batch if visit.state is DONE]
            self.visits.extend([visit for visit in batch if visit.state is not DONE])
        finally:
            for visit in gone:
                self._context.host.on_job_left(visit.job, arrived=visit.arrived)
                if self._context.is_ours(visit.job.route):
                    self._context.own_origin.done(visit.job)
        if state is VALIDATING and self._context.end_model is None:
            self.step()  # a node without jobs of its own has nothing to decide in between

    # ---- actions: each takes a batch of visits in one state and leaves each in its next ----

    def _embed(self, batch: list[Visit]) -> None:
        for visit in batch:
            job, where = visit.job, self._context.next_layer(visit.job)
            self._cancel_unreachable(job.spans, where)
            tokens: list[int] = []
            for span in job.spans:
                seq = self._context.sequences.get(span)
                # a sequence that was cancelled since its grant keeps its rows; they are dropped when they return
                tokens += seq.tokens[span.start_pos : span.end] if seq is not None else [0] * span.n
            if tokens:
                self._compute_embed(visit, tokens)
            visit.state = next_state(EMBED, Facts(step=job.step, next_layer=where))
            job.step = LAYER_STEP

    def _compute_embed(self, visit: Visit, tokens: list[int]) -> None:
        job, end_model = visit.job, self._context.own_end_model
        rows = [0, *accumulate(span.n for span in job.spans)]
        with _Timed(self._context, [visit]) as timed:
            result = run_in_halves(len(job.spans), lambda start, end: end_model.compute_embed(tokens[rows[start] : rows[end]]))
        self._times.record_embedding(job, timed.elapsed)
        if result.trace:
            self._on_failed_pass([visit], result.trace)
        for number, error in result.errors.items():
            self._fail_job(job.spans[number], error)
        job.spans = [span for number, span in enumerate(job.spans) if number not in result.errors]
        job.hidden = join(result.outputs) if job.spans else None

    def _process_layers(self, batch: list[Visit]) -> None:
        context = self._context
        jobs = [visit.job for visit in batch]
        part = context.part(jobs[0])
        assert part is not None, "a batch at PROCESS_LAYERS has an open route and a local part"
        stage, layers = part
        with context.heartbeat.in_pass(stage.expected_seconds(jobs)), _Timed(context, batch) as timed:
            failure = stage.run(jobs, layers)
        seconds = context.stats.stages
        seconds[stage.name] = seconds.get(stage.name, 0.0) + timed.elapsed
        if failure is not None:
            self._on_failed_pass(batch, failure.trace)
            for job, span, error in failure.failed:
                if context.is_ours(job.route):
                    self._fail_job(span, error)
        for visit in batch:
            self._after_stage(visit, first=layers.start == 0)

    def _after_stage(self, visit: Visit, *, first: bool) -> None:
        """Record that a stage is done. After the last one, drop the rows that are not wanted."""
        job, context = visit.job, self._context
        visit.pending_bytes = 0
        ours = context.is_ours(job.route)
        if ours:
            context.own_origin.on_layers_passed(job.current_layer, job.spans)
        if first and ours:
            self._cancel_unreachable(_chunks(job))
        where = context.next_layer(job)
        if where is COMPLETE:
            job.step = NORM_STEP
            _keep_wanted_rows(job)
        visit.state = next_state(PROCESS_LAYERS, Facts(step=job.step, next_layer=where, at_origin=ours))

    def _send(self, batch: list[Visit]) -> None:
        for visit in batch:
            job = visit.job
            if job.step is NORM_STEP:
                job.step = HEAD_STEP  # so the wire calls what goes back to its origin
            self._context.pipe.send_job(self._context.successor(job), job)
            self._context.host.on_handed_over(job)
            self._context.origin.on_handed_over(job)
            visit.state = next_state(SEND, SENT)

    def _validate(self, batch: list[Visit]) -> None:
        """Send arrivals with layers left to PROCESS_LAYERS. Of a returned NetworkJob, decodes and the ends of prompts go to HEAD;
        other chunks are done."""
        for visit in batch:
            job = visit.job
            if isinstance(job.hidden, PackedHidden):
                job.format = job.hidden.dtype
                job.hidden = unpack(job.hidden, self._context.device)
            if job.step is LAYER_STEP:
                here = self._context.next_layer(job) is LOCAL
                visit.state = next_state(VALIDATING, ARRIVED if here else ARRIVED._replace(pipe_complete=False))
                continue
            self._validate_returned(visit)

    def _validate_returned(self, visit: Visit) -> None:
        job, origin, sequences = visit.job, self._context.own_origin, self._context.sequences
        if self._context.pipe.networked and job.hidden is not None and not all_finite(job.hidden):
            origin.reject_returned(job)
            visit.state = next_state(VALIDATING, Facts(step=job.step, job_exists=False))
            return
        self._times.record_returned(job, visit.phases)
        origin.on_layers_passed(self._context.pipe.num_layers, job.spans)
        self._cancel_unreachable(_chunks(job))
        after = [next_state(VALIDATING, self._facts(span)) for span in job.spans]
        # a chunk at EMBED may be granted again, which its completed step brings about
        chunks = [Step(span) for span, state in zip(job.spans, after, strict=True) if state is not HEAD]
        origin.on_returned(job)
        sequences.on_step_completed(chunks)
        _keep_spans(job, [state is HEAD for state in after])
        visit.state = next_state(VALIDATING, Facts(step=job.step, job_exists=bool(job.spans)))
        if visit.state is DONE:
            self._observe(visit)

    def _head(self, batch: list[Visit]) -> None:
        context, origin = self._context, self._context.own_origin
        returned: list[ReturnedSpan] = []
        at = 0
        for visit in batch:
            for span in visit.job.spans:
                at += span.rows
                seq = context.sequences.get(span)
                if seq is not None:
                    returned.append(ReturnedSpan(span, seq, at - span.rows, at))
        self._times.log_prompt_read({one.seq.job for one in returned if one.seq.job.first_token is None and one.wants_token})
        steps = self._compute_steps(batch, returned)
        context.stats.generated_tokens += sum(step.token_id is not None for step in steps)  # before clients know of them
        context.sequences.on_step_completed(steps)
        further = {step.span for step in steps if step.token_id is not None or step.row_sum is not None}
        origin.on_progress(one.seq for one in returned if one.span in further)
        for job in {one.seq.job for one in returned}:
            self._after_head(job)
        for visit in batch:
            visit.job.spans = []  # the next grant makes a new NetworkJob
            visit.state = next_state(HEAD, Facts(step=visit.job.step, job_exists=False))
            self._observe(visit)

    def _compute_steps(self, batch: list[Visit], returned: list[ReturnedSpan]) -> list[Step]:
        context = self._context
        if not returned:
            return []
        hidden = join([visit.job.hidden for visit in batch])

        def run(start: int, end: int) -> list[Step]:
            first = returned[start].start
            normed = context.own_end_model.compute_norm(hidden[first : returned[end - 1].end])
            for visit in batch:
                visit.job.step = HEAD_STEP
            some = returned[start:end]
            if first:
                some = [one._replace(start=one.start - first, end=one.end - first) for one in some]
            return self._at_head.steps(some, normed)

        with context.heartbeat.in_pass(self._at_head.expected_seconds(len(hidden))), _Timed(context, batch) as timed:
            result = run_in_halves(len(returned), run)
        self._at_head.observe(len(hidden), timed.elapsed, failed=bool(result.trace))
        self._times.record_head(returned, timed.elapsed)
        if result.trace:
            self._on_failed_pass(batch, result.trace)
        for number, error in result.errors.items():
            context.sequences.fail(returned[number].seq.job, error)
        return [step for some in result.outputs for step in some]

    # ---- inside ----

    def _facts(self, span: Span) -> Facts:
        """The facts of one Span of a returned NetworkJob."""
        seq = self._context.sequences.get(span)
        grantable = seq is not None and seq.remaining > 0
        return Facts(step=NORM_STEP, job_exists=seq is not None, prefill_left=not span.rows, grantable=grantable)

    def _after_head(self, job: Job) -> None:
        """Leave the job at EMBED to wait for its next grant, or end it: it is complete, or its client is gone."""
        facts = Facts(step=HEAD_STEP, complete=not job.open, update_sent=job.reachable)
        if next_state(HEAD, facts) is EMBED:
            return
        self._end(job)
        if self._context.config.print_times:
            self._times.log_times(job)

    def _end(self, job: Job) -> None:
        """End a job that is complete, or whose client is gone."""
        if not job.open:
            return
        self._context.stats.unreachable_clients += 1
        message = "job %s was cancelled: its client took no more updates (%d so far)"
        self._context.log_throttled("unreachable", logging.INFO, message, job.job_id, self._context.stats.unreachable_clients)
        self._context.sequences.cancel(job)

    def _cancel_unreachable(self, spans: list[Span], where: NextLayer = LOCAL) -> None:
        """Cancel jobs that cannot leave EMBED, since their client did not take the last update. Frees their memory at once; the
        Spans travel on without them, since the stages must count as we do, and are dropped when they return."""
        context = self._context
        for span in spans:
            seq = context.sequences.get(span)
            if seq is None or seq.job.reachable:
                continue
            facts = Facts(step=EMBED_STEP, update_sent=seq.job.reachable, next_layer=where)
            if next_state(EMBED, facts) is DONE:
                self._end(seq.job)

    def _observe(self, visit: Visit) -> None:
        stats = self._context.stats
        stats.steps += 1
        if visit.tokens and visit.measured:
            slowest, beyond = self._context.own_origin.step_times(visit.job, visit.seconds)
            self._context.predictor.observe(visit.tokens, visit.context, slowest, beyond)

    def _on_failed_pass(self, batch: list[Visit], trace: str) -> None:
        """Log a pass that did not succeed as a whole, and leave it out of the measurements."""
        self._failed_passes += 1
        self._context.log_throttled("failed pass", logging.ERROR, "a pass failed (%d so far): %s", self._failed_passes, trace)
        for visit in batch:
            visit.measured = False

    def _fail_job(self, span: Span, error: PenstockError) -> None:
        """Fail the job of a Span of ours."""
        seq = self._context.sequences.get(span)
        if seq is not None:
            self._context.sequences.fail(seq.job, error)

    def _fail(self, batch: list[Visit], error: Exception) -> None:
        """Fail the Spans of visits whose action raised an error outside a pass."""
        self._context.logger.error("a visit failed: %s", error, exc_info=error)
        for visit in batch:
            job, part = visit.job, self._context.part(visit.job)
            if self._context.is_ours(job.route):
                for span in job.spans:
                    self._fail_job(span, to_compute_error(error))
            elif part is not None:
                part.stage.refuse(job)
            job.spans, job.hidden, visit.measured = [], None, False


class _Timed:
    """Adds the time spent inside to the compute time, divided among the visits."""

    elapsed = 0.0

    def __init__(self, context: JobContext, visits: list[Visit]) -> None:
        self._stats = context.stats
        self._clock = context.clock
        self.visits = visits

    def __enter__(self) -> _Timed:
        self._start = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.elapsed = self._clock() - self._start
        self._stats.compute += self.elapsed
        for visit in self.visits:
            visit.seconds += self.elapsed / len(self.visits)


def _chunks(job: NetworkJob) -> list[Span]:
    """The Spans whose progress is reported to a client. Single tokens are reported at the head."""
    return [span for span in job.spans if span.n > 1]


def _keep_wanted_rows(job: NetworkJob) -> None:
    """Keep only the wanted rows of the hidden states: [sum of n, hidden] -> [sum of rows, hidden]"""
    rows: list[int] = []
    at = 0
    for span in job.spans:
        at += span.n
        rows.extend(range(at - span.rows, at))
    if len(rows) != at:
        job.hidden = pick_rows(job.hidden, rows)


def _keep_spans(job: NetworkJob, wanted: list[bool]) -> None:
    """Keep only the wanted Spans of a returned NetworkJob, and their rows: [sum of rows, hidden]"""
    rows: list[int] = []
    at = 0
    for span, keep in zip(job.spans, wanted, strict=True):
        if keep:
            rows.extend(range(at, at + span.rows))
        at += span.rows
    if len(rows) != at:
        job.hidden = pick_rows(job.hidden, rows)
    job.spans = [span for span, keep in zip(job.spans, wanted, strict=True) if keep]
