"""LlmModel: a contiguous range of a model's layers on a device, with the KV memory of those layers, computed by torch.

`Segment` is the seam to other back-ends (native.py): its callers know positions, lengths and block tables, never layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.domain.topology import LayerRange
from penstock.model.architecture.shapes import layer_shapes
from penstock.model.architecture.spec import ModelSpec
from penstock.model.batch import BatchPiece
from penstock.model.decoder.attention import AttentionPlan
from penstock.model.decoder.layer import Layer, LayerBuilder
from penstock.model.decoder.rope import RopeTable, distinct, rotate_
from penstock.model.files.weight_files import WeightFiles
from penstock.progress import Progress, silent


class Segment(Protocol):
    """The interface of a layer range to the engine."""

    layers: LayerRange
    device: torch.device
    kv_blocks: int  # capacity of its KV memory: blocks of all its layers
    weight_hash: str

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        """Run a ragged batch [T, hidden] through the layers, or only through `layers`, and return it in fp32.

        Its keys and values are stored in the pieces' blocks.
        """

    def wipe(self, piece: BatchPiece) -> None:
        """Zero the keys and values of these tokens."""


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
        """kv_blocks: of each layer. Where layers are in several WindowGroups, there may be fewer of all layers together."""
        self.spec = spec
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.block_size = block_size
        self._groups = groups = spec.kv_groups
        parts = groups.parts_within(layers, kv_blocks)
        self.kv_blocks = groups.rows_within(layers, kv_blocks)
        builder = LayerBuilder(spec, dtype, device)
        ropes = distinct([spec.rope_of(index) for index in layers.layers()])
        self._ropes = [RopeTable(rope, spec.head_dim, spec.context, dtype, device) for rope in ropes]
        slots = (parts + 1) * block_size  # block 0 stays empty: padding points there
        places = groups.places(layers)
        memory = [
            _lazy_zeros(slots * spec.kv_width, dtype, device).view(slots, 2, spec.kv_heads, spec.head_dim)
            for _ in range(1 + max(places))
        ]
        self._layers: list[Layer] = []
        hashes = hashlib.sha256()
        for done, index in enumerate(layers.layers()):
            progress("Loading layers", done, layers.size)
            weights, digest = files.read(layer_shapes(spec, index))
            hashes.update(digest)
            self._layers.append(builder.build(index, weights, ropes.index(spec.rope_of(index)), memory[places[done]]))
        progress("Loading layers", layers.size, layers.size)
        self.weight_hash = hashes.hexdigest()

    @torch.inference_mode()
    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        spec, first = self.spec, self.layers.start
        part = self._layers if layers is None else self._layers[layers.start - first : layers.end - first]
        plan = AttentionPlan(pieces, self.block_size, self.dtype, self.device, self._groups.windows, {one.group for one in part})
        rotations = [table.rows(plan.positions, plan.max_position + 1) for table in self._ropes]
        rotated = spec.heads + spec.kv_heads
        q_width, head_dim, eps = spec.heads * spec.head_dim, spec.head_dim, spec.norm_eps
        # the residual stream stays in fp32: in bf16 its rounding is half of the total error, and it is no faster
        x = hidden.to(self.device, torch.float32)  # perhaps from another card
        for layer in part:
            normed = F.rms_norm(x, (spec.hidden,), layer.input_norm, eps).to(self.dtype)
            qkv = layer.qkv(normed)  # [T, (heads + 2 kv_heads) * head_dim]
            qk = qkv[:, : rotated * head_dim].view(-1, rotated, head_dim)
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk.to(layer.qk_norm.dtype), (head_dim,), None, eps).mul_(layer.qk_norm))
            rotate_(qk, *rotations[layer.rope])
            # the rotated keys and the values lie side by side in qkv: one write for both
            layer.kv.view(-1, spec.kv_width).index_copy_(0, plan.slots[layer.group], qkv[:, q_width:])
            attended = plan.attend(qk[:, : spec.heads], layer.kv, layer.group)
            added = layer.output(attended)
            if layer.post_attention_norm is not None:
                added = F.rms_norm(added.float(), (spec.hidden,), layer.post_attention_norm, eps)
            x = x + added
            added = layer.mlp(F.rms_norm(x, (spec.hidden,), layer.mlp_norm, eps).to(self.dtype))
            if layer.post_mlp_norm is not None:
                added = F.rms_norm(added.float(), (spec.hidden,), layer.post_mlp_norm, eps)
            x = x + added
        return x

    @torch.inference_mode()
    def wipe(self, piece: BatchPiece) -> None:
        plan = AttentionPlan([piece], self.block_size, self.dtype, self.device, self._groups.windows)
        for layer in self._layers:
            layer.kv.index_fill_(0, plan.slots[layer.group], 0)


def _lazy_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take no memory until written: a KV pool is mostly empty, and torch would fill it at once."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8)).view(dtype)
