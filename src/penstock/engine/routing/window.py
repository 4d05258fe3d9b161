"""Window: measures how many NetworkJobs to keep in flight.

With M in flight and B decodes, one cycle, in which every node runs all sequences once, takes
max(M * t_max(B / M), hops + sum of t(B / M)): either the slowest node is always busy, or the trip around the route takes longer.
M is chosen for the shortest cycle, so decodes are split into micro-batches only where that makes them faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

MAX_IN_FLIGHT = 16  # whatever was measured
MIN_GAIN = 0.95  # another size must bring the cycle below this share of the present one
VOTES = 4  # NetworkJobs in a row that must agree: steps are noisy, and changing has a cost
DECAY = 0.98  # weight of all earlier observations at each new one
SPLIT_PRIOR = 16.0  # until sizes vary, assume that a step of this many tokens takes twice as long as an empty one
RECENT_HOPS = 64  # measurements kept


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
        x, y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - x * x
        if variance < 0.05 * max(x, 1.0):
            slope = y / (x + SPLIT_PRIOR)
        else:
            slope = min(max(0.0, (self._xy / self._n - x * y) / variance), y / max(x, 1e-9))
        return max(0.0, y + slope * (tokens - x))


class Window:
    def __init__(self) -> None:
        self.size = 1  # how many may be in flight
        self.round_trip = 0.0  # of the last NetworkJob
        self._lines: dict[str, LinearFit] = {}  # by node, over all steps
        self._decoding: dict[str, LinearFit] = {}  # ... over steps without prompts: each token costs more there
        self._hops: deque[float] = deque(maxlen=RECENT_HOPS)
        self._votes = 0  # above zero for a larger size, below for a smaller one

    def observe(
        self, tokens: int, elapsed: float, services: Mapping[str, float], *, decodes: bool, ends: tuple[str, float] = ("", 0.0)
    ) -> None:
        """Record a NetworkJob that returned.

        services: seconds that the segments of each node took. The rest of `elapsed` is hops and queues; the shortest recent one
            counts as free of queues (including queues, the window would feed itself).
        decodes: whether it held no prompts.
        ends: the node with the model's ends, and how long they take afterwards.
        """
        self.round_trip = elapsed
        self._hops.append(max(0.0, elapsed - sum(services.values())))
        node, seconds = ends
        services = {**services, node: services.get(node, 0.0) + seconds} if node else services
        for lines in (self._lines, self._decoding) if decodes else (self._lines,):
            for node, seconds in services.items():
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
        return self.hops + sum(line.at(tokens) for line in self._lines.values())

    def aim(self, decodes: int, chunk: int, limit: int) -> None:
        """Move the size by at most one towards the best for this many decodes. `chunk` is 0 while no prompt is being read."""
        max_size = max(1, min(limit, MAX_IN_FLIGHT))
        wanted = self._for_chunks(chunk) if chunk else 1
        if self.size < min(wanted, max_size):
            self.size, self._votes = self.size + 1, 0
            return
        best = max(min(wanted, max_size), self._for_decodes(decodes, max_size))
        vote = (best > self.size) - (best < self.size)
        self._votes = self._votes + vote if vote * self._votes > 0 else vote
        if abs(self._votes) >= VOTES or self.size > max_size:
            self.size, self._votes = self.size + vote, 0

    def cycle(self, decodes: int, size: int) -> float:
        part = decodes / size
        seconds = [line.at(part) for line in (self._decoding or self._lines).values()]
        return max(size * max(seconds, default=0.0), self.hops + sum(seconds))

    def _for_decodes(self, decodes: int, max_size: int) -> int:
        """The size with the shortest cycle, or the present one if that is hardly worse."""
        sizes = range(1, max(1, min(decodes, max_size)) + 1)
        best = min(sizes, key=lambda size: self.cycle(decodes, size))
        present = min(self.size, sizes[-1])
        return best if self.cycle(decodes, best) < MIN_GAIN * self.cycle(decodes, present) else present

    def _for_chunks(self, chunk: int) -> int:
        """The size that keeps the slowest node busy. Chunks are all of one size, so this is trip time over its service time."""
        slowest = max((line.at(chunk) for line in self._lines.values()), default=0.0)
        return -(-int(1e6 * self.predicted(chunk)) // max(1, int(1e6 * slowest)))
