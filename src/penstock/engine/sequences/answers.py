"""Answers: what the clients of this origin get to see of its sequences: text, tokens, embeddings, usage and times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.domain.job import Job, Sequence
from penstock.domain.span import Span
from penstock.domain.updates import (
    Embedded,
    FinishReason,
    JobDone,
    JobFailed,
    OutputFinished,
    Timings,
    TokenLogprob,
    TokensOut,
    Usage,
)
from penstock.engine.sequences.output_text import AcceptedToken, OutputText, TextStreams, accept_token, replay_token
from penstock.errors import PenstockError
from penstock.stats import EngineStats


class Answers:
    """Turns tokens into updates. It decides nothing about a sequence: its EngineSequenceManager ends those that are complete."""

    def __init__(self, eos_ids: frozenset[int], text_stream: TextStreams, stats: EngineStats, clock: Callable[[], float]) -> None:
        self._eos_ids = eos_ids
        self._text_stream = text_stream
        self._stats = stats
        self._clock = clock
        self._texts: dict[int, OutputText] = {}

    def open(self, seq: Sequence) -> None:
        sampling = seq.job.sampling
        self._texts[seq.seq_id] = OutputText(self._text_stream(sampling.skip_special_tokens), sampling.stop)

    def close(self, seq: Sequence) -> None:
        del self._texts[seq.seq_id]

    # ---- outputs ----

    def send_token(self, seq: Sequence, logprob: TokenLogprob | None, now: float) -> AcceptedToken:
        """Send the newest token of a sequence, with its text."""
        self._observe_token(seq, now)
        accepted = accept_token(seq, self._texts[seq.seq_id], self._eos_ids)
        seq.job.emit(TokensOut(seq.index, accepted.text, (seq.tokens[-1],), () if logprob is None else (logprob,)))
        return accepted

    def replay(self, seq: Sequence) -> AcceptedToken:
        """Process the newest token of a resumed sequence, which was generated before."""
        return replay_token(seq, self._texts[seq.seq_id], self._eos_ids)

    def send_replayed(self, seq: Sequence, text: str) -> None:
        """Send the tokens generated before as one update. They count as generated here, except in statistics."""
        seq.job.emit(TokensOut(seq.index, text, tuple(seq.tokens[seq.prompt_len :])))

    def send_rest(self, seq: Sequence) -> str | None:
        """Send the text that was held back. Returns the stop string in it, if there is one."""
        rest = self._texts[seq.seq_id].finish()
        if rest.text:
            seq.job.emit(TokensOut(seq.index, rest.text, ()))
        return rest.stop

    def add_rows(self, seq: Sequence, span: Span, row_sum: np.ndarray) -> bool:
        """Add rows to an embedding, and send it with the last one. Returns whether it is complete."""
        job = seq.job
        assert span.end - span.rows == job.rows_returned, "every row counts once, even if it is computed again"
        job.rows_returned = span.end
        job.row_sum = row_sum if job.row_sum is None else job.row_sum + row_sum
        complete = job.rows_returned == seq.prompt_len
        if complete:
            job.emit(Embedded(tuple((job.row_sum / seq.prompt_len).astype(np.float32).tolist())))
        return complete

    def send_end(self, seq: Sequence, reason: FinishReason, stop_reason: str | int | None) -> None:
        seq.job.emit(OutputFinished(seq.index, reason, stop_reason))

    # ---- whole jobs ----

    def send_done(self, job: Job) -> None:
        job.open = False
        cancelled = any(seq.finish is FinishReason.CANCELLED for seq in job.sequences)
        timings = self.timings(job)
        self._stats.job_time.observe(timings.total)
        self._count("cancelled" if cancelled else "done")
        job.emit(JobDone(self.usage(job), timings))

    def send_failed(self, job: Job, error: PenstockError) -> None:
        self._count(error.code)
        job.emit(JobFailed(error))

    def usage(self, job: Job) -> Usage:
        return Usage(len(job.prompt_ids), sum(seq.generated for seq in job.sequences), job.cached_tokens)

    def timings(self, job: Job) -> Timings:
        now, arrival = self._clock(), job.arrival
        queued = (job.first_grant or now) - arrival
        parts = job.part_times.summary()
        return Timings(queued, (job.first_token or now) - arrival, now - arrival, job.preemptions, parts)

    def _observe_token(self, seq: Sequence, now: float) -> None:
        job = seq.job
        if job.first_token is None:
            job.first_token = now
            self._stats.first_token.observe(now - job.arrival)
        if seq.last_token:
            self._stats.between_tokens.observe(now - seq.last_token)
        seq.last_token = self._stats.last_token = now

    def _count(self, how: str) -> None:
        self._stats.jobs[how] = self._stats.jobs.get(how, 0) + 1
