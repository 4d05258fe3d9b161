"""Attention, norms and whole layers: against double precision, and against torch's layers, which are the oracle."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from penstock.domain.topology import LayerRange
from penstock.kernels.library import KernelsError, SpanColumns
from penstock.kernels.packed import PackedExperts, PackedLayer, PackedMatrix, PackedMlp, PackedModel
from penstock.kernels.structs import Activation, Kind, SourceType
from penstock.model.architecture.shapes import layer_shapes
from penstock.model.architecture.spec import ModelSpec, RopeSpec, spec_from_config
from penstock.model.decoder.attention import BatchPiece
from penstock.model.decoder.mlp import Experts
from penstock.model.decoder.rope import inverse_frequencies
from penstock.model.files.weight_files import WeightFiles
from penstock.model.segment import LlmModel

HEADS, KV_HEADS, POSITIONS = 6, 2, 700
TOLERANCE = {SourceType.F32: 2e-6, SourceType.F16: 2e-6, SourceType.BF16: 2**-8}  # weights of bf16 values are rounded, too
KV_DTYPES = {SourceType.F32: np.float32, SourceType.F16: np.float16, SourceType.BF16: np.uint16}


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def as_stored(kv: np.ndarray, kv_type: SourceType) -> np.ndarray:
    return (kv.astype(np.uint32) << 16).view(np.float32) if kv_type is SourceType.BF16 else kv.astype(np.float32)


def attention_model(head_dim: int, kv_type: SourceType, block_size: int, window: int | None, blocks: int) -> PackedModel:
    """One layer of which only attention is used; its heads are not rotated."""
    rng = np.random.default_rng(0)
    matrix = PackedMatrix(Kind.F32, 1, 1)
    kv = np.zeros((blocks * block_size, 2, KV_HEADS, head_dim), KV_DTYPES[kv_type])
    kv[:] = 0x7FC0 if kv_type is SourceType.BF16 else np.nan  # what was not stored must not be read
    layer = PackedLayer(normal(rng, 1), [matrix], matrix, normal(rng, 1), PackedMlp([matrix], matrix), kv, window=window)
    angles = np.zeros((POSITIONS, 0), np.float32)
    return PackedModel(1, HEADS, KV_HEADS, head_dim, 1, block_size, blocks, kv_type, 1e-5, [layer], [(angles, angles)])


def exact_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int, window: int | None) -> np.ndarray:
    """q [n, heads, d], keys and values [length, kv_heads, d], all in double precision."""
    out = np.empty(q.shape)
    for row, head in np.ndindex(*q.shape[:2]):
        end, shared = start + row + 1, head // (HEADS // KV_HEADS)
        seen = slice(0 if window is None else max(0, end - window), end)
        scores = keys[seen, shared] @ q[row, head] / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max())
        out[row, head] = weights @ values[seen, shared] / weights.sum()
    return out


@st.composite
def texts(draw: st.DrawFn) -> list[list[int]]:
    """The spans of some texts, one batch after another: prompts, chunks and single tokens."""
    return [
        draw(st.lists(st.sampled_from([1, 1, 2, 15, 16, 17, 40, 90]), min_size=1, max_size=4))
        for _ in range(draw(st.integers(1, 3)))
    ]


@pytest.mark.parametrize("kv_type", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attention_over_pages_is_that_of_double_precision(context, paths, kv_type: SourceType, window: int | None) -> None:
    @settings(max_examples=8)
    @given(texts(), st.sampled_from([8, 24, 64]), st.sampled_from([1, 7, 16]), st.integers(0, 99))
    def check(spans: list[list[int]], head_dim: int, block_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = [sum(cuts) for cuts in spans]
        blocks = sum(-(-length // block_size) for length in lengths) + 1
        places = list(rng.permutation(blocks))
        tables = [[places.pop() for _ in range(-(-length // block_size))] for length in lengths]
        rows = [normal(rng, length, HEADS + 2 * KV_HEADS, head_dim) for length in lengths]
        for path in paths:
            model = attention_model(head_dim, kv_type, block_size, window, blocks)
            kv = model.layers[0].kv
            done = [0] * len(spans)
            for turn in range(max(map(len, spans))):
                members = [(i, cuts[turn]) for i, cuts in enumerate(spans) if turn < len(cuts)]
                batch = SpanColumns.of([(done[i], n, tables[i]) for i, n in members])
                qkv = np.concatenate([rows[i][done[i] : done[i] + n] for i, n in members]).reshape(batch.rows, -1)
                found = context(path).attention(model.struct, 0, batch, qkv).reshape(batch.rows, HEADS, head_dim)
                at = 0
                for i, n in members:
                    start, end = done[i], done[i] + n
                    slots = [tables[i][p // block_size] * block_size + p % block_size for p in range(end)]
                    stored = as_stored(kv[slots], kv_type).astype(np.float64)
                    q = torch.from_numpy(rows[i][start:end, :HEADS])
                    q = (q.bfloat16() if kv_type is SourceType.BF16 else q).double().numpy()
                    wanted = exact_attention(q, stored[:, 0], stored[:, 1], start, window)
                    np.testing.assert_allclose(found[at : at + n], wanted, rtol=0, atol=TOLERANCE[kv_type] * np.abs(stored).max())
                    at, done[i] = at + n, end

    check()


def test_long_texts_are_attended_in_chunks_with_the_same_bits_on_any_number_of_threads(context, paths) -> None:
    rng = np.random.default_rng(1)
    rows = normal(rng, 600, (HEADS + 2 * KV_HEADS) * 32)
    results = []
    for path in paths:
        for threads, cuts in ((1, [600]), (4, [597, 1, 1, 1]), (3, [256, 44, 200, 99, 1])):
            model = attention_model(32, SourceType.F16, 16, None, 40)
            out, at = [], 0
            for n in cuts:
                batch = SpanColumns.of([(at, n, range(1, 39))])
                out.append(context(path, threads).attention(model.struct, 0, batch, rows[at : at + n].copy()))
                at += n
            results.append(np.concatenate(out))
    for other in results[1:]:
        assert np.array_equal(other, results[0])


@pytest.mark.parametrize("n", [1, 15, 64, 577])
def test_norms_and_gates_are_those_of_double_precision(context, paths, n: int) -> None:
    rng = np.random.default_rng(n)
    x, weight, gate_up = normal(rng, 5, n), normal(rng, n), 4 * normal(rng, 5, 2 * n)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    gate, up = gate_up[:, :n].astype(np.float64), gate_up[:, n:]
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    for path in paths:
        np.testing.assert_allclose(context(path).rms_norm(x, weight, 1e-5), normed, rtol=2e-6)
        silu = context(path).gate(Activation.SILU, gate_up)
        np.testing.assert_allclose(silu, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-12)
        gelu = context(path).gate(Activation.GELU_TANH, gate_up)
        np.testing.assert_allclose(gelu, 0.5 * gate * (1 + np.tanh(inner)) * up, rtol=1e-5, atol=1e-6)


# ---- whole layers, against torch ----

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "llama": {"rope_theta": 500.0},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3_text": {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 40},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
BLOCK_SIZE, BLOCKS = 8, 40


def torch_model(family: str, folder: Path) -> LlmModel:
    spec = spec_from_config({"model_type": family} | SIZES | FAMILIES[family])
    rng = torch.Generator().manual_seed(0)
    shapes = {name: shape for index in range(spec.num_layers) for name, shape in layer_shapes(spec, index).items()}
    save_file({name: torch.randn(*shape, generator=rng) / 8 for name, shape in shapes.items()}, folder / "model.safetensors")
    return LlmModel(
        spec,
        LayerRange(0, spec.num_layers),
        WeightFiles(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        kv_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
    )


def packed_model(model: LlmModel, kind: Kind) -> PackedModel:
    """The weights of torch's layers, packed, with KV memory that groups share as they do there."""
    spec = model.spec
    memory = {layer.kv.data_ptr(): np.zeros(layer.kv.shape, np.float32) for layer in model._layers}

    def packed(linear) -> PackedMatrix:
        weight = linear._weight.numpy()
        matrix = PackedMatrix(kind, *weight.shape, bias=None if linear._bias is None else linear._bias.numpy())
        matrix.pack(SourceType.F32, weight)
        return matrix

    def packed_mlp(mlp) -> PackedMlp | PackedExperts:
        if isinstance(mlp, Experts):
            router = PackedMatrix(Kind.F32, *mlp._router.shape)
            router.pack(SourceType.F32, mlp._router.numpy())
            return PackedExperts(router, [packed_mlp(expert) for expert in mlp._experts], mlp._per_token, mlp._normalised)
        return PackedMlp([packed(mlp._gate_up)], packed(mlp._down))

    def optional(norm: torch.Tensor | None) -> np.ndarray | None:
        return None if norm is None else np.ascontiguousarray(norm.numpy())

    layers = [
        PackedLayer(
            input_norm=layer.input_norm.numpy(),
            qkv=[packed(layer.qkv)],
            output=packed(layer.output),
            mlp_norm=layer.mlp_norm.numpy(),
            mlp=packed_mlp(layer.mlp),
            kv=memory[layer.kv.data_ptr()],
            qk_norm=optional(layer.qk_norm),
            post_attention_norm=optional(layer.post_attention_norm),
            post_mlp_norm=optional(layer.post_mlp_norm),
            window=spec.windows[index],
            rope=layer.rope,
            group=layer.group,
        )
        for index, layer in enumerate(model._layers)
    ]
    ropes = [spec.rope] if spec.local_rope is None else [spec.local_rope, spec.rope]
    return PackedModel(
        spec.hidden,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        spec.intermediate,
        BLOCK_SIZE,
        len(model._layers[0].kv) // BLOCK_SIZE,
        SourceType.F32,
        spec.norm_eps,
        layers,
        [angles(rope, spec) for rope in ropes],
        Activation.SILU if spec.activation == "silu" else Activation.GELU_TANH,
        spec.kv_groups.count,
    )


def angles(rope: RopeSpec, spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    frequencies, scale = inverse_frequencies(rope, rope.width(spec.head_dim))
    turns = torch.outer(torch.arange(spec.context, dtype=torch.float32), frequencies)
    return (turns.cos() * scale).numpy(), (turns.sin() * scale).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_are_those_of_torch(context, paths, family: str, tmp_path: Path) -> None:
    model = torch_model(family, tmp_path)
    turns = [[(0, 20, (3, 9, 4, 8)), (0, 1, (7, 1))], [(20, 1, (3, 9, 4, 8)), (1, 9, (7, 1))], [(21, 8, (3, 9, 4, 8))]]
    rng = np.random.default_rng(0)
    packs = {path: packed_model(model, Kind.F32) for path in paths}
    for turn in turns:
        spans = [(start, n, model.spec.kv_groups.table_of(blocks)) for start, n, blocks in turn]
        batch = SpanColumns.of(spans)
        hidden = normal(rng, batch.rows, model.spec.hidden)
        wanted = model.process(torch.from_numpy(hidden.copy()), [BatchPiece(*span) for span in spans]).numpy()
        for path, pack in packs.items():
            found = hidden.copy()
            context(path).run_layers(pack.struct, 0, 1, batch, found)  # a range, then the rest
            context(path).run_layers(pack.struct, 1, 3, batch, found)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


def test_a_batch_that_does_not_fit_the_model_is_refused(context, tmp_path: Path) -> None:
    model = packed_model(torch_model("llama", tmp_path), Kind.Q8)
    hidden = np.zeros((2, 96), np.float32)
    for spans, message in (
        ([(0, 2, (BLOCKS + 1,))], "Block 41 of span 0 is not among 41"),
        ([(7, 2, (1,))], "table of span 0 ends before position 9"),
        ([(255, 2, range(1, 40))], "Position 256 is past the rope table of layer 0"),
        ([(-1, 2, (1,))], "Span 0 has 2 rows from position -1"),
    ):
        with pytest.raises(KernelsError, match=message):
            context().run_layers(model.struct, 0, 3, SpanColumns.of(spans), hidden)
    for layer, groups in ((1, 1), (0, 0)):
        model.layers[0].group = layer
        with pytest.raises(KernelsError, match="no group"):
            context().run_layers(dataclasses.replace(model, groups=groups).struct, 0, 3, SpanColumns.of([(0, 2, (1,))]), hidden)
    with pytest.raises(KernelsError, match="Layers 0 to 4 are not among 3"):
        context().run_layers(model.struct, 0, 4, SpanColumns.of([(0, 2, (1,))]), hidden)
    wrong = dataclasses.replace(model, intermediate=81)
    with pytest.raises(KernelsError, match="gate_up has 160 rows, not 162"):
        context().run_layers(wrong.struct, 0, 3, SpanColumns.of([(0, 2, (1,))]), hidden)
