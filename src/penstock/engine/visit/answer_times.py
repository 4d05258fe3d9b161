"""AnswerTimes: how long the tokens of an answer spent in each part of their way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.domain.job import Job
from penstock.domain.job import Sequence as Output
from penstock.domain.part_times import TimedPart, format_part_times
from penstock.domain.route import Hop
from penstock.domain.span import NetworkJob, Span
from penstock.engine.visit.head import ReturnedSpan
from penstock.engine.visit.job_context import JobContext

JobPhases = frozenset[tuple[Job, bool]]  # jobs of a NetworkJob, each with whether it decodes there or reads its prompt


class AnswerTimes:
    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._enabled = context.config.print_times or context.config.time_parts

    def phases_of(self, job: NetworkJob) -> JobPhases:
        """The jobs of a NetworkJob, if it is one of ours and parts are to be timed."""
        if not self._enabled or not self._context.is_ours(job.route):
            return frozenset()
        found = ((span, self._context.sequences.get(span)) for span in job.spans)
        return frozenset((seq.job, decodes(seq, span)) for span, seq in found if seq is not None)

    def record_embedding(self, job: NetworkJob, seconds: float) -> None:
        """Record how long the tokens of a NetworkJob took to embed. It is counted when the NetworkJob returns."""
        sent = self._context.own_origin.in_flight.get(job.number)
        if sent is not None:
            sent.embedding = seconds

    def record_returned(self, job: NetworkJob, phases: JobPhases) -> None:
        """Count the parts that a NetworkJob has passed since it was granted."""
        route, sent = self._context.own_origin.route, self._context.own_origin.in_flight.get(job.number)
        if phases and route is not None and sent is not None:
            elapsed = self._context.clock() - sent.sent
            self._add(phases, trip_parts(route.hops, self._context.pipe.node, job.services, elapsed, sent.embedding))

    def record_head(self, returned: Iterable[ReturnedSpan], seconds: float) -> None:
        if self._enabled:
            phases = frozenset((one.seq.job, decodes(one.seq, one.span)) for one in returned)
            self._add(phases, [(TimedPart("head", (self._context.pipe.node,)), seconds)])

    def record_decode_step(self, seqs: Iterable[Output], embedding: float, services: Sequence[float], head: float) -> None:
        """Count the parts of a step in which each of these sequences got its next token on this node."""
        route = self._context.own_origin.route
        if self._enabled and route is not None:
            node, elapsed = self._context.pipe.node, embedding + sum(services)
            parts = trip_parts(route.hops, node, services, elapsed, embedding)
            self._add(frozenset((seq.job, True) for seq in seqs), [*parts, (TimedPart("head", (node,)), head)])

    def log_prompt_read(self, jobs: Iterable[Job]) -> None:
        """Log how long the prompts of these jobs took: all of them have just passed the last layer."""
        now = self._context.clock()
        for job in jobs:
            seconds = now - (job.arrival if job.first_grant is None else job.first_grant)
            tokens, cached = len(job.prompt_ids), f" ({job.cached_tokens} cached)" if job.cached_tokens else ""
            self._context.logger.info("job %s: prompt read: %d tokens%s in %.2f s", job.job_id, tokens, cached, seconds)

    def log_times(self, job: Job) -> None:
        """Log how long an answer took, and in which part (`print_times`)."""
        answers = self._context.sequences.answers
        usage, times = answers.usage(job), answers.timings(job)
        decode = max(times.total - times.first_token, 1e-9)
        self._context.logger.info(
            "job %s: %d prompt tokens (%d cached), %d generated; "
            "queued %.3f s, first token %.3f s, total %.3f s, %.1f tokens/s\n%s",
            job.job_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            times.queued,
            times.first_token,
            times.total,
            max(usage.completion_tokens - 1, 0) / decode,
            "\n".join(format_part_times(times.parts)),
        )

    def _add(self, phases: JobPhases, parts: Sequence[tuple[TimedPart, float]]) -> None:
        for job, decode in phases:
            job.part_times.add(parts, decode=decode)


def decodes(seq: Output, span: Span) -> bool:
    """Whether a Span generates the next token, and is neither part of the prompt nor computed again."""
    return span.start_pos >= seq.prompt_len and span.end == len(seq.tokens)


def trip_parts(
    hops: Sequence[Hop], origin: str, services: Sequence[float], elapsed: float, embedding: float
) -> list[tuple[TimedPart, float]]:
    """The parts of one trip through all layers, with their seconds. The rest of the trip is hops, and queues before the stages.

    services: seconds at each segment. They come from other nodes, so none counts for more than the whole trip.
    """
    parts = [(TimedPart("embedding", (origin,)), embedding)]
    for hop, seconds in zip(hops, services, strict=False):
        parts.append((TimedPart("layers", (hop.node,), hop.layers), min(seconds, elapsed)))
    nodes = [origin]
    for node in [*(hop.node for hop in hops), origin]:
        if node != nodes[-1]:
            nodes.append(node)
    if len(nodes) > 1:
        parts.append((TimedPart("hops", tuple(nodes)), max(0.0, elapsed - sum(seconds for _, seconds in parts))))
    return parts
