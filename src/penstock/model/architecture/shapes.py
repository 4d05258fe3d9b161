"""The names and shapes of a model's tensors, and how many parameters its parts have."""

from __future__ import annotations

import math

from penstock.model.architecture.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(spec: ModelSpec, index: int) -> str:
    return f"{spec.prefix}layers.{index}."


def layer_shapes(spec: ModelSpec, index: int) -> Shapes:
    """The tensors of one layer and their shapes."""
    q, kv, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if spec.sandwich:
        shapes |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    if spec.fused:
        shapes |= _matrix("self_attn.qkv_proj", q + 2 * kv, hidden, spec.qkv_bias)
    else:
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes |= _matrix(f"self_attn.{name}", rows, hidden, spec.qkv_bias)
    shapes |= _matrix("self_attn.o_proj", hidden, q, spec.output_bias)
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    experts = spec.experts_of(index)
    if experts is None:
        shapes |= _mlp(spec, "mlp", spec.intermediate)
    else:
        shapes |= {"mlp.gate.weight": (experts.count, hidden)}
        for expert in range(experts.count):
            shapes |= _mlp(spec, f"mlp.experts.{expert}", experts.intermediate)
    return {layer_prefix(spec, index) + name: shape for name, shape in shapes.items()}


def end_shapes(spec: ModelSpec) -> Shapes:
    """The tensors of the two ends and their shapes."""
    shapes: Shapes = {f"{spec.prefix}embed_tokens.weight": (spec.vocab, spec.hidden), f"{spec.prefix}norm.weight": (spec.hidden,)}
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_params(spec: ModelSpec, index: int) -> int:
    """Count the parameters of one layer, biases and norms included."""
    return _count(layer_shapes(spec, index))


def max_layer_params(spec: ModelSpec) -> int:
    """Count the parameters of the largest layer."""
    return max(layer_params(spec, index) for index in range(spec.num_layers))


def end_params(spec: ModelSpec) -> int:
    return _count(end_shapes(spec))


def total_params(spec: ModelSpec) -> int:
    return sum(layer_params(spec, index) for index in range(spec.num_layers)) + end_params(spec)


def _mlp(spec: ModelSpec, name: str, inner: int) -> Shapes:
    shapes: Shapes = {}
    if spec.fused:
        shapes |= _matrix(f"{name}.gate_up_proj", 2 * inner, spec.hidden, spec.mlp_bias)
    else:
        shapes |= _matrix(f"{name}.gate_proj", inner, spec.hidden, spec.mlp_bias)
        shapes |= _matrix(f"{name}.up_proj", inner, spec.hidden, spec.mlp_bias)
    return shapes | _matrix(f"{name}.down_proj", spec.hidden, inner, spec.mlp_bias)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
