"""TritonModel: a contiguous range of layers on a CUDA GPU, with the KV memory of those layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.domain.topology import LayerRange
from penstock.kernels.triton.attention import (
    Paged,
    attend_chunks,
    attend_decodes,
    attend_long,
    can_attend_long,
    chunk_tokens,
)
from penstock.kernels.triton.rows import add_norm, rotate_and_store
from penstock.model.architecture.spec import ModelSpec
from penstock.model.batch import Batch, BatchPiece
from penstock.model.decoder.layer import Layer
from penstock.model.decoder.rope import distinct, inverse_frequencies
from penstock.model.files.weight_files import WeightFiles
from penstock.model.packed.packing import Fp8Packing, Packing
from penstock.model.transfer import upload
from penstock.model.triton.columns import LastRows, PassColumns, positions_and_slots, upload_columns
from penstock.model.triton.graphs import StepGraphs, StepInputs
from penstock.model.triton.on_device import on_device
from penstock.model.triton.weights import CardLayerBuilder, CardReader
from penstock.progress import Progress, silent

LONG_FROM = 1024  # tokens of a chunk from which another way of attention is faster
# All of torch's backends; only their order is ours: torch keeps the selection for the whole process, where another thread may be
# computing. cuDNN's is as fast as any, but makes a plan of 36 ms for each new length.
TORCH_BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Residual:
    """The residual stream [T, hidden] in fp32, and what is still to be added to it, which the next norm does as well."""

    __slots__ = ("added", "post", "x")

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.added: Tensor | None = None
        self.post: Tensor | None = None  # weight of a norm on what is added

    def norm(self, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
        """Add what is pending and return the norm; without a weight, the stream itself."""
        if weight is None and self.added is None:
            return self.x
        out = add_norm(self.x, self.added, weight, eps, dtype, self.post)
        self.added = self.post = None
        return out

    def add(self, added: Tensor, post: Tensor | None) -> None:
        self.added, self.post = added, post


class TritonModel:
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
        packing: Packing | Fp8Packing | None = None,
        kv_dtype: torch.dtype | None = None,
        progress: Progress = silent,
    ) -> None:
        """kv_dtype: of keys and values; None for `dtype`."""
        self.spec = spec
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.block_size = block_size
        self._groups = spec.kv_groups
        reader = CardReader(spec, files, packing, dtype=dtype, device=device)
        builder = CardLayerBuilder(spec, reader, dtype, device)
        ropes = distinct([spec.rope_of(index) for index in layers.layers()])
        self._ropes = [
            (frequencies.to(device), scale)
            for frequencies, scale in (inverse_frequencies(rope, rope.width(spec.head_dim)) for rope in ropes)
        ]
        no_kv = torch.empty(0, dtype=kv_dtype or dtype, device=device)
        self._layers: list[Layer] = []
        doing = reader.describe(layers)
        hashes = hashlib.sha256()
        for done, index in enumerate(layers.layers()):
            progress(doing, done, layers.size)
            weights, digest = reader.layer(index)
            hashes.update(digest)
            self._layers.append(builder.build(index, weights, ropes.index(spec.rope_of(index)), no_kv))
        progress(doing, layers.size, layers.size)
        self.weight_hash = hashes.hexdigest()
        self._tile = chunk_tokens(spec.heads, spec.kv_heads)
        half = dtype in (torch.bfloat16, torch.float16)
        self._long_from = LONG_FROM if device.type == "cuda" and half and spec.head_dim <= 256 else None
        self._attends_long = can_attend_long(device, dtype, spec.head_dim)  # otherwise torch does, where a chunk begins its text
        self.capturable = device.type == "cuda"
        self._graphs = StepGraphs(self.step_inputs(hidden=spec.hidden, tile=self._tile))

        self.allocate_kv(kv_blocks)

    def allocate_kv(self, blocks: int) -> None:
        """Take memory for the KV of so many blocks of each layer, in place of what there was, before any step is captured."""
        spec, groups = self.spec, self._groups
        kv_dtype = self._layers[0].kv.dtype
        for layer in self._layers:
            layer.kv = layer.kv.new_empty(0)
        shape = (groups.parts_within(self.layers, blocks) + 1) * self.block_size, 2, spec.kv_heads, spec.head_dim
        places = groups.places(self.layers)  # block 0 stays empty: padding points there
        memory = [torch.zeros(shape, dtype=kv_dtype, device=self.device) for _ in range(1 + max(places))]
        for layer, place in zip(self._layers, places, strict=True):
            layer.kv = memory[place]
        self.kv_blocks = groups.rows_within(self.layers, blocks)

    def step_inputs(self, segments: int = 1, hidden: int = 0, tile: int = 0) -> StepInputs:
        """Of captured steps through so many segments of this model. hidden, tile: as in StepInputs."""
        groups = segments * self._groups.count
        return StepInputs(self.device, self.spec.kv_heads, self.block_size, groups=groups, hidden=hidden, tile=tile)

    @torch.inference_mode()
    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        batch = Batch.of(pieces)
        whole = layers is None or layers == self.layers
        with on_device(self.device):
            if self.capturable and whole and self._graphs.inputs.fits(batch):
                return self._graphs.run(self._captured, batch, hidden=hidden).clone()
            columns = upload_columns(
                batch,
                self.block_size,
                self.device,
                groups=self._groups.count,
                tile=self._tile,
                kv_heads=self.spec.kv_heads,
                long_from=self._long_from,
                anywhere=self._attends_long,
            )
            # from the card of the segment before, where that is another one
            rows = hidden.to(self.device, torch.float32, copy=True, memory_format=torch.contiguous_format)
            residual = Residual(rows)
            self.advance(residual, columns, layers)
            return residual.norm(None, self.spec.norm_eps, self.dtype)

    def advance(self, residual: Residual, columns: PassColumns, layers: LayerRange | None = None) -> None:
        """Take the rows of a pass through the layers. Waits for nothing."""
        spec, first = self.spec, self.layers.start
        part = self._layers if layers is None else self._layers[layers.start - first : layers.end - first]
        width, eps = spec.heads * spec.head_dim, spec.norm_eps
        angles = [_angles(columns.positions, *rope) for rope in self._ropes]
        for layer in part:
            qkv = layer.qkv(residual.norm(layer.input_norm, eps, self.dtype))  # [T, (heads + 2 kv_heads) * head_dim]
            rotate_and_store(qkv, layer.kv, columns.slots[layer.group], *angles[layer.rope], spec.heads, layer.qk_norm, eps)
            attended = torch.empty(len(qkv), width, dtype=self.dtype, device=self.device)
            if columns.last is not None and layer is self._layers[-1] and self.layers.end == spec.num_layers:
                self._finish(qkv, layer, columns, columns.last, residual, attended)
                return
            self._attend(qkv, layer, columns, attended)
            residual.add(layer.output(attended), layer.post_attention_norm)
            residual.add(layer.mlp(residual.norm(layer.mlp_norm, eps, self.dtype)), layer.post_mlp_norm)

    def _finish(
        self, qkv: Tensor, layer: Layer, columns: PassColumns, last: LastRows, residual: Residual, attended: Tensor
    ) -> None:
        """Take the rows that are wanted behind the model's last layer through the rest of it. The others stay as they are."""
        if not len(last.picked):
            return
        spec, eps = self.spec, self.spec.norm_eps
        q = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.heads]
        attend_decodes(q, self._paged(layer, columns), last.rows, last.lengths, attended, splits=last.splits)
        few = Residual(residual.x.index_select(0, last.picked))
        few.add(layer.output(attended.index_select(0, last.picked)), layer.post_attention_norm)
        few.add(layer.mlp(few.norm(layer.mlp_norm, eps, self.dtype)), layer.post_mlp_norm)
        residual.x.index_copy_(0, last.picked, few.norm(None, eps, self.dtype))

    def _paged(self, layer: Layer, columns: PassColumns) -> Paged:
        window, tables = self._groups.windows[layer.group], columns.tables[layer.group :]
        return Paged(layer.kv, tables, columns.stride, self.block_size, window, columns.groups)

    @torch.inference_mode()
    def wipe(self, piece: BatchPiece) -> None:
        _, slots = positions_and_slots(Batch.of([piece]), self.block_size, self._groups.count)
        at = upload(slots, self.device)
        for layer in self._layers:
            layer.kv.view(torch.uint8).index_fill_(0, at[layer.group], 0)  # which torch does not do in fp8

    def _attend(self, qkv: Tensor, layer: Layer, columns: PassColumns, out: Tensor) -> None:
        """qkv [T, (heads + 2 kv_heads) * head_dim], rotated and stored -> out [T, heads * head_dim]"""
        spec, paged = self.spec, self._paged(layer, columns)
        window = paged.window
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        q = heads[:, : spec.heads]
        if len(columns.rows):
            attend_decodes(q, paged, columns.rows, columns.lengths, out, splits=columns.splits)
        if len(columns.tiles):
            attend_chunks(q, paged, columns.tiles, out)
        if window is not None and any(start + n > window for _, n, start, _ in columns.long):
            attend_chunks(q, paged, columns.long_tiles, out)
            return
        for row, n, start, table in columns.long:
            rows = slice(row, row + n)
            if self._attends_long:
                attend_long(q[rows], paged, table, start, out[rows])
            else:
                self._attend_whole(heads[rows], out[rows])

    def _attend_whole(self, heads: Tensor, out: Tensor) -> None:
        """heads [n, heads + 2 kv_heads, head_dim] of a chunk that begins its text -> out [n, heads * head_dim]"""
        spec, n = self.spec, len(heads)
        q, k, v = torch.split(heads.transpose(0, 1).unsqueeze(0), [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        with sdpa_kernel(TORCH_BACKENDS, set_priority=True):
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.view(n, spec.heads, spec.head_dim).copy_(found.squeeze(0).transpose(0, 1))

    def _captured(self, inputs: StepInputs, columns: PassColumns, rows: int) -> Tensor:
        """Compute a step whose hidden states are in `inputs`: the body of a captured graph."""
        residual = Residual(inputs.hidden[:rows].clone())
        self.advance(residual, columns)
        out = residual.norm(None, self.spec.norm_eps, self.dtype)
        return inputs.hidden[:rows].copy_(out)


def _angles(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rows, [T, width / 2] each."""
    turns = torch.outer(positions.float(), frequencies)
    return turns.cos().mul_(scale), turns.sin().mul_(scale)
