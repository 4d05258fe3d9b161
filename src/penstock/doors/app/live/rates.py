"""RateMeter: rates and latencies of the last seconds, from two readings of the engine's counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

from penstock.stats import EngineStats, Histogram

RATE_WINDOW_S = 5.0
LATENCY_WINDOW_S = 60.0


class Rates(TypedDict):
    """Per second, over the last few. batch: mean tokens of a step. prefix_hits: share of prompt tokens found in the cache."""

    generated_tokens: float
    prompt_tokens: float
    steps: float
    preemptions: float
    ended_jobs: float
    batch: NotRequired[float]
    prefix_hits: NotRequired[float]


class Latency(TypedDict):
    """Seconds. mean is exact; p50 and p95 are interpolated within the buckets of the histogram in GET /metrics."""

    count: int
    mean: float
    p50: float
    p95: float


class Latencies(TypedDict):
    """Of the last minute; those without observations are left out. between_tokens: of one answer."""

    first_token: NotRequired[Latency]
    between_tokens: NotRequired[Latency]
    queue: NotRequired[Latency]


class _Reading(NamedTuple):
    at: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    steps: int
    preemptions: int
    ended: int
    histograms: tuple[tuple[tuple[int, ...], float], ...]  # counts by bucket, and the sum of all values


HISTOGRAMS = {"first_token": "first_token", "between_tokens": "between_tokens", "queue": "queue_time"}


class RateMeter:
    """Of one engine, while somebody watches."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()

    def read(self, stats: EngineStats, preemptions: int, now: float) -> tuple[Rates | None, Latencies]:
        """Take a reading. Rates are None at the first, since they need two."""
        histograms: list[Histogram] = [getattr(stats, name) for name in HISTOGRAMS.values()]
        new = _Reading(
            now,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.generated_tokens,
            stats.steps,
            preemptions,
            sum(list(stats.jobs.values())),
            tuple((tuple(one.counts), one.total) for one in histograms),
        )
        while len(self._readings) > 1 and self._readings[1].at <= now - LATENCY_WINDOW_S:
            self._readings.popleft()
        self._readings.append(new)
        recent = [one for one in self._readings if one.at <= now - RATE_WINDOW_S]
        before = recent[-1] if recent else self._readings[0]
        return (_rates(before, new) if new.at > before.at else None), self._latencies(new)

    def _latencies(self, new: _Reading) -> Latencies:
        found: Latencies = {}
        for name, old, now in zip(HISTOGRAMS, self._readings[0].histograms, new.histograms, strict=True):
            counts = [after - before for before, after in zip(old[0], now[0], strict=True)]
            if any(counts):
                found[name] = _latency(counts, now[1] - old[1])  # type: ignore[literal-required]
        return found


def _rates(old: _Reading, new: _Reading) -> Rates:
    seconds = new.at - old.at
    read, cached = new.prompt_tokens - old.prompt_tokens, new.cached_tokens - old.cached_tokens
    generated, steps = new.generated_tokens - old.generated_tokens, new.steps - old.steps
    rates: Rates = {
        "generated_tokens": round(generated / seconds, 2),
        "prompt_tokens": round(read / seconds, 2),
        "steps": round(steps / seconds, 2),
        "preemptions": round((new.preemptions - old.preemptions) / seconds, 3),
        "ended_jobs": round((new.ended - old.ended) / seconds, 3),
    }
    if steps:
        rates["batch"] = round((read + generated) / steps, 2)
    if read + cached:
        rates["prefix_hits"] = round(cached / (read + cached), 4)
    return rates


def _latency(counts: Sequence[int], total: float) -> Latency:
    count = sum(counts)
    return {
        "count": count,
        "mean": round(total / count, 6),
        "p50": round(quantile(counts, 0.5), 6),
        "p95": round(quantile(counts, 0.95), 6),
    }


def quantile(counts: Sequence[int], share: float, bounds: Sequence[float] = Histogram().bounds) -> float:
    """Interpolate a quantile within its bucket; the last bucket has no upper bound, so there it is the lower one."""
    wanted, below = share * sum(counts), 0
    for place, count in enumerate(counts):
        if count and below + count >= wanted:
            start = bounds[place - 1] if place else 0.0
            end = bounds[place] if place < len(bounds) else start
            return start + (end - start) * (wanted - below) / count
        below += count
    return bounds[-1]
