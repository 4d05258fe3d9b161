"""Window: how many NetworkJobs to keep in flight, found by measuring.

With M of them in flight, every node has passed all sequences once per cycle of max(M * t_max(B / M), hops + sum of t(B / M)):
either the slowest node is always busy, or the way round takes longer than that. M is the one with the shortest cycle, so
decodes are split over micro-batches only where that makes them faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

MAX_IN_FLIGHT = 16  # NetworkJobs in flight, whatever was measured
MIN_GAIN = 0.95  # another size must make the cycle at least this much shorter
VOTES = 4  # NetworkJobs in a row that must say so: steps are noisy, and changing over costs
DECAY = 0.98
SPLIT_PRIOR = 16.0  # until sizes vary: a step of so many tokens takes twice as long as one of none
RECENT_HOPS = 64


class LinearFit:
    """seconds ~ a + b * tokens, by least squares that forget slowly. Neither part is below zero."""

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
        self._lines: dict[str, LinearFit] = {}  # of each node, over all steps
        self._decoding: dict[str, LinearFit] = {}  # ... and over those without prompts, whose tokens cost more each
        self._hops: deque[float] = deque(maxlen=RECENT_HOPS)
        self._votes = 0  # for more, or below zero for less

    def observe(
        self, tokens: int, elapsed: float, services: Mapping[str, float], *, decodes: bool, ends: tuple[str, float] = ("", 0.0)
    ) -> None:
        """A NetworkJob came home; `services` is what the segments of each node took for it. The rest is hops and queues, and the
        least of the recent ones had no queues (counting those in, the window would feed itself). `decodes`: it had no prompts;
        `ends`: which node has the model's ends, and how long they take after that."""
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
        """Seconds that a NetworkJob spends between nodes, on its whole way round."""
        return min(self._hops, default=0.0)

    @property
    def usual_hops(self) -> float:
        """... with what it waited for, in the middle of the recent ones."""
        return median(self._hops) if self._hops else 0.0

    def predicted(self, tokens: float) -> float:
        """Seconds until a NetworkJob of so many tokens is home, without queues."""
        return self.hops + sum(line.at(tokens) for line in self._lines.values())

    def aim(self, decodes: int, chunk: int, limit: int) -> None:
        """Move by one towards the best size for so many decodes, and for prompts in chunks if there are any."""
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
        """The size with the shortest cycle; the present one, where that is hardly worse."""
        sizes = range(1, max(1, min(decodes, max_size)) + 1)
        best = min(sizes, key=lambda size: self.cycle(decodes, size))
        present = min(self.size, sizes[-1])
        return best if self.cycle(decodes, best) < MIN_GAIN * self.cycle(decodes, present) else present

    def _for_chunks(self, chunk: int) -> int:
        """Chunks of a prompt are all of one size, so as many as it takes to have the slowest node always busy."""
        slowest = max((line.at(chunk) for line in self._lines.values()), default=0.0)
        return -(-int(1e6 * self.predicted(chunk)) // max(1, int(1e6 * slowest)))
