"""Which layers of a model are loaded, and how they are shared among the cards of a machine. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from penstock.domain.topology import LayerRange, covering
from penstock.errors import ConfigError
from penstock.model.architecture.spec import ModelSpec


class DeviceLayers(NamedTuple):
    """The layers that one device holds. weights: bytes of theirs, and of the ends if they are there, too."""

    device: torch.device
    ranges: tuple[LayerRange, ...]
    weights: int

    @property
    def size(self) -> int:
        return sum(layers.size for layers in self.ranges)


def share_layers(weights: Sequence[int], rooms: Sequence[int], kv_block: int) -> list[int]:
    """How many layers each card gets, in order, so that the card with the least KV has as much of it as it can.

    weights: bytes of each layer.
    rooms: bytes that each card has for layers and their KV. Every card gets a layer; there are no more cards than layers.
    kv_block: bytes of a block in one layer.
    """
    before = [0, *accumulate(weights)]
    # by the number of layers on the cards so far: the least blocks of a card, how uneven it is, and the ends of their ranges
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (math.inf, 0, ())}
    for card, room in enumerate(rooms, 1):
        found = {}
        for end in range(card, len(weights) - (len(rooms) - card) + 1):
            options = []
            for start, (least, uneven, ends) in best.items():
                if start < end:
                    size, left = end - start, room - before[end] + before[start]
                    blocks = left / (kv_block * size) if left > 0 else left  # too little memory: rank by the missing bytes
                    options.append((min(least, blocks), uneven - size * size, (*ends, end)))
            found[end] = max(options)
        best = found
    ends = (0, *best[len(weights)][2])
    return [end - start for start, end in pairwise(ends)]


def cut_ranges(ranges: Sequence[LayerRange], sizes: Sequence[int]) -> list[list[LayerRange]]:
    """Deal ranges out to cards that get so many layers each, in order. A range is cut where a card ends."""
    dealt: list[list[LayerRange]] = [[] for _ in sizes]
    card, left = 0, sizes[0]
    for start, end in ranges:
        while start < end:
            if not left:
                card += 1
                left = sizes[card]
            cut = min(end, start + left)
            dealt[card].append(LayerRange(start, cut))
            left -= cut - start
            start = cut
    return dealt


def bounding_range(segments: Sequence[tuple[int, int]]) -> LayerRange:
    """The smallest range that contains all segments: what must be downloaded."""
    return LayerRange(min(start for start, _ in segments), max(end for _, end in segments))


def ranges_of(segments: Sequence[tuple[int, int]] | None, spec: ModelSpec, whole: bool) -> list[LayerRange]:
    """The ranges that are to be loaded, in order; `whole`: all layers."""
    if segments is None:
        return [LayerRange(0, spec.num_layers)]
    if whole:
        return covering(segments, spec.num_layers)
    ranges = sorted(LayerRange(*segment) for segment in segments)
    if ranges[-1].end > spec.num_layers:
        raise ConfigError(
            f"Layers {ranges[-1]} do not exist: the model has {spec.num_layers}.",
            hint=f"Use a range within 0:{spec.num_layers}.",
        )
    return ranges
