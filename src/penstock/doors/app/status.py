"""GET /status, for `penstock ps`: numbers and states of jobs, never any text of a request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypedDict

from penstock import __version__
from penstock.domain.job import HOLDS_KV, Job
from penstock.domain.job import Sequence as EngineSequence
from penstock.engine.hosted_model import HostedLayers, HostedModel


class JobStatus(TypedDict):
    id: str
    state: str
    outputs: int
    age: float
    last_update: float | None
    stale: bool
    priority: int
    prompt_tokens: int
    prefilled: int
    generated: int
    max_tokens: int
    preemptions: int


class HeldLayers(TypedDict):
    id: str
    device: str
    dtype: str
    layers: list[str]


class ModelStatus(HeldLayers):
    context: int
    kv_tokens: int
    kv_used: int
    generated_tokens: int
    jobs: list[JobStatus]


class NodeStatus(TypedDict):
    node_id: str
    version: str
    draining: bool
    aliases: dict[str, str]
    models: list[ModelStatus]
    workspace: dict[str, int] | None


def describe(
    node_id: str,
    models: Sequence[HostedLayers],
    aliases: Mapping[str, str],
    *,
    draining: bool,
    workspace: Mapping[str, int] | None,
) -> NodeStatus:
    return {
        "node_id": node_id,
        "version": __version__,
        "draining": draining,
        "aliases": dict(aliases),
        "models": [_model(hosted) for hosted in models],
        "workspace": None if workspace is None else dict(workspace),
    }


def _model(hosted: HostedLayers) -> ModelStatus:
    """A node without the ends of a model has no jobs of its own; its memory is leased to others."""
    engine = hosted.engine
    layers = [str(segment.layers) for segment in engine.pipe.segments]
    known: HeldLayers = {"id": hosted.name, "device": hosted.device, "dtype": hosted.dtype, "layers": layers}
    total, used = kv_of(hosted)
    if not isinstance(hosted, HostedModel):
        return {**known, "context": 0, "kv_tokens": total, "kv_used": used, "generated_tokens": 0, "jobs": []}
    return {
        **known,
        "context": hosted.context,
        "kv_tokens": total,
        "kv_used": used,
        "generated_tokens": engine.stats.generated_tokens,
        "jobs": sorted((_job(job) for job in hosted.jobs.open_jobs), key=lambda job: -job["age"]),
    }


def kv_of(hosted: HostedLayers) -> tuple[int, int]:
    """The KV memory of a model in tokens, and how much of it is used: of its jobs' pool, or of its smallest stage."""
    if isinstance(hosted, HostedModel):
        pool = hosted.engine.sequences.pool
        return pool.capacity * pool.block_size, pool.held_rows * pool.block_size
    size, stages = hosted.engine.config.block_size, list(hosted.engine.stages.values())  # the compute thread may change them
    total = min((stage.segment.kv_blocks for stage in stages), default=0)
    return total * size, max((stage.held for stage in stages), default=0) * size


def state_of(job: Job, sequences: Sequence[EngineSequence]) -> str:
    """The state of a job in a word that a user knows: reading, although between two prompt chunks its sequence is PAUSED."""
    if not sequences:
        return "waiting"
    state = sequences[0].display_state
    return "reading" if state in HOLDS_KV and job.prefilled < len(job.prompt_ids) else state.name.lower()


def _job(job: Job) -> JobStatus:
    """Read while the compute thread runs, so the numbers may be of slightly different times.

    last_update: seconds since a part of it was last computed, as `age` is seconds since it arrived; None before the first.
    """
    sequences = list(job.sequences)
    now, updated = time.monotonic(), job.last_update
    return {
        "id": job.job_id,
        "state": state_of(job, sequences),
        "outputs": job.sampling.n,
        "age": round(now - job.arrival, 3),
        "last_update": None if updated is None else round(max(0.0, now - updated), 3),
        "stale": job.is_stale(now),
        "priority": job.priority,
        "prompt_tokens": len(job.prompt_ids),
        "prefilled": job.prefilled,
        "generated": sum(seq.generated for seq in sequences),
        "max_tokens": job.max_tokens,
        "preemptions": job.preemptions,
    }
