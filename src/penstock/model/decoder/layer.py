"""One decoder layer: its weights, built from the tensors of a model's files and laid out for the loop that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.model.architecture.shapes import layer_prefix
from penstock.model.architecture.spec import ExpertSpec, ModelSpec
from penstock.model.decoder.linear import Linear, can_pack, linear
from penstock.model.decoder.mlp import Experts, Gate, GatedMlp, Mlp, gated


@dataclass(slots=True)
class Layer:
    group: int  # of layers with the same block tables
    rope: int  # index of its table among the segment's rope tables
    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear
    post_attention_norm: Tensor | None  # on the output of attention
    mlp_norm: Tensor
    mlp: Mlp
    post_mlp_norm: Tensor | None  # on the output of the MLP
    kv: Tensor  # [slots, 2, kv_heads, head_dim]; other groups have other blocks of it


class LayerBuilder:
    """Builds layers from weights, copied to our dtype and device: nothing stays a view of the file."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, gate: Gate = gated) -> None:
        self._spec = spec
        self._gate = gate
        self._dtype = dtype
        self._device = device
        self._packed = can_pack(dtype, device)

    def build(self, index: int, weights: Mapping[str, Any], rope: int, kv: Tensor) -> Layer:
        spec, prefix = self._spec, layer_prefix(self._spec, index)
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
        qkv = ("self_attn.qkv_proj",) if spec.fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        experts = spec.experts_of(index)
        return Layer(
            group=spec.kv_groups.of_layers[index],
            rope=rope,
            input_norm=self._norm(own, "input_layernorm"),
            qkv=self._linear(own, *qkv),
            qk_norm=self._qk_norm(own) if spec.qk_norm else None,
            output=self._linear(own, "self_attn.o_proj"),
            post_attention_norm=self._norm(own, "post_attention_layernorm") if spec.sandwich else None,
            mlp_norm=self._norm(own, "pre_feedforward_layernorm" if spec.sandwich else "post_attention_layernorm"),
            mlp=self._mlp(own, "mlp") if experts is None else self._experts(own, experts),
            post_mlp_norm=self._norm(own, "post_feedforward_layernorm") if spec.sandwich else None,
            kv=kv,
        )

    def _experts(self, own: Mapping[str, Tensor], experts: ExpertSpec) -> Mlp:
        return Experts(
            self._stack_rows([own["mlp.gate.weight"]], torch.float32),
            [self._mlp(own, f"mlp.experts.{expert}") for expert in range(experts.count)],
            experts.per_token,
            normalised=experts.normalised,
        )

    def _mlp(self, own: Mapping[str, Tensor], name: str) -> GatedMlp:
        gate_up = (f"{name}.gate_up_proj",) if self._spec.fused else (f"{name}.gate_proj", f"{name}.up_proj")
        down = self._linear(own, f"{name}.down_proj")
        return GatedMlp(self._linear(own, *gate_up), down, self._spec.activation, self._gate)

    def _linear(self, own: Mapping[str, Tensor], *names: str) -> Linear:
        weight = self._stack_rows([own[f"{name}.weight"] for name in names])
        biased = f"{names[0]}.bias" in own
        bias = self._stack_rows([own[f"{name}.bias"] for name in names]) if biased else None
        return linear(weight, bias, packed=self._packed)

    def _norm(self, own: Mapping[str, Tensor], name: str) -> Tensor:
        return self._stack_rows([own[f"{name}.weight"]], torch.float32) + self._spec.norm_offset

    def _qk_norm(self, own: Mapping[str, Tensor]) -> Tensor:
        spec = self._spec
        # attention scores are linear in the queries, so the extra scale is folded in here
        q = self._norm(own, "self_attn.q_norm") * spec.query_scale
        both = torch.cat((q.expand(spec.heads, -1), self._norm(own, "self_attn.k_norm").expand(spec.kv_heads, -1)))
        return both if spec.norm_offset else both.to(self._dtype)  # with an offset, bf16 would lose digits

    def _stack_rows(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        rows = sum(tensor.shape[0] for tensor in tensors)
        whole = torch.empty((rows, *tensors[0].shape[1:]), dtype=dtype or self._dtype, device=self._device)
        for part, tensor in zip(torch.split(whole, [tensor.shape[0] for tensor in tensors]), tensors, strict=True):
            part.copy_(tensor)
        return whole
