"""Preview: what a node would load now, how much memory that needs, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.node import HostedModelConfig, NodeConfig
from penstock.domain.topology import LayerRange
from penstock.model.memory.machine import available_memory
from penstock.model.sources import local
from penstock.pipes.loading.footprint import Budget
from penstock.pipes.loading.model_manager import FoundModel, ModelManager
from penstock.placement.plan import Decision, DecisionKind
from penstock.progress import Progress
from penstock.weights.source import not_available


@dataclass(frozen=True, slots=True)
class Preview:
    """What `penstock serve --dry-run` shows. Sizes are in bytes."""

    model: str
    num_layers: int
    decision: Decision
    pinned: tuple[LayerRange, ...]  # what the settings ask for, in addition to the decision
    budget: int
    ends: int
    layer: int  # per layer
    kv: int  # per layer
    kv_tokens: int  # of text that fit the KV memory, in all requests together
    source: str
    computed: str  # the precision, and what computes


def preview(
    found: FoundModel,
    budget: Budget,
    decision: Decision,
    *,
    block_size: int,
    pinned: tuple[LayerRange, ...],
    ends: bool,
    source: str,
) -> Preview:
    return Preview(
        model=found.name,
        num_layers=found.spec.num_layers,
        decision=decision,
        pinned=pinned,
        budget=budget.total,
        ends=budget.footprint.ends if ends else 0,
        layer=budget.footprint.layer,
        kv=budget.blocks * budget.footprint.kv_block,
        kv_tokens=_tokens(found, (LayerRange(0, max(1, budget.capacity)),), budget.blocks, block_size),
        source=source,
        computed=f"{found.precision}, by {found.backend}",
    )


def preview_alone(model: HostedModelConfig, node: NodeConfig, progress: Progress) -> Preview:
    """Return what a node without a network would load."""
    manager = ModelManager(node.engine, progress)
    folder = local(model.id, progress=progress)
    if folder is None:
        raise not_available(model.id)
    found = manager.find(model.id, folder, dtype=model.dtype, device=model.device, quant=model.quant)
    blocks = manager.kv_blocks(found, model.segments, model.kv_memory, model.max_memory)
    footprint, free = manager.footprint(found), sum(map(available_memory, {found.device, *found.devices}))
    layers = model.segments or (LayerRange(0, found.spec.num_layers),)
    why = "This node is not in a network, so it holds all layers."
    return Preview(
        model=found.name,
        num_layers=found.spec.num_layers,
        decision=Decision(DecisionKind.FILL, layers, why),
        pinned=(),
        budget=min(model.max_memory or free, free),
        ends=footprint.ends,
        layer=footprint.layer,
        kv=blocks * footprint.kv_block,
        kv_tokens=_tokens(found, layers, blocks, node.engine.block_size),
        source=str(folder),
        computed=f"{found.precision}, by {found.backend}",
    )


def _tokens(found: FoundModel, layers: Sequence[tuple[int, int]], blocks: int, block_size: int) -> int:
    """Tokens of text that fit this many blocks of each layer."""
    groups = found.spec.kv_groups
    return min(groups.rows_within(LayerRange(*part), blocks) for part in layers) * block_size
