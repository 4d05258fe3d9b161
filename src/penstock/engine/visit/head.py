"""Head: turns returned hidden states into tokens, prompt logprobs or an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.domain.job import Sequence as Output
from penstock.domain.span import Span
from penstock.domain.updates import PromptLogprobs
from penstock.engine.routing.host.heartbeat import UNKNOWN_PASS_S
from penstock.engine.sequences.engine_sequences import Step
from penstock.engine.sequences.output_text import resume_refused
from penstock.engine.visit.job_context import JobContext
from penstock.errors import ComputeFailed, PenstockError, RequestError
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import Sample, sample, score
from penstock.model.transfer import pick_rows

SCORE_BATCH_ROWS = 256  # of logits computed at once for prompt logprobs


class ReturnedSpan(NamedTuple):
    """A Span at HEAD, its sequence, and the range of its rows in the batch: [start, end)"""

    span: Span
    seq: Output
    start: int
    end: int

    @property
    def embeds(self) -> bool:
        return self.seq.job.request.embed

    @property
    def wants_token(self) -> bool:
        return self.span.end == len(self.seq.tokens) and not self.embeds


class Head:
    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._row_seconds = 0.0  # for each row: the slowest recent batch, decaying

    def expected_seconds(self, rows: int) -> float:
        """How long this may take for so many rows, so that other nodes do not take this one for hung."""
        return rows * self._row_seconds if self._row_seconds else UNKNOWN_PASS_S

    def observe(self, rows: int, seconds: float, *, failed: bool = False) -> None:
        """Record how long norm, head and sampling of so many rows took."""
        self._row_seconds = max(0.9 * self._row_seconds, seconds / max(1, rows))
        if not failed:
            origin = self._context.own_origin
            origin.ends_seconds = 0.8 * origin.ends_seconds + 0.2 * seconds

    def steps(self, returned: Sequence[ReturnedSpan], normed: Tensor) -> list[Step]:
        """Make a Step of each Span from the normed rows of the batch, [sum of rows, hidden]. Omits Spans that get no token
        because of their grammar."""
        samples = self._sample(returned, normed)
        steps = []
        for one in returned:
            if one.embeds:
                steps.append(Step(one.span, row_sum=_sum(one, normed)))
                continue
            scores = self._score(one, normed) if one.seq.wants_rows else None
            sampled = samples.get(one.span)
            if sampled is not None:
                steps.append(Step(one.span, sampled.token_id, sampled.logprob, scores))
            elif not one.wants_token:
                steps.append(Step(one.span, prompt_logprobs=scores))
        return steps

    def _sample(self, returned: Sequence[ReturnedSpan], normed: Tensor) -> dict[Span, Sample]:
        """Sample the next token of all Spans that need one, in one call."""
        rows = [(one, row) for one in returned if one.wants_token and (row := self.sample_row(one.seq)) is not None]
        if not rows:
            return {}
        last = [one.end - 1 for one, _ in rows]
        ends = self._context.own_end_model
        logits = ends.compute_head(normed if len(last) == len(normed) else pick_rows(normed, last))
        found = sample(logits, [row for _, row in rows], ends.picker)
        return {one.span: sampled for (one, _), sampled in zip(rows, found, strict=True)}

    def sample_row(self, seq: Output) -> SampleRow | None:
        """The sampler's input for a sequence. None if its grammar failed, which fails this job only, has no mask yet, or
        turns out to be complete."""
        job, params = seq.job, seq.job.sampling
        banned: tuple[int, ...] = ()
        if seq.generated < params.min_tokens:
            banned = (*self._context.own_end_model.eos_ids, *params.stop_token_ids)
        allowed = None
        try:
            if seq.constraint is not None:
                allowed = seq.constraint.mask()
                if allowed is None:
                    self._context.sequences.rewind_seq(seq)
                    return None
                if self._context.sequences.end_if_complete(seq, seq.constraint, allowed):
                    return None
        except Exception as error:
            known = error if isinstance(error, PenstockError) else ComputeFailed(f"The grammar failed: {error}.")
            if isinstance(error, RequestError) and 0 < seq.generated <= len(job.request.resume):
                known = resume_refused("one of its tokens", error)  # the grammar was late to say so
            self._context.sequences.fail(job, known)
            return None
        row: SampleRow | None = seq.sample_row
        if row is None:
            row = seq.sample_row = SampleRow(params, job.seed, seq.index, seq.tokens, seq.prompt_len)
        row.banned, row.allowed = banned, allowed
        return row

    def _score(self, one: ReturnedSpan, normed: Tensor) -> PromptLogprobs:
        """Logprobs of the prompt's tokens, a slice of rows at a time, since logits over a vocabulary are large."""
        seq, end_model = one.seq, self._context.own_end_model
        first = one.span.end - one.span.rows + 1  # the position that the first row predicts
        targets = seq.tokens[first : min(one.span.end + 1, seq.prompt_len)]
        logprobs = []
        for i in range(0, len(targets), SCORE_BATCH_ROWS):
            some = targets[i : i + SCORE_BATCH_ROWS]
            logits = end_model.compute_head(normed[one.start + i : one.start + i + len(some)])
            logprobs += score(logits, some, seq.job.sampling.prompt_logprobs or 0)
        return PromptLogprobs(first, tuple(logprobs))


def _sum(one: ReturnedSpan, normed: Tensor) -> np.ndarray:
    """The sum of the rows, [hidden], in fp64, since a long prompt has many chunks to add up."""
    summed: np.ndarray = normed[one.start : one.end].sum(dim=0).cpu().double().numpy()  # Apple's GPUs have no fp64
    return summed
