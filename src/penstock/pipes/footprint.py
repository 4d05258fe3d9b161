"""Footprint and Budget: how much memory a model takes, and how many of its layers fit. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_KV_TOKENS = 8192  # that each placed layer has KV for, or the model's context if that is shorter
MAX_AUTO_KV_BYTES = 2 << 30  # of KV, unless the settings ask for more
MIN_BLOCKS = 2  # of KV, or nothing can be computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes in bytes. `peak` is the extra memory needed while loading, for a tensor's copy in another layout."""

    num_layers: int
    layer: int  # weights of the largest layer
    ends: int
    kv_block: int  # one block of KV in one layer
    peak: int
    min_blocks: int  # of KV for each layer
    max_blocks: int  # of KV that could ever be used

    @property
    def min_layer(self) -> int:
        """A layer with the minimum of KV."""
        return self.layer + self.min_blocks * self.kv_block


class Budget:
    """The memory that one model may take on this node, and how many of its layers are held.

    All layers get the same number of KV blocks: as many as fit when all layers that can be held are loaded. So the order in which
    layers are loaded and dropped does not matter, and the budget is never exceeded.
    """

    def __init__(self, footprint: Footprint, total: int, *, ends: bool, kv_memory: int | None = None, layers: int = 0) -> None:
        """layers: how many to hold, if the settings say so; 0 for as many as fit."""
        self.footprint = footprint
        self.total = total
        self.held = 0
        self._kv = kv_memory
        self._fixed = (footprint.ends if ends else 0) + footprint.peak + (kv_memory or 0)
        left, wanted = total - self._fixed, layers or footprint.num_layers
        if kv_memory is None:
            self.capacity = max(0, min(wanted, left // footprint.min_layer))
            each = left // self.capacity - footprint.layer if self.capacity else 0
            max_blocks = max(footprint.min_blocks, MAX_AUTO_KV_BYTES // (footprint.kv_block * wanted))
            blocks = min(max(each // footprint.kv_block, footprint.min_blocks), max_blocks)
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
        """Bytes of a layer with its KV."""
        return self.footprint.layer + self.blocks * self.footprint.kv_block

    @property
    def spent(self) -> int:
        """Bytes taken when all KV is in use."""
        return self._fixed - self.footprint.peak + self.held * (self.footprint.layer if self._kv else self.layer)
