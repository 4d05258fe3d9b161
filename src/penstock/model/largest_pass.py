"""The largest pass of an engine, run on zeros when a model is loaded: the memory that it leaves can be used for KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.domain.blocks import NULL_BLOCK
from penstock.domain.sampling import SamplingParams
from penstock.model.architecture.spec import ModelSpec
from penstock.model.batch import BatchPiece
from penstock.model.ends import EndModel
from penstock.model.sampling.sample_row import SampleRow
from penstock.model.sampling.sampler import sample
from penstock.model.segment import Segment


@torch.inference_mode()
def run_largest_pass(
    spec: ModelSpec,
    segments: Sequence[Segment],
    ends: EndModel | None,
    *,
    tokens: int,
    rows: int,
    block: int,
) -> None:
    """Run a prompt of this many tokens through all layers, and choose tokens for `rows` rows. Its KV goes to the unused block 0.

    block: tokens of a block.
    """
    table = [NULL_BLOCK] * (-(-tokens // block) * spec.kv_groups.count)
    hidden = torch.zeros(tokens, spec.hidden, device=segments[0].device)
    for segment in segments:
        hidden = segment.process(hidden, [BatchPiece(0, tokens, table)])
    if ends is not None:
        outputs = [SampleRow(SamplingParams(top_p=0.9), row, 0, [0], 1) for row in range(rows)]
        logits = ends.compute_head(ends.compute_norm(torch.zeros(rows, spec.hidden, device=ends.device)))
        sample(logits, outputs, ends.picker)
