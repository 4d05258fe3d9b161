"""Tiny random models of every family, made and judged by transformers, and Penstock's parts around them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.domain.topology import LayerRange, covering
from penstock.model.attention import Piece
from penstock.model.ends import EndModel
from penstock.model.segment import LlmModel
from penstock.model.spec import ModelSpec, RopeSpec, read_spec
from penstock.model.weights import WeightFiles

CPU = torch.device("cpu")
LAYERS, VOCAB, BLOCK_SIZE = 4, 128, 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def without_windows(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, windows=(None,) * spec.num_layers)


def without_scaling(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, rope=RopeSpec(spec.rope.theta))


def without_biases(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, qkv_bias=False, output_bias=False, mlp_bias=False)


def without_output_and_mlp_biases(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, output_bias=False, mlp_bias=False)


def without_qk_norm(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, qk_norm=False)


def tied(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, tied=True)


@dataclass(frozen=True)
class Kind:
    """`off` is the model without the thing that makes this kind special: its logits must be other ones."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    off: Callable[[ModelSpec], ModelSpec] | None = None
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

KINDS: dict[str, Kind] = {
    "llama": Kind("llama", off=tied),
    "llama, tied": Kind("llama", {"tie_word_embeddings": True}),
    "llama with biases": Kind("llama", {"attention_bias": True, "mlp_bias": True}, without_biases),
    "llama with biases at both ends": Kind("llama", {"attention_bias": True, "mlp_bias": True}, without_output_and_mlp_biases),
    "llama with wide heads": Kind("llama", {"head_dim": 24}),
    "llama with a head of keys for each head": Kind("llama", {"num_key_value_heads": 4}),
    "llama with one head of keys": Kind("llama", {"num_key_value_heads": 1}),
    "llama in shards": Kind("llama", shard="60KB"),
    "llama kept in bf16": Kind("llama", dtype=torch.bfloat16),
    "llama with llama3 scaling": Kind("llama", {"rope_parameters": LLAMA3}, without_scaling),
    "llama with linear scaling": Kind(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}, without_scaling
    ),
    "llama with yarn": Kind("llama", {"rope_parameters": YARN}, without_scaling),
    "llama with yarn of deepseek's kind": Kind(
        "llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}, without_scaling
    ),
    "mistral": Kind("mistral", {"sliding_window": None}),
    "mistral with a window": Kind("mistral", {"sliding_window": 21, "head_dim": 24}, without_windows),
    "qwen2": Kind("qwen2", off=without_biases),
    "qwen2, tied": Kind("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window on some layers": Kind(
        "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, without_windows
    ),
    "qwen3": Kind("qwen3", {"head_dim": 32}, without_qk_norm),
    "qwen3, tied and with biases": Kind(
        "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}, without_biases
    ),
    "qwen3 with a window on some layers": Kind(
        "qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, without_windows
    ),
}


def make(kind: Kind, folder: Path) -> Any:
    """Write a model into the folder and return transformers' idea of it, in fp32."""
    config = AutoConfig.for_model(kind.family, **(SIZES | kind.settings))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # what transformers fills with ones and zeros would hide a norm or a bias that is left out
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.5)
            elif parameter.dim() == 1:
                parameter.copy_(1 + noise * 0.3)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
    model.to(kind.dtype).save_pretrained(folder, max_shard_size=kind.shard)
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_tokenizer(folder: Path) -> None:
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@torch.inference_mode()
def judged(reference: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits at every position [T, vocab], the whole text at once and alone."""
    logits: Tensor = reference(torch.tensor([list(tokens)])).logits[0]
    return logits


def load_range(folder: Path, layers: LayerRange, *, kv_blocks: int = 64) -> LlmModel:
    files = WeightFiles(folder)
    return LlmModel(read_spec(folder), layers, files, dtype=torch.float32, device=CPU, kv_blocks=kv_blocks, block_size=BLOCK_SIZE)


class Pipeline:
    """All layers, cut as told, between the two ends; what the engine does around them is done by the tests."""

    def __init__(
        self,
        folder: Path,
        cuts: Sequence[tuple[int, int]] = ((0, LAYERS),),
        *,
        change: Callable[[ModelSpec], ModelSpec] | None = None,
        kv_blocks: int = 64,
    ) -> None:
        spec, files = read_spec(folder), WeightFiles(folder)
        self.spec = change(spec) if change else spec
        how: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
        self.ends = EndModel(self.spec, folder, files, **how)
        self.segments = [
            LlmModel(self.spec, layers, files, kv_blocks=kv_blocks, block_size=BLOCK_SIZE, **how)
            for layers in covering(cuts, self.spec.num_layers)
        ]

    def step(self, batch: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> list[Tensor]:
        """One pass over (new tokens, their first position, block table)s: the logits [n, vocab] of each."""
        pieces = [Piece(start, len(tokens), table) for tokens, start, table in batch]
        x = self.ends.compute_embed([token for tokens, _, _ in batch for token in tokens])
        for segment in self.segments:
            x = segment.process(x, pieces)
        return list(self.ends.compute_head(self.ends.compute_norm(x)).split([piece.n for piece in pieces]))

    def alone(self, tokens: Sequence[int]) -> Tensor:
        """The logits [T, vocab] of a text in one pass."""
        return self.step([(tokens, 0, range(1, -(-len(tokens) // BLOCK_SIZE) + 1))])[0]
