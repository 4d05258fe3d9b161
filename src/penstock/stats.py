"""Counters of one engine. Plain numbers, written by the compute thread, read by anybody."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Seconds: `busy` is all the time in which there was work, `compute` the part of it inside the model and the sampler;
    the difference is what scheduling and bookkeeping cost."""

    steps: int = 0
    busy: float = 0.0
    compute: float = 0.0
    prompt_tokens: int = 0  # computed; those found in the prefix cache are not in here
    generated_tokens: int = 0
