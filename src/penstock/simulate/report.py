"""What a simulation shows: figures of its jobs, nodes and links, as JSON has them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from penstock.engine.routing.origin.origin import Origin
from penstock.simulate.simulation import Simulation

BINS = 120  # of the timeline


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of durations in seconds; None without durations."""

    p50: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, durations: Sequence[float]) -> Spread:
        if not durations:
            return cls(None, None, None)
        ordered = sorted(durations)
        return cls(*(round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 6) for share in (0.5, 0.99, 1.0)))


@dataclass(frozen=True, slots=True)
class JobCounts:
    """unfinished: still running when the simulation stopped."""

    started: int
    done: int
    failed: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class NodeUse:
    """busy: share of its lifetime spent computing."""

    node: str
    layers: list[str]
    busy: float
    passes: int
    kv_tokens: int
    seconds: float  # of lifetime


@dataclass(frozen=True, slots=True)
class LinkUse:
    """busy: share of the time spent transferring hidden states."""

    sender: str
    receiver: str
    busy: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Figures for equal intervals. nodes: how many were live at the end of each."""

    seconds: list[float]  # the end of each part
    tokens_per_second: list[float]
    running: list[int]  # jobs that had begun and not ended
    first_token_s: list[Spread]  # of jobs that began in each part
    nodes: list[int]
    events: list[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    scenario: str
    seconds: float
    jobs: JobCounts
    errors: dict[str, int]  # why jobs failed
    tokens_per_second: float
    prompt_tokens_per_second: float
    first_token_s: Spread
    between_tokens_s: Spread
    lost_network_jobs: int
    broken_routes: int
    recoveries: int
    longest_pause_s: float
    preemptions: int
    node_visits: int  # passes of NetworkJobs through layers or head
    cpu_seconds: float = field(compare=False)  # used by the simulation
    node_visits_per_cpu_second: float = field(compare=False)
    nodes: list[NodeUse]
    links: list[LinkUse]
    timeline: Timeline

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def report(simulation: Simulation) -> SimulationReport:
    scenario, jobs, network = simulation.scenario, simulation.jobs, simulation.network
    seconds = scenario.seconds
    origins = [node.engine.origin for node in network.all_starts if isinstance(node.engine.origin, Origin)]
    done = sum(job.done for job in jobs)
    failed = sum(job.ended is not None and not job.done for job in jobs)
    gaps = [later - earlier for job in jobs for earlier, later in pairwise(job.tokens)]
    tokens = [at for job in jobs for at in job.tokens if at <= seconds]
    read = sum(job.prompt for job in jobs if job.tokens and job.tokens[0] <= seconds)
    nodes = _nodes(simulation)
    visits = sum(node.passes for node in nodes) + sum(origin.stats.steps for origin in origins)
    return SimulationReport(
        scenario=scenario.name,
        seconds=seconds,
        jobs=JobCounts(len(jobs), done, failed, len(jobs) - done - failed),
        errors=dict(Counter(job.error for job in jobs if job.error)),
        tokens_per_second=round(len(tokens) / seconds, 3),
        prompt_tokens_per_second=round(read / seconds, 3),
        first_token_s=Spread.of([job.tokens[0] - job.started for job in jobs if job.tokens]),
        between_tokens_s=Spread.of(gaps),
        lost_network_jobs=sum(origin.stats.lost_jobs for origin in origins),
        broken_routes=sum(origin.stats.broken_routes for origin in origins),
        recoveries=sum(origin.stats.recoveries for origin in origins),
        longest_pause_s=round(max((origin.stats.longest_wait for origin in origins), default=0.0), 3),
        preemptions=sum(origin.sequences.preemptions for origin in origins),
        node_visits=visits,
        cpu_seconds=round(simulation.cpu_seconds, 3),
        node_visits_per_cpu_second=round(visits / max(simulation.cpu_seconds, 1e-9), 1),
        nodes=nodes,
        links=_links(simulation),
        timeline=_timeline(simulation, tokens),
    )


def _nodes(simulation: Simulation) -> list[NodeUse]:
    """One entry per name, even if the node was started several times."""
    until = max(simulation.scenario.seconds, simulation.now())
    found = {}
    for machine in simulation.scenario.machines:
        lives = [node for node in simulation.network.all_starts if node.name == machine.name]
        there = sum(simulation.lifetime(node, until) for node in lives)
        busy = sum(map(simulation.busy_seconds, lives))
        found[machine.name] = NodeUse(
            machine.name,
            [f"{start}:{end}" for start, end in machine.ranges],
            _share(busy, there),
            sum(stage.passes for node in lives for stage in node.engine.stages.values()),
            machine.blocks * simulation.scenario.engine.block_size,
            round(there, 3),
        )
    return list(found.values())


def _links(simulation: Simulation) -> list[LinkUse]:
    """Those that carried hidden states, the busiest first."""
    until = max(simulation.scenario.seconds, simulation.now())
    table = simulation.network.table
    found = [LinkUse(*way, _share(busy, until), table.bytes[way]) for way, busy in table.busy.items()]
    return sorted(found, key=lambda link: (-link.busy, link.sender, link.receiver))


def _timeline(simulation: Simulation, tokens: Sequence[float]) -> Timeline:
    seconds, jobs = simulation.scenario.seconds, simulation.jobs
    width = seconds / BINS
    ends = [width * (number + 1) for number in range(BINS)]
    counts = Counter(min(BINS - 1, int(at / width)) for at in tokens)
    waits: dict[int, list[float]] = defaultdict(list)
    for job in jobs:
        if job.tokens:
            waits[min(BINS - 1, int(job.started / width))].append(job.tokens[0] - job.started)
    starts = sorted(job.started for job in jobs)
    stops = sorted(job.ended for job in jobs if job.ended is not None)
    changes = [at for at, _ in simulation.alive]
    return Timeline(
        seconds=[round(end, 6) for end in ends],
        tokens_per_second=[round(counts[number] / width, 3) for number in range(BINS)],
        first_token_s=[Spread.of(waits[number]) for number in range(BINS)],
        running=[bisect_left(starts, end) - bisect_left(stops, end) for end in ends],
        nodes=[simulation.alive[max(0, bisect_left(changes, end) - 1)][1] for end in ends],
        events=[(round(at, 3), what) for at, what in simulation.events],
    )


def _share(part: float, whole: float) -> float:
    return round(min(1.0, part / whole), 4) if whole > 0 else 0.0
