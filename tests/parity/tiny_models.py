"""Tiny random models of every family, made and judged by transformers, and Penstock's parts around them."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tests.lazy_module import LazyModule
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from penstock.domain.topology import LayerRange, covering
from penstock.model.architecture.spec import ModelSpec, RopeSpec, read_spec
from penstock.model.batch import BatchPiece
from penstock.model.ends import EndModel
from penstock.model.files.weight_files import WeightFiles
from penstock.model.native import NativeEndModel, NativeModel
from penstock.model.packed.packing import Packing
from penstock.model.segment import LlmModel

if TYPE_CHECKING:
    import transformers
else:
    transformers = LazyModule("transformers", "LlamaForCausalLM")

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


def without_sandwich(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, sandwich=False)


def without_norm_offset(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, norm_offset=0.0)


def without_embed_scale(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, embed_scale=1.0)


def without_query_scale(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, query_scale=1.0)


def without_local_rope(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, local_rope=None)


def with_silu(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, activation="silu")


def turning_whole_heads(spec: ModelSpec) -> ModelSpec:
    return dataclasses.replace(spec, rope=RopeSpec(spec.rope.theta))


def without_attention_factor(spec: ModelSpec) -> ModelSpec:
    params = dict(spec.rope.params) | {"attention_factor": 1.0}
    return dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, params=params))


def with_the_other_shares(spec: ModelSpec) -> ModelSpec:
    assert spec.experts is not None
    return dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, normalised=not spec.experts.normalised))


Change = Callable[[ModelSpec], ModelSpec]


@dataclass(frozen=True)
class Kind:
    """`off` are the models without one of the things that make this kind special: their logits must be other ones."""

    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    off: tuple[Change, ...] = ()
    dtype: torch.dtype = torch.float32
    shard: str = "1GB"
    beyond: int = 0  # transformers treats texts of up to so many tokens in a way of their own

    def config(self) -> dict[str, Any]:
        sizes = SIZES | self.settings
        return {"text_config": sizes, "vision_config": EYES, **EYE_TOKENS} if self.family == "gemma3" else sizes


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0],
}
PHI = {"pad_token_id": 0}
MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA = {"head_dim": 24, "pad_token_id": 0, "query_pre_attn_scalar": 40, "sliding_window": 21, "sliding_window_pattern": 3}
# a tiny picture of what sees; its weights are in the files, and nobody reads them
EYES = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
EYE_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 125, "boi_token_index": 126, "eoi_token_index": 127}

KINDS: dict[str, Kind] = {
    "llama": Kind("llama", off=(tied,)),
    "llama, tied": Kind("llama", {"tie_word_embeddings": True}),
    "llama with biases": Kind("llama", {"attention_bias": True, "mlp_bias": True}, (without_biases,)),
    "llama with biases at both ends": Kind("llama", {"attention_bias": True, "mlp_bias": True}, (without_output_and_mlp_biases,)),
    "llama with wide heads": Kind("llama", {"head_dim": 24}),
    "llama with a head of keys for each head": Kind("llama", {"num_key_value_heads": 4}),
    "llama with one head of keys": Kind("llama", {"num_key_value_heads": 1}),
    "llama in shards": Kind("llama", shard="60KB"),
    "llama kept in bf16": Kind("llama", dtype=torch.bfloat16),
    "llama with llama3 scaling": Kind("llama", {"rope_parameters": LLAMA3}, (without_scaling,)),
    "llama with linear scaling": Kind(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}, (without_scaling,)
    ),
    "llama with yarn": Kind("llama", {"rope_parameters": YARN}, (without_scaling,)),
    "llama with yarn of deepseek's kind": Kind(
        "llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}, (without_scaling,)
    ),
    "mistral": Kind("mistral", {"sliding_window": None}),
    "mistral with a window": Kind("mistral", {"sliding_window": 21, "head_dim": 24}, (without_windows,)),
    "qwen2": Kind("qwen2", off=(without_biases,)),
    "qwen2, tied": Kind("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window on some layers": Kind(
        "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, (without_windows,)
    ),
    "qwen3": Kind("qwen3", {"head_dim": 32}, (without_qk_norm,)),
    "qwen3, tied and with biases": Kind(
        "qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}, (without_biases,)
    ),
    "qwen3 with a window on some layers": Kind(
        "qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, (without_windows,)
    ),
    "qwen3_moe": Kind("qwen3_moe", MOE | {"norm_topk_prob": True}, (with_the_other_shares, without_qk_norm)),
    "qwen3_moe with shares that do not add up to one": Kind("qwen3_moe", MOE, (with_the_other_shares,)),
    "qwen3_moe with some plain layers": Kind("qwen3_moe", MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen3_moe with a window": Kind(
        "qwen3_moe", MOE | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}, (without_windows,)
    ),
    "phi3": Kind("phi3", PHI),
    "phi3, tied and with a window": Kind("phi3", PHI | {"tie_word_embeddings": True, "sliding_window": 21}, (without_windows,)),
    "phi3 that turns a part of each head": Kind("phi3", PHI | {"partial_rotary_factor": 0.75}, (turning_whole_heads,)),
    "phi3 with longrope within the original context": Kind(
        "phi3",
        PHI | {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE | {"factor": 4.0}},
        (without_scaling, without_attention_factor),
    ),
    "phi3 with longrope beyond the original context": Kind(
        "phi3",
        PHI
        | {
            "original_max_position_embeddings": 8,
            "partial_rotary_factor": 0.75,
            "rope_parameters": LONGROPE | {"short_factor": [9.0] * 6, "long_factor": [1.0, 1.3, 1.9, 2.5, 4.0, 7.5]},
        },
        (without_attention_factor,),
        beyond=8,
    ),
    "gemma3_text": Kind(
        "gemma3_text",
        GEMMA,
        (
            without_sandwich,
            without_norm_offset,
            without_embed_scale,
            without_query_scale,
            without_local_rope,
            without_windows,
            without_qk_norm,
            with_silu,
        ),
    ),
    "gemma3_text with linear scaling": Kind(
        "gemma3_text", GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (without_scaling,)
    ),
    "gemma3": Kind("gemma3", GEMMA, (without_sandwich,)),
}


def make(kind: Kind, folder: Path) -> Any:
    """Write a model into the folder and return transformers' idea of it, in fp32."""
    config = transformers.AutoConfig.for_model(kind.family, **kind.config())
    model = transformers.AutoModelForCausalLM.from_config(config)
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
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


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


def shuffled_tables(lengths: Sequence[int], blocks: int, chance: random.Random) -> list[list[int]]:
    """A block table for each length, its blocks anywhere and in any order, some with a block more than they need."""
    places = list(range(1, blocks + 1))
    chance.shuffle(places)
    return [[places.pop() for _ in range(-(-length // BLOCK_SIZE) + chance.randint(0, 1))] for length in lengths]


class Pipeline:
    """All layers, cut as told, between the two ends; what the engine does around them is done by the tests."""

    def __init__(
        self,
        folder: Path,
        cuts: Sequence[tuple[int, int]] | None = None,
        *,
        change: Change | None = None,
        kv_blocks: int = 200,
        dtype: torch.dtype = torch.float32,
        quant: str | None = None,
    ) -> None:
        """quant: compute with the native kernels, and round weights to this."""
        spec, files = read_spec(folder), WeightFiles(folder)
        self.spec = change(spec) if change else spec
        self.ends: EndModel
        self.segments: list[Any]
        memory: dict[str, Any] = {"kv_blocks": kv_blocks, "block_size": BLOCK_SIZE}
        parts = covering(cuts or [(0, self.spec.num_layers)], self.spec.num_layers)
        if quant is not None:
            packing = Packing(self.spec, folder, quant)
            self.ends = NativeEndModel(self.spec, folder, files, packing)
            self.segments = [NativeModel(self.spec, layers, files, packing, **memory) for layers in parts]
            return
        how: dict[str, Any] = {"dtype": dtype, "device": CPU}
        self.ends = EndModel(self.spec, folder, files, **how)
        self.segments = [LlmModel(self.spec, layers, files, **memory, **how) for layers in parts]

    def step(self, batch: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> list[Tensor]:
        """One pass over (new tokens, their first position, blocks of all layers)s: the logits [n, vocab] of each."""
        groups = self.spec.kv_groups
        return self.step_in_groups([(tokens, start, groups.table_of(blocks)) for tokens, start, blocks in batch])

    def step_in_groups(self, batch: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> list[Tensor]:
        """One pass over (new tokens, their first position, block table)s."""
        pieces = [BatchPiece(start, len(tokens), table) for tokens, start, table in batch]
        x = self.ends.compute_embed([token for tokens, _, _ in batch for token in tokens])
        for segment in self.segments:
            x = segment.process(x, pieces)
        return list(self.ends.compute_head(self.ends.compute_norm(x)).split([piece.n for piece in pieces]))

    def alone(self, tokens: Sequence[int]) -> Tensor:
        """The logits [T, vocab] of a text in one pass."""
        return self.step([(tokens, 0, range(1, -(-len(tokens) // BLOCK_SIZE) + 1))])[0]

    def in_ragged_batches(self, texts: Sequence[Sequence[int]], chance: random.Random) -> list[Tensor]:
        """The logits [T, vocab] of each text, read in pieces of any sizes, in batches with any of the others."""
        tables = shuffled_tables([len(tokens) for tokens in texts], min(one.kv_blocks for one in self.segments), chance)
        rows: list[list[Tensor]] = [[] for _ in texts]
        done = [0] * len(texts)
        mixed = 0  # steps that held chunks and single tokens at once
        while open_ := [i for i, tokens in enumerate(texts) if done[i] < len(tokens)]:
            chosen = chance.sample(open_, chance.randint(1, len(open_)))
            sizes = [min(len(texts[i]) - done[i], chance.choice((1, 1, 1, 2, 5, 17))) for i in chosen]
            mixed += 1 in sizes and max(sizes) > 1
            batch = [(texts[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in zip(chosen, sizes, strict=True)]
            for i, n, logits in zip(chosen, sizes, self.step(batch), strict=True):
                rows[i].append(logits)
                done[i] += n
        assert mixed > 3
        return [torch.cat(found) for found in rows]
