"""Footprint and Budget: how much memory a model takes, and how many of its layers fit. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_KV_TOKENS = 8192  # that each placed layer has KV for, or the model's context if that is shorter
MIN_BLOCKS = 2  # of KV, or nothing can be computed
GATHERED_LAYERS = 2  # a pass gathers the KV of one layer, padded to at most twice its size


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes in bytes.

    loading: extra memory while loading, for a tensor's copy in another layout.
    activations: of the largest pass.
    mask_block: of a pass's attention masks, for each block of KV that a sequence has.
    text_block: ... and of a copy of the KV of one layer, where a pass gathers that of a text side by side.
    gathered_layers: whose KV a pass copies; 0 where attention reads it in place.
    """

    num_layers: int
    layer: int  # weights of the largest layer
    ends: int
    kv_block: int  # one block of KV in one layer
    loading: int = 0
    activations: int = 0
    mask_block: int = 0
    text_block: int = 0
    gathered_layers: int = GATHERED_LAYERS
    context_blocks: int  # of KV that one sequence can use
    min_blocks: int  # of KV for each layer
    max_blocks: int  # of KV that could ever be used

    @property
    def peak(self) -> int:
        """What is needed beside weights and KV, at any time."""
        return max(self.loading, self.activations)

    def kv(self, layers: int, blocks: int) -> int:
        """KV of these layers, with what a pass over all of it needs."""
        of_text = self.mask_block + self.text_block
        return blocks * self.kv_block * (layers + self.gathered_layers) + min(blocks, self.context_blocks) * of_text

    def blocks_within(self, size: int, layers: int) -> int:
        """The most blocks whose `kv` fits this size."""
        each = self.kv_block * (layers + self.gathered_layers)
        of_text = self.mask_block + self.text_block
        within = max(0, size) // (each + of_text)
        return within if within <= self.context_blocks else (size - self.context_blocks * of_text) // each

    def minimum(self, layers: int, *, ends: bool, kv_memory: int | None = None) -> int:
        """The smallest budget that holds these layers."""
        fixed = (self.ends if ends else 0) + self.peak + layers * self.layer
        if not layers:
            return fixed
        return fixed + self.kv(layers, self.min_blocks if kv_memory is None else kv_memory // (self.kv_block * layers))


class Budget:
    """The memory that one model may take on this node, and how many of its layers are held.

    All layers get the same number of KV blocks: as many as fit when all layers that can be held are loaded. So the order in which
    layers are loaded and dropped does not matter, and the budget is never exceeded.
    """

    def __init__(
        self,
        footprint: Footprint,
        total: int,
        *,
        ends: bool,
        kv_memory: int | None = None,
        layers: int = 0,
        kv_share: float = 1.0,
    ) -> None:
        """layers: how many to hold, if the settings say so; 0 for as many as fit.
        kv_share: of what the weights leave, to use for KV.
        """
        self.footprint = footprint
        self.total = total
        self.held = 0
        self._ends = footprint.ends if ends else 0
        wanted = layers or footprint.num_layers
        if kv_memory is not None:
            wanted = min(wanted, kv_memory // (footprint.kv_block * MIN_BLOCKS))
        fitting = (n for n in range(wanted, 0, -1) if footprint.minimum(n, ends=ends, kv_memory=kv_memory) <= total)
        self.capacity = next(fitting, 0)
        blocks = 0
        if self.capacity and kv_memory is not None:
            blocks = kv_memory // (footprint.kv_block * self.capacity)
        elif self.capacity:
            left = total - self._ends - footprint.peak - self.capacity * footprint.layer
            blocks = max(footprint.blocks_within(int(left * kv_share), self.capacity), footprint.min_blocks)
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
    def full(self) -> int:
        """Bytes taken when no room and no free KV is left."""
        return self._ends + self.capacity * self.layer

    @property
    def spent(self) -> int:
        """Bytes taken between passes when all KV is in use."""
        return self._ends + self.held * self.layer
