"""A tiny random model that reads and writes as the default model does: with its tokenizer and its chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.model.shapes import end_shapes, layer_shapes
from penstock.model.spec import spec_from_config

LAYERS = 6
SMALL = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
}


def write_chat_model(folder: Path, default: Path) -> Path:
    """Made of the default model's folder; it loads in a fraction of a second and says nonsense."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(default / name, folder)
    config = json.loads((default / "config.json").read_text(encoding="utf-8")) | SMALL
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec, generator = spec_from_config(config), torch.Generator().manual_seed(7)
    shapes = dict(end_shapes(spec))
    for layer in range(LAYERS):
        shapes |= layer_shapes(spec, layer)
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float32) for name, shape in shapes.items()}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
