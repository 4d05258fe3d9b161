"""Layers and KV of each machine: from its row in the scenario, or as placement chooses by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.errors import ConfigError
from penstock.pipes.loading.footprint import DEFAULT_KV_TOKENS, Budget, Footprint
from penstock.pipes.loading.model_manager import CPU_KV_SHARE
from penstock.placement.plan import Member, decide
from penstock.simulate.node import MODEL, Machine
from penstock.simulate.scenario import ModelShape
from penstock.units import format_bytes

MAX_KV_TOKENS = 1 << 20  # per segment; more would only slow the simulation
UNLIMITED_KV_TOKENS = 1 << 16  # ... where no memory is given


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A machine whose layers may not be decided yet. memory: bytes; None for no limit."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    memory: int | None
    ends: bool
    layer_seconds: float
    layer_per_token: float
    head_seconds: float
    head_per_row: float
    seconds: float


def place(rows: Sequence[MachineRow], model: ModelShape, engine: EngineConfig) -> tuple[Machine, ...]:
    """Start the machines one after the other; each loads the layers that placement chooses for it."""
    members: list[Member] = []
    found = []
    for row in rows:
        budget = _budget(row, model, engine)
        held = tuple(LayerRange(*layers) for layers in row.ranges)
        if budget is not None and budget.capacity < sum(layers.size for layers in held):
            raise _too_small(row, budget)
        if not held and budget is not None and budget.capacity:
            me = Member(node=row.name, room=budget.capacity)
            held = decide(row.name, [*members, me], model.layers, MODEL).layers
        members.append(Member(node=row.name, held=held))
        found.append(_machine(row, held, budget, engine))
    return tuple(found)


def _budget(row: MachineRow, model: ModelShape, engine: EngineConfig) -> Budget | None:
    if row.memory is None:
        return None
    return Budget(
        footprint(model, engine),
        row.memory,
        ends=row.ends,
        layers=sum(end - start for start, end in row.ranges),
        kv_share=CPU_KV_SHARE,
    )


def _too_small(row: MachineRow, budget: Budget) -> ConfigError:
    wanted = sum(end - start for start, end in row.ranges)
    needed = format_bytes(budget.footprint.minimum(wanted, ends=row.ends))
    return ConfigError(f"{row.name} has {format_bytes(budget.total)} of memory; its {wanted} layers and some KV need {needed}.")


def footprint(model: ModelShape, engine: EngineConfig) -> Footprint:
    context = MAX_KV_TOKENS // engine.block_size
    return Footprint(
        num_layers=model.layers,
        layer=model.layer_bytes,
        ends=model.ends_bytes,
        kv_block=max(1, model.kv_bytes) * engine.block_size,
        context_blocks=context,
        min_blocks=DEFAULT_KV_TOKENS // engine.block_size + 1,
        max_blocks=context,
    )


def _machine(row: MachineRow, held: Sequence[LayerRange], budget: Budget | None, engine: EngineConfig) -> Machine:
    blocks = UNLIMITED_KV_TOKENS // engine.block_size if budget is None else budget.blocks
    return Machine(
        row.name,
        tuple((layers.start, layers.end) for layers in held),
        ends=row.ends,
        blocks=max(1, blocks),
        seconds=row.seconds,
        layer_seconds=row.layer_seconds,
        layer_per_token=row.layer_per_token,
        head_seconds=row.head_seconds,
        head_per_row=row.head_per_row,
    )
