"""Route ids, and the hops and legs of a route: the path of one origin's Spans over the nodes that hold the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.domain.topology import LayerRange


class RouteId(NamedTuple):
    origin: str
    epoch: int  # grows with each start of the origin
    number: int

    def __str__(self) -> str:
        return f"{self.origin}/{self.epoch}/{self.number}"


class Hop(NamedTuple):
    """A segment on the path, or a part of one: the layers that are run there."""

    layers: LayerRange
    node: str


class Leg(NamedTuple):
    """Consecutive layers that one node runs for a route, and the nodes before and after it."""

    layers: LayerRange
    predecessor: str
    successor: str


def legs_of(hops: Sequence[Hop], origin: str) -> dict[str, tuple[Leg, ...]]:
    """The legs of each node: all that it needs to know of a route. Adjacent segments on one node are one leg."""
    stays: list[Hop] = []
    for hop in hops:
        if stays and stays[-1].node == hop.node:
            stays[-1] = Hop(LayerRange(stays[-1].layers.start, hop.layers.end), hop.node)
        else:
            stays.append(hop)
    nodes = [origin, *(stay.node for stay in stays), origin]
    legs: dict[str, tuple[Leg, ...]] = {}
    for index, stay in enumerate(stays):
        leg = Leg(stay.layers, predecessor=nodes[index], successor=nodes[index + 2])
        legs[stay.node] = (*legs.get(stay.node, ()), leg)
    return legs
