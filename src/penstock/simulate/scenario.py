"""Scenario: which machines, links, load and events to simulate. Plain values; scenario_file.py reads them from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.config.engine import EngineConfig
from penstock.domain.hidden_format import HiddenFormat
from penstock.simulate.node import Machine

Amount = tuple[int, int]  # tokens: minimum and maximum of a uniform distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """layer_bytes: weights of one layer. kv_bytes: of one token in one layer. ends_bytes: weights of embedding and head."""

    layers: int
    hidden: int
    layer_bytes: int = 0
    kv_bytes: int = 0
    ends_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """loss: share of messages that never arrive."""

    round_trip: float = 0.0005  # seconds
    bytes_per_second: float = 125e6
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class LinkRow:
    """The speed of some links: between two nodes, groups or sites; inside each site (`within`); or all that no row names."""

    speed: LinkSpeed
    between: tuple[str, str] | None = None
    within: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLoad:
    """Jobs of an origin, or of each member of a group. One of `per_second`, `at` and `streams` is set."""

    origin: str
    prompt: Amount
    answer: Amount
    per_second: float = 0.0
    at: tuple[float, ...] = ()
    streams: int = 0


class EventKind(Enum):
    KILL = "kill"  # it dies
    FREEZE = "freeze"  # all its threads stop
    THAW = "thaw"
    LEAVE = "leave"  # it announces that it leaves, then leaves
    JOIN = "join"  # it starts: for the first time, or again
    CUT = "cut"  # nothing passes a link any more
    HEAL = "heal"


@dataclass(frozen=True, slots=True)
class NetworkEvent:
    """names: a node, or the two ends of a link; for a group, a random member is chosen when the event happens."""

    at: float
    what: EventKind
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """machines: all that ever take part. groups: the machines declared together, by name. sites: the site of each machine."""

    name: str
    seconds: float
    model: ModelShape
    machines: tuple[Machine, ...]
    loads: tuple[JobLoad, ...]
    seed: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)
    hidden_format: HiddenFormat = "bfloat16"  # in which hidden states travel
    links: tuple[LinkRow, ...] = ()
    events: tuple[NetworkEvent, ...] = ()
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sites: dict[str, str] = field(default_factory=dict)

    def members(self, name: str) -> Sequence[str]:
        """The machines that a name stands for: one machine, or all of a group."""
        return self.groups.get(name, (name,))

    @property
    def absent(self) -> set[str]:
        """Machines that are not running at the start: those whose first event is a join."""
        first: dict[str, EventKind] = {}
        for event in sorted(self.events, key=lambda event: event.at):
            for name in event.names:
                first.setdefault(name, event.what)
        names = {machine.name for machine in self.machines}
        return {name for name, what in first.items() if what is EventKind.JOIN and name in names}
