"""WindowGroups: layers that look equally far back, in groups of about the same size, so that any KV block can serve any group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from penstock.domain.topology import LayerRange

MAX_GROUPS = 8  # a sequence has a block of each for every `block_size` tokens


@dataclass(frozen=True, slots=True)
class WindowGroups:
    """The groups of a whole model's layers. They follow from its shape, so that all nodes agree, whatever layers each holds.

    windows: of each group: how many positions a token sees, itself included; None for all before it.
    of_layers: the group of each layer.
    """

    windows: tuple[int | None, ...]
    of_layers: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.windows)

    def places(self, layers: LayerRange) -> list[int]:
        """For each of these layers, how many layers of its group come before it. Layers with the same number share memory: their
        groups use different blocks of it."""
        before: Counter[int] = Counter()
        found = []
        for layer in layers.layers():
            group = self.of_layers[layer]
            found.append(before[group])
            before[group] += 1
        return found

    def table_of(self, blocks: Sequence[int]) -> list[int]:
        """The table for blocks that each cover all layers: every one is split into a block for each group."""
        return [(block - 1) * self.count + 1 + group for block in blocks for group in range(self.count)]

    def parts_within(self, layers: LayerRange, blocks: int) -> int:
        """How many blocks of a single group fit into the memory of this many blocks in each of these layers."""
        return blocks * layers.size // (1 + max(self.places(layers)))

    def rows_within(self, layers: LayerRange, blocks: int) -> int:
        """How many rows, with a block of every group each, fit into that memory."""
        return self.parts_within(layers, blocks) // self.count


@cache
def group_layers(windows: tuple[int | None, ...], context: int) -> WindowGroups:
    """Group layers by their windows. Layers with one window are dealt out to its groups in turn, so that every range of layers
    has about as many of each.

    All groups get one size, chosen so that texts within the windows take the least memory, and long ones as well.
    windows: of each layer. context: tokens that a text can have at most; a window of that size or more counts as none.
    """
    seen = [None if window is None or window >= context else window for window in windows]
    classes = Counter(seen)

    def cut(size: int) -> dict[int | None, int]:
        """How many groups each window has if none may have more layers than this."""
        return {window: -(-layers // size) for window, layers in classes.items()}

    def cost(size: int) -> tuple[int, int]:
        groups = cut(size)
        count = sum(groups.values())
        return size * (count + groups.get(None, 0)), count

    fitting = [size for size in range(1, len(seen) + 1) if sum(cut(size).values()) <= max(MAX_GROUPS, len(classes))]
    groups = cut(min(fitting, key=cost))
    order = [window for window in classes for _ in range(groups[window])]
    dealt: Counter[int | None] = Counter()
    of_layers = []
    for window in seen:
        of_layers.append(order.index(window) + dealt[window] % groups[window])
        dealt[window] += 1
    return WindowGroups(tuple(order), tuple(of_layers))
