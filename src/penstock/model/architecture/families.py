"""The model families that the decoder runs, as data: how each differs from plain Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from plain Llama. A bias is always there (True), never (False), or set by the named config key."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    fused: bool = False  # the files hold q, k and v as one matrix, gate and up as another
    sandwich: bool = False  # the outputs of attention and MLP are normed as well
    norm_offset: float = 0.0  # added to norm weights, which the files store around zero
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of the hidden size
    experts: bool = False  # some layers have experts instead of an MLP
    query_scalar: str | None = None  # config key: scores are divided by the square root of this, not of head_dim
    activation_key: str = "hidden_act"
    window_switch: str | None = None  # config key that turns the sliding window on; None: `sliding_window` alone does
    full_first: str | None = None  # config key: this many first layers have no window
    full_every: str | None = None  # config key: every n-th layer has no window
    local_rope: bool = False  # layers with a window have their own rope
    partial_rope: bool = False  # `partial_rotary_factor` is honoured
    refused: tuple[str, ...] = ()  # config keys that must not be set
    text_config: str | None = None  # config key of the text model inside a larger one
    prefixes: tuple[str, ...] = ("model.",)  # possible prefixes of tensor names
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for keys that published configs leave out


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
    # the text part of a vision model
    "gemma3": replace(_GEMMA3_TEXT, text_config="text_config", prefixes=("language_model.model.", "model.language_model.")),
}

_PER_LAYER_EMBEDDINGS = (
    "its layers need the token ids, which never leave the node that accepted a request, so other nodes could not run them"
)
# families that cannot be run, and why
REFUSED: Mapping[str, str] = {"gemma3n": _PER_LAYER_EMBEDDINGS, "gemma3n_text": _PER_LAYER_EMBEDDINGS}
