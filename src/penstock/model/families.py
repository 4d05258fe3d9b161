"""The families of models that the one decoder can run, as data: how each differs from plain Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from plain Llama. A bias is always there, never, or as the named config key says."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    fused: bool = False  # the files hold q, k and v as one matrix, gate and up as another
    sandwich: bool = False  # what attention and MLP add to the residual stream is normed as well
    norm_offset: float = 0.0  # added to the weights of norms, which the files hold around zero
    scaled_embedding: bool = False  # embeddings are multiplied by the root of the hidden size
    experts: bool = False  # some layers have experts in place of an MLP
    query_scalar: str | None = None  # config key: scores are divided by the root of this, not of the head's size
    activation_key: str = "hidden_act"
    window_switch: str | None = None  # config key that turns the sliding window on; None: `sliding_window` alone does
    full_first: str | None = None  # config key: so many first layers have no window
    full_every: str | None = None  # config key: every so many-th layer has none
    local_rope: bool = False  # layers with a window have a rope of their own
    partial_rope: bool = False  # `partial_rotary_factor` is honoured
    refused: tuple[str, ...] = ()  # config keys that must not be set
    text_config: str | None = None  # config key of the text model inside a larger one
    prefixes: tuple[str, ...] = ("model.",)  # of the tensors' names; the first that a folder uses
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that published configs leave out


_GEMMA3_TEXT = Family(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=True,
    sandwich=True,
    norm_offset=1.0,
    scaled_embedding=True,
    query_scalar="query_pre_attn_scalar",
    activation_key="hidden_activation",
    full_every="sliding_window_pattern",
    local_rope=True,
    refused=("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True, window_switch="use_sliding_window", full_first="max_window_layers"),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window_switch="use_sliding_window",
        full_first="max_window_layers",
    ),
    "qwen3_moe": Family(
        qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, window_switch="use_sliding_window", experts=True
    ),
    "phi3": Family(fused=True, partial_rope=True, defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
    "gemma3_text": _GEMMA3_TEXT,
    # the part of a model with eyes that reads and writes
    "gemma3": replace(_GEMMA3_TEXT, text_config="text_config", prefixes=("language_model.model.", "model.language_model.")),
}

_PER_LAYER_EMBEDDINGS = (
    "its layers need the token ids, which never leave the node that took a request, so its layers could not run on other nodes"
)
# known, and why they cannot be run
REFUSED: Mapping[str, str] = {"gemma3n": _PER_LAYER_EMBEDDINGS, "gemma3n_text": _PER_LAYER_EMBEDDINGS}
