"""A Stage: one local segment with the replicas and KV blocks of the sequences that pass it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock.config.engine import EngineConfig
from penstock.domain.blocks import BlockPool
from penstock.domain.span import NetworkJob, Span, Verdict
from penstock.engine.worker_sequences import WorkerSequenceManager
from penstock.model.attention import Piece
from penstock.model.segment import Segment


class Refusal(NamedTuple):
    """A Span that this stage could not take, and why; its origin must act."""

    span: Span
    verdict: Verdict


class Stage:
    def __init__(self, segment: Segment, kv_blocks: int, config: EngineConfig) -> None:
        self.segment = segment
        self.sequences = WorkerSequenceManager(BlockPool(kv_blocks, config.block_size, prefix_cache=config.prefix_cache))

    def run(self, jobs: Sequence[NetworkJob]) -> list[Refusal]:
        """Run NetworkJobs through the segment in one pass. Afterwards they hold what was taken, one layer range further."""
        refusals: list[Refusal] = []
        for job, verdicts in zip(jobs, self.sequences.on_schedule(jobs), strict=True):
            if any(verdict is not Verdict.APPEND for verdict in verdicts):
                refusals += _leave_out(job, verdicts)
        spans = [span for job in jobs for span in job.spans]
        if spans:
            pieces = [Piece(span.start_pos, span.n, self.sequences.table(span)) for span in spans]
            full = [job for job in jobs if job.spans]
            hidden = full[0].hidden if len(full) == 1 else torch.cat([job.hidden for job in full])
            out = self.segment.process(hidden, pieces)
            row = 0
            for job in full:
                count = sum(span.n for span in job.spans)
                job.hidden = out[row : row + count]
                row += count
        for job in jobs:
            job.current_layer = self.segment.layers.end
            self.sequences.on_stage_completed(job.spans)
        return refusals


def _leave_out(job: NetworkJob, verdicts: Sequence[Verdict]) -> list[Refusal]:
    """Cut the Spans that are not to be run out of a NetworkJob; stale ones and repetitions need no answer."""
    kept: list[Span] = []
    rows: list[int] = []
    refusals: list[Refusal] = []
    row = 0
    for span, verdict in zip(job.spans, verdicts, strict=True):
        if verdict is Verdict.APPEND:
            kept.append(span)
            rows.extend(range(row, row + span.n))
        elif verdict not in (Verdict.DUPLICATE, Verdict.STALE):
            refusals.append(Refusal(span, verdict))
        row += span.n
    job.spans = kept
    job.hidden = job.hidden[rows]
    return refusals
