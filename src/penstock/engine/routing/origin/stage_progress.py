"""How far each stage of a route is with the prompts on their way, and which reports of stages an origin accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.domain.messages import StageProgress
from penstock.domain.route import Hop
from penstock.domain.span import Position
from penstock.engine.sequences.engine_sequences import EngineSequenceManager


class PromptProgress(NamedTuple):
    """The prompts that have not passed all stages yet."""

    prompts: int
    tokens: int  # of these prompts
    processed: tuple[int, ...]  # ... of which passed each stage of the route, the first stage first


def stages_passed(hops: Sequence[Hop], layer: int) -> int:
    """Count the stages that have run when all layers below `layer` have."""
    return sum(hop.layers.end <= layer for hop in hops)


def is_credible(report: StageProgress, sender: str, hops: Sequence[Hop], sequences: EngineSequenceManager) -> bool:
    """Whether the sender runs that layer on this route, and the report has no sequence further than it was sent."""
    runs_it = any(hop.node == sender and hop.layers.start < report.layer <= hop.layers.end for hop in hops)
    return runs_it and all(_was_sent(position, sequences) for position in report.positions)


def _was_sent(position: Position, sequences: EngineSequenceManager) -> bool:
    seq = sequences.holders.get(position.seq_id) or sequences.queued.get(position.seq_id)
    if seq is None:
        return True  # it has ended since
    attempt, current = (position.incarnation, position.attempt), (seq.incarnation, seq.attempt)
    return attempt < current or (attempt == current and position.end <= seq.scheduled)


def prompt_progress(sequences: EngineSequenceManager, stages: int) -> PromptProgress:
    """Add up the prompts being read. Called from other threads too, so the figures may be of slightly different times."""
    reading = [seq for seq in list(sequences.holders.values()) if not seq.is_step_processing_complete]
    cursors = [[*seq.stages_processed, *[0] * stages] for seq in reading]
    processed = (
        sum(min(found[stage], seq.prompt_len) for seq, found in zip(reading, cursors, strict=True)) for stage in range(stages)
    )
    return PromptProgress(len(reading), sum(seq.prompt_len for seq in reading), tuple(processed))
