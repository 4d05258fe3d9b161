"""Pacing: how many NetworkJobs an origin has in flight and how large they may be, from the times that its route takes."""

from __future__ import annotations

from penstock.config.engine import MAX_CHUNK, EngineConfig
from penstock.domain.messages import MAX_HIDDEN_BYTES
from penstock.domain.span import NetworkJob
from penstock.engine.routing.origin.route_health import Station
from penstock.engine.routing.origin.route_opener import ActiveRoute
from penstock.engine.routing.origin.window import Window
from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.pipes.pipe import Pipe


class Pacing:
    """Paces one route; a new route starts from scratch."""

    def __init__(self, config: EngineConfig, sequences: EngineSequenceManager, pipe: Pipe, token_bytes: int) -> None:
        self.window = Window()
        self._config = config
        self._sequences = sequences
        self._pipe = pipe
        self._node = pipe.node
        self._token_bytes = token_bytes

    def size(self, tokens: int) -> int:
        """Bytes of the hidden states of this many tokens, at most."""
        return tokens * self._token_bytes

    def max_in_flight(self, route: ActiveRoute) -> int:
        if self._config.window is not None:
            return min(self._config.window, route.credits)
        if route.is_local:
            return len({segment.device for segment in self._pipe.segments})  # what one device computes is best in one batch
        if not self.window.measured:
            return len(route.nodes)
        chunk = self._chunk()
        return min(route.credits, max(self.window.size, self.window.for_chunks(chunk) if chunk else 1))

    def max_chunk(self, route: ActiveRoute) -> int:
        """Tokens of prompts that fit into a NetworkJob, and that the links carry well."""
        if route.is_local:
            return MAX_CHUNK
        largest = MAX_HIDDEN_BYTES // self.size(1) - self._config.max_sequences
        return max(1, min(largest, self.window.max_chunk))

    def bytes_per_second(self, station: Station) -> float:
        """What the link to a station carries; 0 if that is not known."""
        return self.window.tokens_per_second(station.node) * self.size(1)

    def measure(self, route: ActiveRoute, job: NetworkJob, tokens: int, elapsed: float, *, decodes: bool, ends: float) -> None:
        """Record a NetworkJob of this many tokens that has returned. `ends`: seconds that embedding and head take."""
        services, transfers = self._times(route, job, elapsed)
        self.window.observe(tokens, elapsed, services, transfers, decodes=decodes, ends=(self._node, ends))
        self.window.aim(sum([seq.decoding for seq in self._sequences.holders.values()]), self._chunk(), route.credits)

    def step_times(self, route: ActiveRoute, job: NetworkJob, elapsed: float, here: float) -> tuple[float, float]:
        """Seconds of a NetworkJob at the slowest node or link of its way, and in all other places together.

        here: seconds of compute on this node since it returned.
        """
        if route.is_local:
            return here, 0.0
        services, transfers = self._times(route, job, elapsed)
        services[self._node] = services.get(self._node, 0.0) + here
        places = [*services.values(), *transfers.values()]
        return max(places), sum(places) - max(places) + self.window.hops

    def _chunk(self) -> int:
        """Tokens of the chunks in which prompts are being read; 0 if there are none."""
        sequences = self._sequences
        reading = [seq for seq in sequences.holders.values() if len(seq.tokens) > seq.scheduled + 1]
        return min(self._config.busy_chunk, self.window.max_chunk) if reading or sequences.queued else 0

    def _times(self, route: ActiveRoute, job: NetworkJob, elapsed: float) -> tuple[dict[str, float], dict[str, float]]:
        """By node: seconds of compute, and of the transfer to it. Other nodes report them, so each is cut to `elapsed`."""
        services: dict[str, float] = {}
        for hop, seconds in zip(route.hops, job.services, strict=False):
            services[hop.node] = services.get(hop.node, 0.0) + min(seconds, elapsed)
        ends = [station.node for station in route.health.stations]
        if ends[0] == self._node:
            del ends[0]  # where it was granted
        transfers: dict[str, float] = {}
        for node, seconds in zip(ends, job.transfers, strict=False):
            transfers[node] = transfers.get(node, 0.0) + min(seconds, elapsed)
        return services, transfers
