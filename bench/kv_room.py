"""How much text the KV memory holds where most layers have a window: before and after they keep only that. Pure arithmetic.

  short     tokens in all, in texts within the window
  8k        texts of 8,192 tokens that generate at once
  longest   tokens of the longest text, at most the model's context

`python bench/kv_room.py --memory 8` counts with 8 GiB of KV in fp16, blocks of 16 tokens, and the default scheduler settings.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from penstock.config.engine import EngineConfig
from penstock.domain.kv_need import KvNeed
from penstock.domain.topology import LayerRange
from penstock.domain.window_groups import group_layers

TEXT = 8192


@dataclass(frozen=True)
class Shape:
    layers: int
    kv_width: int  # numbers of a token in one layer
    window: int
    context: int
    every: int = 6  # one layer in this many sees everything


SHAPES = {
    "Gemma 3 1B": Shape(26, 2 * 256, 512, 32_768),
    "Gemma 3 4B": Shape(34, 2 * 4 * 256, 1024, 131_072),
    "Gemma 3 12B": Shape(48, 2 * 8 * 256, 1024, 131_072),
    "Gemma 3 27B": Shape(62, 2 * 16 * 128, 1024, 131_072),
}


def row(shape: Shape, memory: int) -> list[str]:
    """The number of groups, then each figure before and after."""
    config = EngineConfig()
    size = config.block_size
    blocks = memory // (shape.layers * shape.kv_width * 2 * size)
    windows = tuple(None if (layer + 1) % shape.every == 0 else shape.window for layer in range(shape.layers))
    groups = group_layers(windows, shape.context)
    everything = LayerRange(0, shape.layers)
    parts, rows = groups.parts_within(everything, blocks), groups.rows_within(everything, blocks)
    decoding = KvNeed(groups.windows, size, 1).whole(TEXT)
    longest = KvNeed(groups.windows, size, config.max_pass_tokens).longest(rows)
    before = blocks * size
    pairs = [
        (before, rows * size),
        (before // TEXT, parts // decoding),
        (min(before, shape.context), min(longest, shape.context)),
    ]
    return [str(groups.count), *(f"{old:,} → {new:,}" for old, new in pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of KV memory")
    memory = int(parser.parse_args().memory * (1 << 30))
    print("| model | groups | short | 8k | longest |\n|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        print(f"| {name} | {' | '.join(row(shape, memory))} |")


if __name__ == "__main__":
    main()
