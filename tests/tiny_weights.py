"""Tiny random models as folders, for tests that move weights rather than compute with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.model.architecture.shapes import end_shapes, layer_shapes
from penstock.model.architecture.spec import spec_from_config

LAYERS = 4
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
FILES = {"generation_config.json": b"{}", "tokenizer.json": b'{"not": "a real one"}' * 20, "chat_template.jinja": b""}


def write_model(folder: Path, *, seed: int = 0, shards: bool = False, layers: int = LAYERS) -> Path:
    """Matrices in bf16, norms in fp32; in one file, or in one for each layer and one for the ends."""
    folder.mkdir(parents=True)
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    spec, generator = spec_from_config(config), torch.Generator().manual_seed(seed)
    groups = {f"model-{index}.safetensors": layer_shapes(spec, index) for index in range(layers)}
    groups["model-ends.safetensors"] = end_shapes(spec)
    written: dict[str, dict[str, torch.Tensor]] = {}
    for file, shapes in groups.items():
        tensors = {
            name: torch.randn(shape, generator=generator).to(torch.bfloat16 if len(shape) > 1 else torch.float32)
            for name, shape in shapes.items()
        }
        written.setdefault(file if shards else "model.safetensors", {}).update(tensors)
    for file, tensors in written.items():
        save_file(tensors, folder / file)
    if shards:
        where = {name: file for file, tensors in written.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
