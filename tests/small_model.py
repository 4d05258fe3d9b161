"""A small random model with the tokenizer, the chat template and the context of the default one.

For tests in which the text does not matter: it loads at once, and a token takes a millisecond instead of a tenth of a second.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from penstock.model.architecture.shapes import end_shapes, layer_shapes
from penstock.model.architecture.spec import spec_from_config

HEADS = 4


def write_small_model(
    folder: Path,
    default: Path,
    *,
    layers: int = 2,
    width: int = 32,
    inner: int | None = None,
    head: int | None = None,
    tied: bool = False,
    context: int | None = None,
) -> Path:
    """Write it into `folder`; `default` is the folder of the default model. Needs no torch, which takes seconds to import.

    inner: width of the MLP.
    head: width of an attention head.
    tied: the head has the weights of the embedding.
    context: tokens; by default those of the default model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(default / name, folder / name)
    config = (
        json.loads((default / "config.json").read_text(encoding="utf-8"))
        | {
            "hidden_size": width,
            "intermediate_size": inner or width * 3 // 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "head_dim": head or width // HEADS,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        }
        | ({} if context is None else {"max_position_embeddings": context})
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec, random = spec_from_config(config), np.random.default_rng(0)
    shapes = {name: shape for index in range(layers) for name, shape in layer_shapes(spec, index).items()} | end_shapes(spec)
    tensors = {name: _weights(shape, random) for name, shape in shapes.items()}
    if not tied:
        tensors["lm_head.weight"][config["eos_token_id"]] = 0  # else one answer in five thousand would end before its first word
    save_file(tensors, folder / "model.safetensors")
    return folder


def _weights(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Large enough for every token of a prompt to change what comes next."""
    if math.prod(shape) > 1 << 24:  # half the memory
        wide = random.standard_normal(shape, np.float32)
        wide *= np.float32(2 / math.sqrt(shape[1]))
        return wide
    drawn = np.ones(shape) if len(shape) == 1 else random.normal(0, 2 / math.sqrt(shape[1]), shape)
    return drawn.astype(np.float32)
