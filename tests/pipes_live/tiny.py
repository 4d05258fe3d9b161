"""A tiny model that a real server can serve: the default model's tokenizer, and small layers of random numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from penstock.model.shapes import end_shapes, layer_shapes
from penstock.model.spec import spec_from_config

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def write_tiny_model(folder: Path, like: Path, *, layers: int) -> Path:
    """`like` is the folder of the default model. Without torch, which takes seconds to import."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(like / name, folder / name)
    config = json.loads((like / "config.json").read_bytes()) | SIZES | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    spec, chance = spec_from_config(config), np.random.default_rng(0)
    shapes = dict(end_shapes(spec))
    for index in range(layers):
        shapes |= layer_shapes(spec, index)
    tensors = {
        name: (chance.normal(0, 0.2, shape) if len(shape) > 1 else np.ones(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
