"""Counters of one engine: plain numbers that the compute thread writes and any thread may read."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)  # seconds


class Histogram:
    """Count durations by bucket; the last bucket has no upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started. `busy` minus `compute` is what scheduling and bookkeeping cost."""

    steps: int = 0
    busy: float = 0.0  # seconds with work to do
    compute: float = 0.0  # ... of which inside the model and the sampler
    prompt_tokens: int = 0  # computed, so without those found in the prefix cache
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0
    last_token: float | None = None  # monotonic time of the newest generated token
    stages: dict[str, float] = field(default_factory=dict)  # seconds of compute by layer range
    jobs: dict[str, int] = field(default_factory=dict)  # ended jobs by outcome: done, cancelled, or an error code
    refused: dict[str, int] = field(default_factory=dict)  # messages of other nodes that were rejected, by reason
    unreachable_clients: int = 0  # jobs cancelled because their client took no more updates
    faults: int = 0  # internal errors in the compute thread, which continues after them
    lost_jobs: int = 0  # NetworkJobs that never returned
    broken_routes: int = 0  # routes that were given up, for any reason
    recoveries: int = 0  # how often running answers paused because a route broke
    last_pause: float = 0.0  # seconds until the first answer continued after the last break
    longest_wait: float = 0.0  # ... and until the last one did
    last_break: str = ""  # why the route broke
    queue_time: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    job_time: Histogram = field(default_factory=Histogram)
