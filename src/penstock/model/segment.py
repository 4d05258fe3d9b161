"""LlmModel: a contiguous range of a model's layers on a device, with the KV memory of those layers.

This is the seam for faster back-ends: whoever calls `process` knows positions, lengths and block tables, never layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.domain.topology import LayerRange
from penstock.model.attention import AttentionPlan, Piece
from penstock.model.linear import Linear, can_pack, linear
from penstock.model.rope import RopeTable, rotate_
from penstock.model.spec import ModelSpec
from penstock.model.weights import WeightFiles
from penstock.progress import Progress, silent


class Segment(Protocol):
    """What the engine needs of a layer range."""

    layers: LayerRange
    kv_blocks: int  # capacity of its KV memory
    weight_hash: str

    def process(self, hidden: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Run a ragged batch [T, hidden] through the layers; its keys and values are kept at the pieces' blocks.

        What comes out is in fp32, whatever the type of the weights.
        """

    def wipe(self, piece: Piece) -> None:
        """Make the keys and values of these tokens zero."""


@dataclass(slots=True)
class _Layer:
    window: int | None
    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    kv: Tensor  # [slots, 2, kv_heads, head_dim]


class LlmModel:
    def __init__(
        self,
        spec: ModelSpec,
        layers: LayerRange,
        files: WeightFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_blocks: int,
        block_size: int,
        progress: Progress = silent,
    ) -> None:
        self.spec, self.layers, self.dtype, self.device = spec, layers, dtype, device
        self.kv_blocks, self.block_size = kv_blocks, block_size
        self._rope = RopeTable(spec, dtype, device)
        self._packed = can_pack(dtype, device)
        slots = (kv_blocks + 1) * block_size  # block 0 stays empty: padding points there
        self._layers: list[_Layer] = []
        hashes = hashlib.sha256()
        for done, index in enumerate(layers.layers()):
            progress("Loading layers", done, layers.size)
            weights, digest = files.read(layer_shapes(spec, index))
            hashes.update(digest)
            kv = _untouched_zeros(slots * spec.kv_width, dtype, device).view(slots, 2, spec.kv_heads, spec.head_dim)
            self._layers.append(self._build(index, weights, kv))
        progress("Loading layers", layers.size, layers.size)
        self.weight_hash = hashes.hexdigest()

    @torch.inference_mode()
    def process(self, hidden: Tensor, pieces: Sequence[Piece]) -> Tensor:
        spec = self.spec
        plan = AttentionPlan(pieces, self.block_size, self.dtype, self.device)
        cos, sin = self._rope.rows(plan.positions, plan.up_to)
        rotated = spec.heads + spec.kv_heads
        q_width, head_dim, eps = spec.heads * spec.head_dim, spec.head_dim, spec.norm_eps
        # the residual stream stays in fp32: in bf16 its rounding is half of the whole error, and it is no faster
        x = hidden.float()
        for layer in self._layers:
            normed = F.rms_norm(x, (spec.hidden,), layer.input_norm, eps).to(self.dtype)
            qkv = layer.qkv(normed)  # [T, (heads + 2 kv_heads) * head_dim]
            qk = qkv[:, : rotated * head_dim].view(-1, rotated, head_dim)
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (head_dim,), None, eps).mul_(layer.qk_norm))
            rotate_(qk, cos, sin)
            # the turned keys and the values lie side by side in qkv: one write for both
            layer.kv.view(-1, spec.kv_width).index_copy_(0, plan.slots, qkv[:, q_width:])
            mixed = plan.attend(qk[:, : spec.heads], layer.kv, layer.window)
            x = x + layer.output(mixed)
            gate_up = layer.gate_up(F.rms_norm(x, (spec.hidden,), layer.mlp_norm, eps).to(self.dtype))
            gated = F.silu(gate_up[:, : spec.intermediate]).mul_(gate_up[:, spec.intermediate :])
            x = x + layer.down(gated)
        return x

    @torch.inference_mode()
    def wipe(self, piece: Piece) -> None:
        slots = AttentionPlan([piece], self.block_size, self.dtype, self.device).slots
        for layer in self._layers:
            layer.kv.index_fill_(0, slots, 0)

    def _build(self, index: int, weights: Mapping[str, Tensor], kv: Tensor) -> _Layer:
        spec = self.spec

        def fused(*names: str) -> Linear:
            biased = f"{_prefix(index)}{names[0]}.bias" in weights
            weight = self._take([weights[f"{_prefix(index)}{n}.weight"] for n in names])
            bias = self._take([weights[f"{_prefix(index)}{n}.bias"] for n in names]) if biased else None
            return linear(weight, bias, packed=self._packed)

        def norm(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return self._take([weights[f"{_prefix(index)}{name}.weight"]], dtype)

        qk_norm = None
        if spec.qk_norm:
            qk_norm = torch.cat(
                (
                    norm("self_attn.q_norm", self.dtype).expand(spec.heads, -1),
                    norm("self_attn.k_norm", self.dtype).expand(spec.kv_heads, -1),
                )
            )
        return _Layer(
            window=spec.windows[index],
            input_norm=norm("input_layernorm"),
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            qk_norm=qk_norm,
            output=fused("self_attn.o_proj"),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
            kv=kv,
        )

    def _take(self, tensors: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The tensors below each other, copied in our type to our device: never a view of the file."""
        rows = sum(tensor.shape[0] for tensor in tensors)
        whole = torch.empty((rows, *tensors[0].shape[1:]), dtype=dtype or self.dtype, device=self.device)
        for part, tensor in zip(torch.split(whole, [tensor.shape[0] for tensor in tensors]), tensors, strict=True):
            part.copy_(tensor)
        return whole


def _untouched_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory until they are written: a KV pool is mostly empty, and torch would fill it at once."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8)).view(dtype)


def _prefix(index: int) -> str:
    return f"model.layers.{index}."


def layer_shapes(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer and their shapes."""
    q, kv, hidden, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden, spec.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if spec.output_bias:
        shapes |= {"self_attn.o_proj.bias": (hidden,)}
    if spec.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    return {_prefix(index) + name: shape for name, shape in shapes.items()}
