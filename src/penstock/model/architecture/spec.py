"""ModelSpec: the sizes and settings of a model of any supported family, read from its `config.json`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.domain.window_groups import WindowGroups, group_layers
from penstock.errors import CorruptWeights, UnsupportedModel
from penstock.model.architecture.families import FAMILIES, REFUSED, Family
from penstock.model.files.foreign_codes import QUANTISED, QUANTISED_HINT

# rope types and the settings that each requires
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),  # and lists of factors
}
ACTIVATIONS: Mapping[str, str] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float = 10000.0
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0  # the share of each head, from its front, that is rotated

    def width(self, head_dim: int) -> int:
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    count: int
    per_token: int
    intermediate: int
    normalised: bool  # whether the weights of a token's experts add up to one
    sparse: tuple[bool, ...]  # per layer: whether it has experts instead of a plain MLP


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
    windows: tuple[int | None, ...]  # per layer: how many positions back it attends to, None for all
    eos_ids: tuple[int, ...]
    activation: str = "silu"
    fused: bool = False
    sandwich: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    query_scale: float = 1.0  # on normed queries, in addition to the square root of head_dim
    local_rope: RopeSpec | None = None  # of layers with a window, where it differs
    experts: ExpertSpec | None = None
    prefix: str = "model."  # of tensor names

    def rope_of(self, index: int) -> RopeSpec:
        return self.rope if self.local_rope is None or self.windows[index] is None else self.local_rope

    def experts_of(self, index: int) -> ExpertSpec | None:
        return self.experts if self.experts is not None and self.experts.sparse[index] else None

    @property
    def kv_width(self) -> int:
        """Numbers per token in one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def kv_groups(self) -> WindowGroups:
        """Its layers by how far back they look."""
        return group_layers(self.windows, self.context)


def fingerprint(spec: ModelSpec) -> str:
    """Hash everything that decides what a layer computes, except the weights. Equal for models whose layers can be combined:
    nodes must also group them alike."""
    groups = spec.kv_groups
    content = repr(replace(spec, eos_ids=(), vocab=0, prefix="")) + (repr(groups) if groups.count > 1 else "")
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_spec(folder: Path) -> ModelSpec:
    """Read the spec of the model in `folder`, with the end-of-text ids of `config.json` and `generation_config.json`."""
    config = _read_json(folder / "config.json")
    eos = _ids(config.get("eos_token_id"))
    generation = folder / "generation_config.json"
    if generation.exists():
        eos += [i for i in _ids(_read_json(generation).get("eos_token_id")) if i not in eos]
    spec = spec_from_config(config, tuple(eos))
    return replace(spec, prefix=_stored_prefix(folder, FAMILIES[spec.family].prefixes))


def spec_from_config(config: Mapping[str, Any], eos_ids: tuple[int, ...] = ()) -> ModelSpec:
    name = str(config.get("model_type", "missing"))
    family = _family(name)
    _check_not_quantised(config)
    try:
        config = {**family.defaults, **_text_config(family, config)}
        _check_supported(name, family, config)
        heads, hidden, layers = int(config["num_attention_heads"]), int(config["hidden_size"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        rope, local_rope = _ropes(family, config, head_dim)
        return ModelSpec(
            family=name,
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            context=_context(config),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=_switch(family.qkv_bias, config),
            output_bias=_switch(family.output_bias, config),
            mlp_bias=_switch(family.mlp_bias, config),
            qk_norm=family.qk_norm,
            windows=_windows(family, config, layers),
            eos_ids=eos_ids or tuple(_ids(config.get("eos_token_id"))),
            activation=ACTIVATIONS[config.get(family.activation_key, "silu")],
            fused=family.fused,
            sandwich=family.sandwich,
            norm_offset=family.norm_offset,
            embed_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
            query_scale=math.sqrt(head_dim / float(config[family.query_scalar])) if family.query_scalar else 1.0,
            local_rope=local_rope,
            experts=_experts(config, layers) if family.experts else None,
            prefix=family.prefixes[0],
        )
    except KeyError as missing:
        raise CorruptWeights(f"config.json lacks {missing}.", hint="Fetch the model again.") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CorruptWeights(f"config.json cannot be used: {error}.", hint="Fetch the model again.") from None


def _family(name: str) -> Family:
    if name in REFUSED:
        raise UnsupportedModel(f"A {name} model cannot be run: {REFUSED[name]}.")
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"The model architecture '{name}' is not supported.", hint=f"Penstock runs: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[name]


def _check_not_quantised(config: Mapping[str, Any]) -> None:
    """Raise for weights that are stored as codes: without their scales, they would be read as other numbers, or not at all."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return
    method = str(found.get("quant_method", "unknown")) if isinstance(found, Mapping) else "unknown"
    kind = QUANTISED.get(method, f"the method '{method}'")
    if method == "bitsandbytes":
        kind += f" ({found.get('bnb_4bit_quant_type', 'fp4') if found.get('load_in_4bit') else 'int8'})"
    raise UnsupportedModel(f"This model is quantised with {kind}, which Penstock does not read.", hint=QUANTISED_HINT)


def _text_config(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the text model, which a multi-modal model keeps in a sub-config, and those shared by all parts."""
    if family.text_config is None:
        return dict(config)
    shared = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id") if key in config}
    return dict(config[family.text_config]) | shared


def _check_supported(name: str, family: Family, config: Mapping[str, Any]) -> None:
    """Raise for a setting with which the model would be computed wrongly."""
    activation = config.get(family.activation_key, "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(
            f"The activation '{activation}' of this {name} model is not supported.",
            hint=f"Penstock runs: {', '.join(ACTIVATIONS)}.",
        )
    for key in family.refused:
        if config.get(key):
            raise UnsupportedModel(f"This {name} model sets {key} = {config[key]}, which is not supported.")


def _stored_prefix(folder: Path, prefixes: tuple[str, ...]) -> str:
    """Find the prefix of the folder's tensor names: multi-modal models have been published with different ones."""
    if len(prefixes) > 1 and any(folder.glob("*.safetensors*")):
        from penstock.model.files.weight_files import WeightFiles  # imports torch, which reading a config does not need

        names = WeightFiles(folder).where
        return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)), prefixes[0])
    return prefixes[0]


def _context(config: Mapping[str, Any]) -> int:
    return int(config.get("max_position_embeddings", 2048))


def _ropes(family: Family, config: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """Read the rope settings, written as `rope_theta` + `rope_scaling` or as the newer `rope_parameters`.

    Where layers with a window have another rope, its base is `rope_local_base_freq`, or `rope_parameters` has an entry for
    each kind of layer.
    """
    if not family.local_rope:
        params = config.get("rope_parameters") or config.get("rope_scaling") or {}
        return _rope(family, config, params, config.get("rope_theta"), head_dim), None
    params = dict(config.get("rope_parameters") or {"full_attention": config.get("rope_scaling")})
    return (
        _rope(family, config, params.get("full_attention") or {}, config["rope_theta"], head_dim),
        _rope(family, config, params.get("sliding_attention") or {}, config["rope_local_base_freq"], head_dim),
    )


def _rope(family: Family, config: Mapping[str, Any], raw_params: Mapping[str, Any], theta: Any, head_dim: int) -> RopeSpec:
    params = dict(raw_params)
    theta = float(params.pop("rope_theta", None) or theta or 10000.0)
    kind = str(params.pop("rope_type", None) or params.pop("type", None) or "default")
    params.pop("type", None)
    if kind == "su":  # the first name of longrope
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(f"The rope scaling '{kind}' is not supported.", hint=f"Penstock runs: {', '.join(ROPE_TYPES)}.")
    share = float(params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0)
    if share != 1.0 and not family.partial_rope:
        raise UnsupportedModel("A rotary embedding over a part of the head is not supported.")
    if kind in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
        params["original_max_position_embeddings"] = original or _context(config)
    for key in ROPE_TYPES[kind]:
        float(params[key])  # fail now, with the key's name, rather than in the middle of loading
    rope = RopeSpec(theta, kind, params, share)
    return replace(rope, params=_longrope(params, _context(config), rope.width(head_dim))) if kind == "longrope" else rope


def _longrope(params: Mapping[str, Any], context: int, width: int) -> dict[str, Any]:
    """Choose the factors of the frequencies, and compute the one on cosines and sines.

    One list of factors is for texts up to the original context, another for longer ones. A text that grows past it would
    need all its cached keys computed again, which may be shared. So one list serves all texts, as in vLLM: the long one, if
    the context is longer than the original one.
    """
    original = int(params["original_max_position_embeddings"])
    name = "long_factor" if context > original else "short_factor"
    factors = [float(factor) for factor in params[name]]
    if len(factors) != width // 2:
        raise ValueError(f"{name} has {len(factors)} numbers, but there are {width // 2} frequencies")
    scale = float(params.get("factor") or context / original)
    by_length = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return {"factors": factors, "attention_factor": float(params.get("attention_factor") or by_length)}


def _windows(family: Family, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if window is None and family.local_rope:
        raise KeyError("sliding_window")
    if window is None or (family.window_switch and not config.get(family.window_switch)):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        if len(kinds) != layers:
            raise ValueError(f"layer_types names {len(kinds)} of {layers} layers")
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get(family.full_first) or 0) if family.full_first else 0
    every = int(config[family.full_every]) if family.full_every else layers + 1
    return tuple(None if layer < first or (layer + 1) % every == 0 else int(window) for layer in range(layers))


def _experts(config: Mapping[str, Any], layers: int) -> ExpertSpec:
    count = int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    spec = ExpertSpec(
        count=count,
        per_token=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalised=bool(config.get("norm_topk_prob", False)),
        sparse=tuple(count > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )
    if spec.per_token > count > 0:
        raise ValueError(f"num_experts_per_tok = {spec.per_token} is more than the {count} experts")
    return spec


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
