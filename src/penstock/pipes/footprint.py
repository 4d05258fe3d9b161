"""What a model takes of a machine's memory, and how many of its layers fit into a budget: arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_KV_TOKENS = (
    8192  # each layer that is placed by itself has KV for so many, or for the model's context where that is shorter
)
MAX_AUTO_KV_BYTES = 2 << 30  # bytes of KV that are taken without being asked for
MIN_BLOCKS = 2  # of KV, or nothing can be computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes in bytes. `peak` is what loading takes for a moment beside what stays: a tensor's copy in another layout."""

    num_layers: int
    layer: int  # weights of the largest layer
    ends: int
    kv_block: int  # one block of KV in one layer
    peak: int
    min_blocks: int  # of KV that a layer is of use with
    max_blocks: int  # that could ever be used

    @property
    def least(self) -> int:
        """A layer with the least KV."""
        return self.layer + self.min_blocks * self.kv_block


class Budget:
    """The memory that one model may take on this node, and how many layers it holds.

    All layers have as many blocks of KV, whenever they come: as many as there can be if the budget is used up, by all layers of
    the model or by those that fit. So the order in which layers come and go changes nothing, and the budget is never exceeded.
    """

    def __init__(self, footprint: Footprint, total: int, *, ends: bool, kv_memory: int | None = None, layers: int = 0) -> None:
        """`layers` is how many there shall be, where the settings say so."""
        self.footprint, self.total, self.held = footprint, total, 0
        self._kv = kv_memory
        self._fixed = (footprint.ends if ends else 0) + footprint.peak + (kv_memory or 0)
        left, wanted = total - self._fixed, layers or footprint.num_layers
        if kv_memory is None:
            self.capacity = max(0, min(wanted, left // footprint.least))
            each = left // self.capacity - footprint.layer if self.capacity else 0
            most = max(footprint.min_blocks, MAX_AUTO_KV_BYTES // (footprint.kv_block * wanted))
            blocks = min(max(each // footprint.kv_block, footprint.min_blocks), most)
        else:
            by_kv = kv_memory // (footprint.kv_block * MIN_BLOCKS)
            self.capacity = max(0, min(wanted, left // footprint.layer, by_kv))
            blocks = kv_memory // (footprint.kv_block * self.capacity) if self.capacity else 0
        self.blocks = min(blocks, footprint.max_blocks)

    @property
    def room(self) -> int:
        """Layers that still fit."""
        return self.capacity - self.held

    @property
    def layer(self) -> int:
        """What a layer takes, with its KV."""
        return self.footprint.layer + self.blocks * self.footprint.kv_block

    @property
    def spent(self) -> int:
        """What is taken when all KV is in use."""
        return self._fixed - self.footprint.peak + self.held * (self.footprint.layer if self._kv else self.layer)
