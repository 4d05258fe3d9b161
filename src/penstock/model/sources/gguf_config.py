"""Translate GGUF metadata into a Hugging Face `config.json`: sizes, rope, special token ids. Reads no tensor data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.sources.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
READABLE = ("llama", "qwen2", "qwen3")

# Llama 3.1 and 3.2 differ in the factor alone: (factor, low_freq_factor, high_freq_factor, original context).
_LLAMA3_ROPES = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))

# Control tokens that end a turn. Older files list only one in their metadata although their chat template uses another.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>")
_CONTROL = 3


class Metadata:
    """Typed access to a file's metadata. `arch.` at the start of a key stands for the architecture's prefix."""

    def __init__(self, gguf: GgufFile) -> None:
        self._path = gguf.path
        self._values = gguf.metadata
        self.architecture = self.text("general.architecture")
        if self.architecture not in READABLE:
            raise UnsupportedModel(
                f"{gguf.path} has the unsupported architecture '{self.architecture}'.", hint=f"Supported: {', '.join(READABLE)}."
            )

    def get(self, key: str) -> Any:
        return self._values.get(key.replace("arch.", f"{self.architecture}.", 1) if key.startswith("arch.") else key)

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._checked(key, str, default))

    def whole(self, key: str, default: int | None = None) -> int:
        """Read a positive integer, or a list with the same value for every layer."""
        value = self.get(key)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        elif isinstance(value, list):
            raise UnsupportedModel(f"{self._path}: '{key}' differs from layer to layer, which is not supported.")
        if not value and default is not None:  # zero means "not set"
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CorruptWeights(f"{self._path}: the metadata entry '{key}' is {value!r}, not a positive whole number.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = float(self._checked(key, (float, int), default))
        if not math.isfinite(value):
            raise CorruptWeights(f"{self._path}: the metadata entry '{key}' is {value}.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._checked(key, bool, default))

    def strings(self, key: str) -> list[str]:
        return self._list(key, str)

    def numbers(self, key: str) -> list[float]:
        return self._list(key, (int, float))

    def token_id(self, key: str) -> int | None:
        """Read a token id, which must be in the vocabulary; None if it is not set."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.strings("tokenizer.ggml.tokens")):
            raise CorruptWeights(f"{self._path}: '{key}' is {value!r}, which is not a token of its vocabulary.")
        return value

    def _list(self, key: str, kind: type | tuple[type, ...]) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value[:1]):
            raise CorruptWeights(f"{self._path}: the metadata entry '{key}' is missing or of the wrong type.")
        return value

    def _checked(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, kind):
            raise CorruptWeights(f"{self._path}: the metadata entry '{key}' is {value!r}.")
        return value


def build_config(gguf: GgufFile, meta: Metadata, freq_factors: Sequence[float] | None) -> dict[str, Any]:
    """Build `config.json`; `freq_factors` are the values of the tensor `rope_freqs.weight`, if there is one."""
    if meta.whole("arch.expert_count", 1) > 1 or any(".ffn_gate_exps" in name for name in gguf.tensors):
        raise UnsupportedModel(f"{gguf.path} is a mixture of experts, which is not supported.")
    biased = meta.architecture != "qwen2" and "blk.0.attn_q.bias" in gguf.tensors
    if biased and "blk.0.attn_output.bias" not in gguf.tensors:
        raise UnsupportedModel(f"{gguf.path}: biases on only some attention projections are not supported.")
    embedding = gguf.tensors.get("token_embd.weight")
    hidden, heads = meta.whole("arch.embedding_length"), meta.whole("arch.attention.head_count")
    head_dim = meta.whole("arch.attention.key_length", hidden // heads or 1)
    for key in ("arch.attention.value_length", "arch.rope.dimension_count"):
        if meta.whole(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{gguf.path}: '{key}' is {meta.get(key)}; only the head size {head_dim} is supported.")
    if head_dim % 2 or meta.real("arch.rope.freq_base", 10000.0) <= 0:
        raise CorruptWeights(f"{gguf.path}: the head size {head_dim} or the rope base frequency is impossible.")
    if embedding and embedding.shape[0] < len(meta.strings("tokenizer.ggml.tokens")):
        raise CorruptWeights(f"{gguf.path} has more tokens than rows in its embedding ({embedding.shape[0]}).")
    context, theta = meta.whole("arch.context_length"), meta.real("arch.rope.freq_base", 10000.0)
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": meta.whole("arch.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.whole("arch.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": meta.whole("arch.feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _short(meta.real("arch.attention.layer_norm_rms_epsilon", 1e-5)),
        "max_position_embeddings": context,
        "rope_theta": _short(theta),
        "rope_scaling": _rope_scaling(gguf, meta, context, theta, head_dim, freq_factors),
        "vocab_size": embedding.shape[0] if embedding else len(meta.strings("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": biased,
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}.get(embedding.type_name if embedding else "", "float16"),
        "use_cache": True,
    }
    return _family(gguf, meta, context) | config | _special_ids(meta)


def _family(gguf: GgufFile, meta: Metadata, context: int) -> dict[str, Any]:
    """Mistral files declare themselves as llama, which is the same unless a sliding window is set."""
    window = meta.whole("arch.attention.sliding_window", context)
    if window >= context:
        return {"architectures": [ARCHITECTURES[meta.architecture]], "model_type": meta.architecture}
    if meta.architecture != "llama":
        raise UnsupportedModel(f"{gguf.path} uses a sliding window, which is not supported for {meta.architecture}.")
    return {"architectures": [ARCHITECTURES["mistral"]], "model_type": "mistral", "sliding_window": window}


def _rope_scaling(
    gguf: GgufFile, meta: Metadata, context: int, theta: float, head_dim: int, freq_factors: Sequence[float] | None
) -> dict[str, Any] | None:
    kind = meta.text("arch.rope.scaling.type", "linear")  # older files have a factor without a type
    factor = meta.real("arch.rope.scaling.factor", meta.real("arch.rope.scale_linear", 1.0)) or 1.0
    scaled = kind != "none" and (kind, factor) != ("linear", 1.0)
    if freq_factors is not None and any(value != 1.0 for value in freq_factors):
        if scaled:
            raise UnsupportedModel(f"{gguf.path} combines frequency factors with the rope scaling '{kind}'.")
        return _llama3_scaling(gguf, theta, head_dim, freq_factors)
    if not scaled:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _short(factor)}
    if kind == "yarn":
        return _yarn_scaling(gguf, meta, context, factor)
    raise UnsupportedModel(f"{gguf.path} uses the unsupported rope scaling '{kind}'.", hint="Supported: linear, yarn, llama3.")


def _yarn_scaling(gguf: GgufFile, meta: Metadata, context: int, factor: float) -> dict[str, Any]:
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if meta.real(f"arch.rope.scaling.{key}", neutral) != neutral:
            raise UnsupportedModel(f"{gguf.path} sets rope.scaling.{key}, which is not supported.")
    scaling = {
        "rope_type": "yarn",
        "factor": _short(factor),
        "original_max_position_embeddings": meta.whole("arch.rope.scaling.original_context_length", context),
        "beta_fast": meta.real("arch.rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.real("arch.rope.scaling.yarn_beta_slow", 1.0),
    }
    attention = meta.real("arch.rope.scaling.attn_factor", 1.0)
    if attention != 1.0:
        # GGUF's factor multiplies YaRN's own attention scale; the Hugging Face one replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(gguf: GgufFile, theta: float, head_dim: int, freq_factors: Sequence[float]) -> dict[str, Any]:
    """Find the known parameters that give exactly these factors: the file stores only the result."""
    for factor, low, high, original in _LLAMA3_ROPES if head_dim == 2 * len(freq_factors) else ():
        expected = llama3_freq_factors(theta, head_dim, factor, low, high, original)
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(expected, freq_factors, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise UnsupportedModel(
        f"{gguf.path} has rope frequency factors ('rope_freqs.weight') that match no known rope scaling.",
        hint="Use the model's safetensors from the hub instead.",
    )


def llama3_freq_factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """How much Llama 3 slows each rope frequency: fast ones not at all, slow ones by `factor`, a blend in between."""
    factors = []
    for index in range(0, head_dim, 2):
        turns = original / (2 * math.pi * theta ** (index / head_dim))  # rotations of this pair in the original context
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - blend) / factor + blend))
    return factors


def _special_ids(meta: Metadata) -> dict[str, Any]:
    ids: dict[str, Any] = {"bos_token_id": meta.token_id("tokenizer.ggml.bos_token_id")}
    ends = end_token_ids(meta)
    ids["eos_token_id"] = ends[0] if len(ends) == 1 else (ends or None)
    ids["pad_token_id"] = meta.token_id("tokenizer.ggml.padding_token_id")
    return ids


def end_token_ids(meta: Metadata) -> list[int]:
    """List all ids that end an answer, the declared end of text first."""
    named = [meta.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    template = meta.text("tokenizer.chat_template", "")
    types = meta.get("tokenizer.ggml.token_type") or []
    written = {text for text in _TURN_ENDS if text in template}
    by_text = [
        index
        for index, (token, kind) in enumerate(zip(meta.strings("tokenizer.ggml.tokens"), types, strict=False))
        if token in written and kind == _CONTROL
    ]
    return list(dict.fromkeys(found for found in (*named, *by_text) if found is not None))


def _short(value: float) -> float:
    """Round a float32 to the decimal number that was meant: 1e-05 instead of 9.999999747378752e-06."""
    return float(f"{value:.7g}")
