"""What a model is, as data: the families that the one decoder can run, read from a `config.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import CorruptWeights, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from plain Llama. A bias is always there, never, or as the named config key says."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window_switch: str | None = None  # config key that turns the sliding window on; None: `sliding_window` alone does


FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True, window_switch="use_sliding_window"),
    "qwen3": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, window_switch="use_sliding_window"),
}

# each with the settings that it cannot do without
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    norm_eps: float
    rope: RopeSpec
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: how many positions back it looks, None for all
    eos_ids: tuple[int, ...]

    @property
    def kv_width(self) -> int:
        """Numbers that one token keeps in one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def layer_params(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def end_params(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def params(self) -> int:
        return self.num_layers * self.layer_params + self.end_params


def fingerprint(spec: ModelSpec) -> str:
    """Equal for models whose layers can work together: all that decides what a layer does, but for the weights."""
    return hashlib.sha256(repr(replace(spec, eos_ids=(), vocab=0)).encode()).hexdigest()[:16]


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`; the end-of-text ids of `generation_config.json` join those of `config.json`."""
    config = _read_json(folder / "config.json")
    eos = _ids(config.get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.exists():
        eos += [i for i in _ids(_read_json(generation).get("eos_token_id")) if i not in eos]
    return spec_from_config(config, tuple(eos))


def spec_from_config(config: Mapping[str, Any], eos_ids: tuple[int, ...] = ()) -> ModelSpec:
    name = str(config.get("model_type", "missing"))
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(
            f"The model architecture '{name}' is not known.", hint=f"Penstock runs: {', '.join(sorted(FAMILIES))}."
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"The activation '{activation}' of this {name} model is not known.", hint="Penstock runs: silu.")
    try:
        heads, hidden, layers = int(config["num_attention_heads"]), int(config["hidden_size"]), int(config["num_hidden_layers"])
        return ModelSpec(
            family=name,
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            context=int(config.get("max_position_embeddings", 2048)),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_switch(family.qkv_bias, config),
            output_bias=_switch(family.output_bias, config),
            mlp_bias=_switch(family.mlp_bias, config),
            qk_norm=family.qk_norm,
            windows=_windows(family, config, layers),
            eos_ids=eos_ids or tuple(_ids(config.get("eos_token_id"))),
        )
    except KeyError as missing:
        raise CorruptWeights(f"config.json lacks {missing}.", hint="Fetch the model again.") from None
    except (TypeError, ValueError) as error:
        raise CorruptWeights(f"config.json cannot be used: {error}.", hint="Fetch the model again.") from None


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters` that holds the two."""
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = str(params.pop("rope_type", None) or params.pop("type", None) or "default")
    params.pop("type", None)
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"The rope scaling '{kind}' is not known.", hint=f"Penstock knows: {', '.join(ROPE_TYPES)}.")
    if config.get("partial_rotary_factor", 1.0) != 1.0 or params.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("A rotary embedding over a part of the head is not known.")
    if kind in ("llama3", "yarn"):
        params.setdefault("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    for key in ROPE_TYPES[kind]:
        float(params[key])  # now, with a name, rather than in the middle of loading
    return RopeSpec(theta, kind, params)


def _windows(family: Family, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None or (family.window_switch and not config.get(family.window_switch)):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        if len(kinds) != layers:
            raise ValueError(f"layer_types names {len(kinds)} of {layers} layers")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    full = int(config.get("max_window_layers", 0)) if family.window_switch else 0
    return tuple(None if layer < full else int(window) for layer in range(layers))


def _switch(setting: bool | str, config: Mapping[str, Any]) -> bool:
    return bool(config.get(setting, False)) if isinstance(setting, str) else setting


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptWeights(
            f"{path} is missing.", hint="A model folder needs config.json, tokenizer.json and *.safetensors."
        ) from None
    except ValueError as error:
        raise CorruptWeights(f"{path} is not valid JSON: {error}.", hint="Fetch the model again.") from None
    if not isinstance(found, dict):
        raise CorruptWeights(f"{path} does not hold a JSON object.", hint="Fetch the model again.")
    return found
