"""Other ways to spread the layers of a running network over its machines, to be compared by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.simulate.from_network import RunningNetwork
from penstock.simulate.node import Machine
from penstock.simulate.report import report
from penstock.simulate.simulation import Simulation

ONE = "1 stream, 200+100"
MANY = "16 streams, 200+100"
SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class ComparedPlacement:
    """layers: by node. one, many: tokens per second for one stream and for many. first_token: seconds, of one stream."""

    name: str
    layers: dict[str, list[str]]
    one: float
    many: float
    first_token: float | None


def compare(network: RunningNetwork) -> list[ComparedPlacement]:
    """Simulate one stream and many on every placement."""
    found = []
    for name, machines in placements(network.machines, network.room, network.shape.layers, network.origin).items():
        one, many = (
            _figures(Simulation(network.scenario(load=load, seconds=SECONDS, machines=machines))) for load in (ONE, MANY)
        )
        layers = {machine.name: [f"{start}:{end}" for start, end in machine.ranges] for machine in machines if machine.ranges}
        found.append(ComparedPlacement(name, layers, one[0], many[0], one[1]))
    return found


def _figures(simulation: Simulation) -> tuple[float, float | None]:
    simulation.run()
    found = report(simulation)
    return found.tokens_per_second, found.first_token_s.p50


def placements(
    machines: Sequence[Machine], room: Mapping[str, int], num_layers: int, origin: str
) -> dict[str, tuple[Machine, ...]]:
    """Three placements: as it is, on as few machines as possible, on all machines by speed. Impossible ones are omitted.

    room: how many layers each machine can hold.
    """
    found = {"as it is": tuple(machines)}
    quickest = sorted(machines, key=lambda machine: (machine.layer_seconds, machine.name))
    for name, counts in (
        ("few machines", _filled(quickest, room, num_layers)),
        ("all machines", _by_speed(quickest, room, num_layers)),
    ):
        if sum(counts.values()) == num_layers:
            dealt = _deal(machines, counts, origin)
            if not any(_ranges(dealt) == _ranges(other) for other in found.values()):
                found[name] = dealt
    return found


def _filled(quickest: Sequence[Machine], room: Mapping[str, int], num_layers: int) -> dict[str, int]:
    """Fill the fastest machine first, then the next."""
    counts: dict[str, int] = {}
    for machine in quickest:
        counts[machine.name] = min(room[machine.name], num_layers - sum(counts.values()))
    return counts


def _by_speed(quickest: Sequence[Machine], room: Mapping[str, int], num_layers: int) -> dict[str, int]:
    """Assign each layer to the machine that would be fastest with one more."""
    counts = dict.fromkeys((machine.name for machine in quickest), 0)
    for _ in range(num_layers):
        free = [machine for machine in quickest if counts[machine.name] < room[machine.name]]
        if not free:
            break
        counts[min(free, key=lambda machine: (counts[machine.name] + 1) * machine.layer_seconds).name] += 1
    return counts


def _deal(machines: Sequence[Machine], counts: Mapping[str, int], origin: str) -> tuple[Machine, ...]:
    """Deal out the layers in order: the first to the origin, the rest in the order of the machines. KV memory stays the same."""
    start = 0
    dealt = {}
    for machine in sorted(machines, key=lambda machine: machine.name != origin):
        count, before = counts[machine.name], sum(end - first for first, end in machine.ranges)
        blocks = max(1, machine.blocks * before // count) if count and before else machine.blocks
        dealt[machine.name] = replace(machine, ranges=((start, start + count),) if count else (), blocks=blocks)
        start += count
    return tuple(dealt[machine.name] for machine in machines)


def _ranges(machines: Sequence[Machine]) -> list[tuple[tuple[int, int], ...]]:
    return [machine.ranges for machine in machines]
