"""Counters of one engine. Plain numbers, written by the compute thread, read by anybody."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)  # seconds


class Histogram:
    """How often a duration fell into which bucket; the last bucket has no upper end."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class EngineStats:
    """Seconds: `busy` is all the time in which there was work, `compute` the part of it inside the model and the sampler;
    the difference is what scheduling and bookkeeping cost."""

    steps: int = 0
    busy: float = 0.0
    compute: float = 0.0
    prompt_tokens: int = 0  # computed; those found in the prefix cache are not in here
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0
    last_token: float | None = None  # when the newest token was generated, by the monotonic clock
    stages: dict[str, float] = field(default_factory=dict)  # seconds of compute by layer range
    jobs: dict[str, int] = field(default_factory=dict)  # ended, by how: done, cancelled, or the code of the error
    refused: dict[str, int] = field(default_factory=dict)  # messages of other nodes that could not be taken, by why
    lost_jobs: int = 0  # NetworkJobs that never came home
    recoveries: int = 0  # pauses of running answers because a route broke
    last_pause: float = 0.0  # seconds until the first answer went on
    longest_wait: float = 0.0  # ... and until the last one did
    last_break: str = ""  # why
    queue_time: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    job_time: Histogram = field(default_factory=Histogram)
