"""What a model takes of a machine's memory, and how many of its layers fit into a budget: arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

KV_TOKENS = 8192  # each layer that is placed by itself has KV for so many, or for the model's context where that is shorter
SPARE_KV = 0.5  # of what is left beside the layers becomes more KV; the rest is room for layers of nodes that leave
MAX_KV = 2 << 30  # bytes of KV that are taken without being asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes in bytes. `peak` is what loading takes for a moment beside what stays: a tensor's copy in another layout."""

    layer: int  # weights of the largest layer
    ends: int
    kv_block: int  # one block of KV in one layer
    peak: int
    least_blocks: int  # of KV that a layer is of use with
    most_blocks: int  # that could ever be used

    @property
    def least(self) -> int:
        """A layer with the least KV."""
        return self.layer + self.least_blocks * self.kv_block


class Budget:
    """The memory that one model may take on this node, and what it has taken so far."""

    def __init__(self, footprint: Footprint, total: int, *, ends: bool, kv_memory: int | None = None) -> None:
        self.footprint, self.total = footprint, total
        self._kv = kv_memory  # what is left of it, where the user said how much there shall be
        self.spent = (footprint.ends if ends else 0) + (kv_memory or 0)

    @property
    def left(self) -> int:
        return self.total - self.spent - self.footprint.peak

    @property
    def room(self) -> int:
        """Layers that still fit."""
        each = self.footprint.layer if self._kv is not None else self.footprint.least
        most = self.left // each
        if self._kv is not None:
            most = min(most, self._kv // (self.footprint.kv_block * 2))
        return max(0, most)

    def blocks(self, layers: int) -> int:
        """KV blocks for so many layers that are loaded together."""
        each = self.footprint.kv_block * layers
        if self._kv is not None:
            return min(self._kv // each, self.footprint.most_blocks)
        spare = int((self.left - layers * self.footprint.least) * SPARE_KV)
        least = self.footprint.least_blocks
        return max(least, min(least + max(spare, 0) // each, MAX_KV // each, self.footprint.most_blocks))

    def take(self, layers: int, blocks: int) -> None:
        self._count(layers, blocks)

    def give_back(self, layers: int, blocks: int) -> None:
        self._count(-layers, blocks)

    def _count(self, layers: int, blocks: int) -> None:
        kv = blocks * self.footprint.kv_block * layers
        self.spent += layers * self.footprint.layer
        if self._kv is None:
            self.spent += kv
        else:
            self._kv -= kv
