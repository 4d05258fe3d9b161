"""The native back-end: layers and ends of a model on a CPU, computed by the kernels of `penstock.kernels`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.domain.topology import LayerRange
from penstock.kernels.library import KernelContext, SpanColumns, floats
from penstock.kernels.packed import PackedExperts, PackedLayer, PackedMlp, PackedModel
from penstock.kernels.structs import Activation, Kind, SourceType
from penstock.kernels.weight_memory import WeightMemory
from penstock.model.architecture.shapes import end_shapes
from penstock.model.architecture.spec import ExpertSpec, ModelSpec, RopeSpec
from penstock.model.batch import Batch, BatchPiece
from penstock.model.decoder.rope import distinct, inverse_frequencies
from penstock.model.ends import REFINED_CANDIDATES, EndModel
from penstock.model.files.weight_files import WeightFiles
from penstock.model.packed.packing import Floats, PackedTensors, Packing
from penstock.model.sampling.picker import NativePicker
from penstock.progress import Progress, silent

KV_DTYPE = torch.bfloat16
_FULL_PRECISIONS = ("float16", "float32")  # of weights, whose KV keeps the digits of fp16
CPU = torch.device("cpu")
_MAX_READERS = 4  # layers that are read at once
_FIRST_POSITIONS = 1024  # of rope tables, which grow with the texts
_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


@cache
def kernel_context() -> KernelContext:
    """The threads of this process that compute: as many as torch would use, but no more than the cores that it may use.

    There is one for all models: calls take turns, so that two models do not fight for the cores.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return KernelContext(min(torch.get_num_threads(), allowed))


class NativeModel:
    """A Segment: a contiguous range of layers, with the KV memory of those layers in bf16, or fp16 for weights of fp16 and fp32.

    kv_blocks: as for LlmModel.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: LayerRange,
        files: WeightFiles,
        packing: Packing,
        *,
        kv_blocks: int,
        block_size: int,
        progress: Progress = silent,
    ) -> None:
        self.spec = spec
        self.layers = layers
        self.dtype = KV_DTYPE
        self.device = CPU
        self.block_size = block_size
        self._groups = groups = spec.kv_groups
        parts = groups.parts_within(layers, kv_blocks)
        self.kv_blocks = groups.rows_within(layers, kv_blocks)
        self._context = kernel_context()
        self._ropes = distinct([spec.rope_of(index) for index in layers.layers()])
        blocks = parts + 1  # block 0 stays empty: padding points there
        places = groups.places(layers)
        shape = (blocks * block_size, 2, spec.kv_heads, spec.head_dim)
        memory = [np.zeros(shape, np.uint16) for _ in range(1 + max(places))]  # takes none until written
        packed: list[PackedLayer] = []
        weight_memory = WeightMemory()  # of this segment, so that it goes with it
        hashes = hashlib.sha256()
        ready = all(packing.is_ready(files, index) for index in layers.layers())
        doing = "Loading layers" if ready else f"Rounding layers to {packing.quant}"

        def read(index: int) -> tuple[PackedLayer, bytes]:
            weights, digest = packing.read_layer(files, index, weight_memory)
            kv = memory[places[index - layers.start]]
            return _layer(spec, index, weights, self._ropes.index(spec.rope_of(index)), kv), digest

        progress(doing, 0, layers.size)
        with ThreadPoolExecutor(min(self._context.threads, _MAX_READERS)) as pool:  # hashing and packing leave Python's lock
            for done, (layer, digest) in enumerate(pool.map(read, layers.layers()), 1):
                packed.append(layer)
                hashes.update(digest)
                progress(doing, done, layers.size)
        self.weight_hash = hashes.hexdigest()
        self._positions = min(_FIRST_POSITIONS, spec.context)
        self._packed = PackedModel(
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate,
            block_size=block_size,
            kv_blocks=blocks,
            groups=groups.count,
            kv_type=SourceType.F16 if packing.precision in _FULL_PRECISIONS else SourceType.BF16,
            norm_eps=spec.norm_eps,
            layers=packed,
            ropes=[_angles(rope, spec.head_dim, self._positions) for rope in self._ropes],
            activation=_ACTIVATIONS[spec.activation],
        )

    def process(self, hidden: Tensor, pieces: Sequence[BatchPiece], layers: LayerRange | None = None) -> Tensor:
        batch, first = Batch.of(pieces), self.layers.start
        part = self.layers if layers is None else layers
        rows: Floats = hidden.to(torch.float32, copy=True, memory_format=torch.contiguous_format).numpy()
        self._reach(int((batch.starts + batch.counts).max()))
        self._context.run_layers(self._packed.struct, part.start - first, part.end - first, _columns(batch), rows)
        return torch.from_numpy(rows)

    def wipe(self, piece: BatchPiece) -> None:
        positions = np.arange(piece.start_pos, piece.start_pos + piece.n)
        table = np.asarray(piece.table).reshape(-1, self._groups.count)
        slots = table[positions // self.block_size] * self.block_size + (positions % self.block_size)[:, None]
        for layer in self._packed.layers:
            layer.kv[slots[:, layer.group]] = 0

    def _reach(self, end_position: int) -> None:
        """Make the rope tables long enough for texts of this length."""
        if end_position <= self._positions:
            return
        self._positions = min(1 << (end_position - 1).bit_length(), max(self.spec.context, end_position))
        tables = [_angles(rope, self.spec.head_dim, self._positions) for rope in self._ropes]
        self._packed.ropes = tables  # which keeps their memory
        for number, (cos, sin) in enumerate(tables):
            rope = self._packed.struct.ropes[number]
            rope.cos, rope.sin, rope.positions = floats(cos), floats(sin), len(cos)


class NativeEndModel(EndModel):
    """The two ends of a model. An embedding that is also the head is stored once."""

    def __init__(self, spec: ModelSpec, folder: Path, files: WeightFiles, packing: Packing) -> None:
        self._packing = packing
        self._context = kernel_context()
        self.picker = NativePicker(self._context)
        super().__init__(spec, folder, files, dtype=KV_DTYPE, device=CPU)

    def _load(self, files: WeightFiles) -> None:
        spec = self.spec
        weights, digest = self._packing.read(files, end_shapes(spec))
        self.weight_hash = digest.hex()
        self._table = weights.matrix(f"{spec.prefix}embed_tokens")
        self._last_norm: Floats = weights.vector(f"{spec.prefix}norm.weight") + np.float32(spec.norm_offset)
        self._output = self._table if spec.tied else weights.matrix("lm_head")

    def compute_embed(self, token_ids: Sequence[int]) -> Tensor:
        ids = np.array(token_ids, dtype=np.int32)
        return torch.from_numpy(self._context.embed(self._table.struct, ids, self.spec.embed_scale))

    def compute_norm(self, hidden: Tensor) -> Tensor:
        rows = hidden.float().contiguous().numpy()
        return torch.from_numpy(self._context.rms_norm(rows, self._last_norm, self.spec.norm_eps))

    def compute_head(self, normed: Tensor) -> Tensor:
        """Logits [R, vocab] in fp32. The kernels round hidden states for a product with quantised weights, so the best candidates
        are computed again in fp32."""
        matrix = self._output.struct
        refined = min(REFINED_CANDIDATES, matrix.rows) if Kind(matrix.kind).coded else 0
        rows = normed.contiguous().numpy()
        return torch.from_numpy(self._context.head(matrix, None, self.spec.norm_eps, rows, refined=refined))


def _columns(batch: Batch) -> SpanColumns:
    spans, width = batch.tables.shape
    return SpanColumns(
        batch.tables.astype(np.int32, copy=False).ravel(),
        np.arange(spans, dtype=np.int32) * width,
        batch.starts.astype(np.int32),
        batch.counts.astype(np.int32),
    )


def _layer(spec: ModelSpec, index: int, weights: PackedTensors, rope: int, kv: np.ndarray) -> PackedLayer:
    def norm(name: str) -> Floats:
        return weights.vector(f"{name}.weight") + np.float32(spec.norm_offset)

    def qk_norm() -> Floats:
        # attention scores are linear in the queries, so the extra scale is folded in here
        q = np.tile(norm("self_attn.q_norm") * np.float32(spec.query_scale), (spec.heads, 1))
        return np.concatenate((q, np.tile(norm("self_attn.k_norm"), (spec.kv_heads, 1))))

    qkv = ("qkv_proj",) if spec.fused else ("q_proj", "k_proj", "v_proj")
    experts = spec.experts_of(index)
    return PackedLayer(
        input_norm=norm("input_layernorm"),
        qkv=weights.matrices([f"self_attn.{name}" for name in qkv]),
        output=weights.matrix("self_attn.o_proj"),
        mlp_norm=norm("pre_feedforward_layernorm" if spec.sandwich else "post_attention_layernorm"),
        mlp=_mlp(spec, "mlp", weights) if experts is None else _experts(spec, experts, weights),
        kv=kv,
        qk_norm=qk_norm() if spec.qk_norm else None,
        post_attention_norm=norm("post_attention_layernorm") if spec.sandwich else None,
        post_mlp_norm=norm("post_feedforward_layernorm") if spec.sandwich else None,
        window=spec.windows[index],
        rope=rope,
        group=spec.kv_groups.of_layers[index],
    )


def _mlp(spec: ModelSpec, name: str, weights: PackedTensors) -> PackedMlp:
    gate_up = ("gate_up_proj",) if spec.fused else ("gate_proj", "up_proj")
    return PackedMlp(weights.matrices([f"{name}.{part}" for part in gate_up]), weights.matrix(f"{name}.down_proj"))


def _experts(spec: ModelSpec, experts: ExpertSpec, weights: PackedTensors) -> PackedExperts:
    parts = [_mlp(spec, f"mlp.experts.{index}", weights) for index in range(experts.count)]
    return PackedExperts(weights.matrix("mlp.gate"), parts, experts.per_token, experts.normalised)


def _angles(rope: RopeSpec, head_dim: int, positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines, [positions, width / 2] each."""
    frequencies, scale = inverse_frequencies(rope, rope.width(head_dim))
    turns = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return (turns.cos() * scale).numpy(), (turns.sin() * scale).numpy()
