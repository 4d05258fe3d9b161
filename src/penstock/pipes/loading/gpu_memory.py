"""How the memory of a GPU is shared out: what is left when the largest pass has run becomes KV."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.config.engine import EngineConfig
from penstock.model.ends import EndModel
from penstock.model.largest_pass import run_largest_pass
from penstock.model.memory.machine import total_memory, untaken_memory
from penstock.pipes.loading.footprint import MIN_BLOCKS, Footprint

if TYPE_CHECKING:
    from penstock.model.triton.segment import TritonModel

logger = logging.getLogger("penstock.memory")


def within_share(free: int, device: torch.device, share: float) -> int:
    """The bytes of `free` that can be taken without using more than this share of a CUDA GPU's memory."""
    return max(0, free - int((1 - share) * total_memory(device)))


def give_rest_to_kv(
    name: str,
    segments: Sequence[TritonModel],
    ends: EndModel | None,
    config: EngineConfig,
    footprint: Footprint,
    blocks: int,
) -> None:
    """Run the largest pass once, and give all memory that it leaves on each card to KV.

    name: of the model, for the log.
    config: for this kind of device.
    blocks: what each layer has now.
    """
    spec = segments[0].spec
    torch.cuda.empty_cache()  # what loading has left; without CUDA it does nothing
    run_largest_pass(spec, segments, ends, tokens=config.max_pass_tokens, rows=config.max_sequences, block=config.block_size)
    for device in dict.fromkeys(segment.device for segment in segments):
        own = [segment for segment in segments if segment.device == device]
        layers = sum(segment.layers.size for segment in own)
        # what the pass has used stays with torch, and so is not counted
        rest = within_share(untaken_memory(device), device, config.gpu_memory)
        fitting = max(blocks, footprint.blocks_within(rest + blocks * footprint.kv_block * layers, layers))
        allocate_kv(own, min(fitting, footprint.max_blocks), least=MIN_BLOCKS)
        tokens = min(segment.kv_blocks for segment in own) * config.block_size
        logger.info("%s: KV memory for %d tokens on %s (gpu_memory = %g)", name, tokens, device, config.gpu_memory)


def allocate_kv(segments: Sequence[TritonModel], blocks: int, *, least: int) -> None:
    """Allocate the KV of segments anew, with fewer blocks if there is less memory than expected."""
    while True:
        for segment in segments:
            segment.allocate_kv(0)
        torch.cuda.empty_cache()
        try:
            for segment in segments:
                segment.allocate_kv(blocks)
            return
        except torch.OutOfMemoryError:
            if blocks <= least:
                raise
        blocks = max(least, blocks * 9 // 10)
