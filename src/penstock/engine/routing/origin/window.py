"""Window: measures how many NetworkJobs to keep in flight, and how large a chunk of a prompt may be.

With M in flight and B decodes, one cycle, in which every node runs all sequences once, takes
max(M * t_max(B / M), hops + sum of t(B / M)): either the slowest node or link is always busy, or the trip around the route takes
longer. M is chosen for the shortest cycle, so decodes are split into micro-batches only where that makes them faster.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

FIRST_CHUNK = 128  # tokens of a prompt until links were measured: a slow one would be busy with a large chunk for long
MAX_GROWTH = 4  # of chunks beyond what was measured
CHUNK_TRANSFER_S = 0.25  # that a chunk may occupy a link: whatever follows waits that long
MIN_CHUNK = 32  # tokens, however slow the link
MIN_GAIN = 0.95  # another size must bring the cycle below this share of the present one
SLACK = 0.15  # of the time in which the slowest node may be idle
VOTES = 4  # NetworkJobs in a row that must agree: steps are noisy, and changing has a cost
DECAY = 0.98  # weight of all earlier observations at each new one
SPLIT_PRIOR = 16.0  # until sizes vary, assume that a step of this many tokens takes twice as long as an empty one
RECENT_HOPS = 64  # measurements kept
SIZES = sorted({*range(1, 17), *(int(16 * 1.25**step) for step in range(1, 12))})  # that are tried; a finer choice gains nothing


class LinearFit:
    """Fits seconds = a + b * tokens by least squares with slow decay. Neither a nor b is below zero."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        self._n = self._n * DECAY + 1
        self._x = self._x * DECAY + tokens
        self._y = self._y * DECAY + seconds
        self._xx = self._xx * DECAY + tokens * tokens
        self._xy = self._xy * DECAY + tokens * seconds

    def at(self, tokens: float) -> float:
        if not self._n:
            return 0.0
        return max(0.0, self._y / self._n + self.slope * (tokens - self._x / self._n))

    @property
    def line(self) -> tuple[float, float]:
        """Seconds for no tokens, and for each."""
        slope = self.slope
        return (max(0.0, (self._y - slope * self._x) / self._n) if self._n else 0.0), slope

    @property
    def slope(self) -> float:
        """Seconds for each further token."""
        n = self._n
        if not n:
            return 0.0
        x, y = self._x / n, self._y / n
        variance = self._xx / n - x * x
        if not _varies(x, variance):
            return y / (x + SPLIT_PRIOR)
        slope = (self._xy / n - x * y) / variance
        return 0.0 if slope < 0.0 else min(slope, y / max(x, 1e-9))

    @property
    def is_guess(self) -> bool:
        """Whether the slope may be far too small: only steps of a few tokens were seen, and all of about one size."""
        if not self._n:
            return True
        x = self._x / self._n
        return x < SPLIT_PRIOR and not _varies(x, self._xx / self._n - x * x)


def _varies(mean: float, variance: float) -> bool:
    """Whether sizes differ enough to tell what each token takes."""
    return variance >= 0.05 * max(mean, 1.0)


class Window:
    def __init__(self) -> None:
        self.size = 1  # how many may be in flight
        self.round_trip = 0.0  # of the last NetworkJob
        self._largest = 0  # tokens of a NetworkJob that has returned
        self._lines: dict[str, LinearFit] = {}  # by node, over all steps
        self._decoding: dict[str, LinearFit] = {}  # ... over steps without prompts: each token costs more there
        self._links: dict[str, LinearFit] = {}  # by the node at their end, over all steps
        self._hops: deque[float] = deque(maxlen=RECENT_HOPS)
        self._votes = 0  # above zero for a larger size, below for a smaller one

    def observe(
        self,
        tokens: int,
        elapsed: float,
        services: Mapping[str, float],
        transfers: Mapping[str, float] | None = None,
        *,
        decodes: bool,
        ends: tuple[str, float] = ("", 0.0),
    ) -> None:
        """Record a NetworkJob that returned.

        services: seconds that the segments of each node took.
        transfers: ... and that it took to carry the hidden states to each node. The rest of `elapsed` is latency and queues; the
            shortest recent one counts as free of queues (including queues, the window would feed itself).
        decodes: whether it held no prompts.
        ends: the node with the model's ends, and how long they take afterwards.
        """
        transfers = transfers or {}
        self.round_trip = elapsed
        self._largest = max(self._largest, tokens)
        self._hops.append(max(0.0, elapsed - sum(services.values()) - sum(transfers.values())))
        node, seconds = ends
        services = {**services, node: services.get(node, 0.0) + seconds} if node else services
        for lines, times in ((self._lines, services), (self._decoding, services if decodes else {}), (self._links, transfers)):
            for node, seconds in times.items():
                if node not in lines:
                    lines[node] = LinearFit()
                lines[node].observe(tokens, seconds)

    @property
    def measured(self) -> bool:
        return bool(self._hops)

    @property
    def hops(self) -> float:
        """Seconds that a NetworkJob spends between nodes on a whole trip, without queues."""
        return min(self._hops, default=0.0)

    @property
    def usual_hops(self) -> float:
        """The median of the recent trips, with queues."""
        return median(self._hops) if self._hops else 0.0

    def predicted(self, tokens: float) -> float:
        """Predicted seconds until a NetworkJob of this many tokens returns, without queues."""
        return self.hops + sum(self._stations(tokens))

    def slowest(self, tokens: float) -> float:
        """Predicted seconds that the slowest node or link is busy with this many tokens."""
        return max(self._stations(tokens), default=0.0)

    def tokens_per_second(self, node: str) -> float:
        """How many tokens the link to a node carries; 0 if that is not known, because too little has passed it."""
        line = self._links.get(node)
        return 0.0 if line is None or line.is_guess or not line.slope else 1 / max(line.slope, 1e-9)

    @property
    def max_chunk(self) -> int:
        """Tokens of a prompt that a NetworkJob should not exceed."""
        trusted = max(FIRST_CHUNK, MAX_GROWTH * self._largest)
        slopes = [line.slope for line in self._links.values()]
        return min(trusted, max(MIN_CHUNK, int(CHUNK_TRANSFER_S / max([*slopes, 1e-9]))))

    def _stations(self, tokens: float) -> list[float]:
        return [line.at(tokens) for line in (*self._lines.values(), *self._links.values())]

    def aim(self, decodes: int, chunk: int, limit: int) -> None:
        """Move the size by at most one towards the best for this many decodes. `chunk` is 0 while no prompt is being read."""
        max_size = max(1, limit)
        wanted = self.for_chunks(chunk) if chunk else 1
        if self.size < min(wanted, max_size):
            self.size, self._votes = min(wanted, max_size, 2 * self.size), 0
            return
        best = max(min(wanted, max_size), self._for_decodes(decodes, max_size))
        vote = (best > self.size) - (best < self.size)
        self._votes = self._votes + vote if vote * self._votes > 0 else vote
        if abs(self._votes) >= VOTES or self.size > max_size:
            step = max(1, self.size // 2)
            self.size, self._votes = min(max(best, self.size - step), self.size + step), 0

    def cycle(self, decodes: int, size: int) -> float:
        return next(self._cycles(decodes, [size]))

    def _cycles(self, decodes: int, sizes: Iterable[int]) -> Iterator[float]:
        """The cycle for each size."""
        lines = [line.line for line in (*(self._decoding or self._lines).values(), *self._links.values())]
        all_starts = self.hops + sum([start for start, _ in lines])
        all_slopes = sum([slope for _, slope in lines])
        for size in sizes:
            part = decodes / size
            slowest = max([start + slope * part for start, slope in lines], default=0.0)
            yield max(size * slowest, all_starts + all_slopes * part)

    def _for_decodes(self, decodes: int, max_size: int) -> int:
        """The size with the shortest cycle, or the present one if that is hardly worse."""
        largest = max(1, min(decodes, max_size))
        present = min(self.size, largest)
        sizes = [present, *(size for size in SIZES if size < largest), largest]
        cycles = self._cycles(decodes, sizes)
        of_present, best, shortest = next(cycles), present, math.inf
        for size, cycle in zip(sizes[1:], cycles, strict=False):
            if cycle >= shortest:
                break  # it only grows from here on: one term rises with the size, and the other falls
            best, shortest = size, cycle
        return best if shortest < MIN_GAIN * of_present else present

    def for_chunks(self, chunk: int) -> int:
        """The size that keeps the slowest node or link busy, all but SLACK of the time: one more would hold up what comes next.
        Chunks all have one size, so this is the time of a trip divided by that of the slowest."""
        return max(1, math.ceil(self.predicted(chunk) / max(1e-6, self.slowest(chunk)) - SLACK))
