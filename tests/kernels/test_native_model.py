"""Whole models on the native kernels: against torch in fp32, and the same bits however texts are batched, cut and routed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as GgufType
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from penstock import LLM, SamplingParams
from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.errors import ConfigError, CorruptWeights
from penstock.kernels.packed import PackedMatrix, natural_kind
from penstock.kernels.structs import SourceType
from penstock.model.architecture.shapes import end_shapes, layer_shapes
from penstock.model.architecture.spec import read_spec, spec_from_config
from penstock.model.backend import VARIABLE
from penstock.model.batch import BatchPiece
from penstock.model.files.gguf_blocks import FILE, Blocks
from penstock.model.files.weight_files import WeightFiles
from penstock.model.native import NativeModel
from penstock.model.packed.packing import Packing
from penstock.model.sources.gguf_convert import convert
from penstock.pipes.loading.model_manager import LoadedModel, ModelManager
from tests.kernels.test_layers import FAMILIES, SIZES
from tests.model.sources.tiny_gguf import write_gguf

pytestmark = pytest.mark.usefixtures("native")

VOCAB, LAYERS, BLOCK_SIZE, KV_MEMORY = 160, 3, 8, 4_000_000
WIDE_HEADS = {"head_dim": 520}  # wider than the kernels can
# how far logits may be from torch's in fp32 with the same weights, as a share of their length: inputs of bf16 weights are rounded
# to bf16, some of quantised weights to 8 bits
EXACT, BF16, ROUNDED = 2e-3, 0.02, 0.04
QUANTS = ("none", "int8", "int4")
TEXT = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]


def write_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    known = FAMILIES.get(family, {})
    config = {"model_type": family} | SIZES | known | {"vocab_size": VOCAB, "tie_word_embeddings": family == "qwen2"} | settings
    (folder / "config.json").write_text(json.dumps(config))
    spec, random = spec_from_config(config), torch.Generator().manual_seed(0)
    shapes = end_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= layer_shapes(spec, index)
    tensors = {
        name: (torch.randn(*shape, generator=random) / 8 if len(shape) == 2 else 1 + torch.randn(*shape, generator=random) / 8)
        for name, shape in shapes.items()
    }
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / "model.safetensors")
    Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path, **options: Any) -> LoadedModel:
    config = EngineConfig(block_size=BLOCK_SIZE)
    return ModelManager(config).load(str(folder), device="cpu", kv_memory=KV_MEMORY, **options)


def logits(model: LoadedModel, text: Sequence[int], cuts: Sequence[int] = ()) -> np.ndarray:
    """Of every position, with the text read in pieces that end at the cuts."""
    assert model.ends is not None
    table, found = model.spec.kv_groups.table_of(range(1, -(-len(text) // BLOCK_SIZE) + 1)), []
    for start, end in pairwise([0, *cuts, len(text)]):
        hidden = model.ends.compute_embed(text[start:end])
        for segment in model.segments:
            hidden = segment.process(hidden, [BatchPiece(start, end - start, table)])
        found.append(model.ends.compute_head(model.ends.compute_norm(hidden)))
    return torch.cat(found).numpy()


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_torchs_logits(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, family)
    native, plain = load(folder), load(folder, dtype="float32")
    assert isinstance(native.segments[0], NativeModel)
    assert distance(logits(native, TEXT), logits(plain, TEXT)) <= EXACT
    assert [segment.weight_hash for segment in native.segments] == [segment.weight_hash for segment in plain.segments]
    assert native.ends is not None
    assert plain.ends is not None
    assert native.ends.weight_hash == plain.ends.weight_hash


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama with biases", "phi3", "qwen2", "qwen3_moe"])
def test_rounded_weights_give_torchs_logits_of_the_same_weights(family: str, quant: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family)
    spec = read_spec(folder)
    native = load(folder, quant=quant)
    packing, tensors = Packing(spec, folder, quant), load_file(folder / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weights, _ = packing.read(WeightFiles(folder), shapes)
    for name, shape in shapes.items():
        if len(shape) == 2:
            tensors[name] = torch.from_numpy(weights.matrix(name.removesuffix(".weight")).unpack())
    save_file(tensors, folder / "model.safetensors")
    wanted = logits(load(folder, dtype="float32"), TEXT)
    assert distance(logits(native, TEXT), wanted) <= ROUNDED


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_kept_in_the_precision_of_their_file(stored: torch.dtype, tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype=stored)
    model = load(folder)
    assert model.precision == ("float32" if stored is torch.float64 else str(stored).removeprefix("torch."))
    wanted = logits(load(folder, dtype="float32"), TEXT)
    assert distance(logits(model, TEXT), wanted) <= (BF16 if stored is torch.bfloat16 else EXACT)


@pytest.mark.parametrize("declared", ["float16", "float32", "bfloat16", None])
def test_weights_that_come_later_are_kept_in_the_precision_of_their_file(declared: str | None, tmp_path: Path) -> None:
    folder = write_model(tmp_path, dtype=torch.float16, torch_dtype=declared)
    spec, file = read_spec(folder), folder / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    away = file.rename(folder / "elsewhere")
    packing = Packing(spec, folder, "none")
    assert packing.precision == (declared or "bfloat16"), "as far as is known"
    away.rename(file)
    weights, _ = packing.read_layer(WeightFiles(folder), 0)
    packed = weights.matrix("self_attn.q_proj")
    assert packed.struct.kind == natural_kind(SourceType.F16)
    wanted = load_file(file)["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    assert np.array_equal(packed.unpack(), wanted)


@pytest.mark.parametrize("quant", QUANTS)
def test_logits_have_the_same_bits_however_a_text_is_cut_batched_and_routed(quant: str, llama: Path) -> None:
    whole = load(llama, quant=quant)
    alone = logits(whole, TEXT)
    assert np.array_equal(logits(whole, TEXT, [1, 2, 17, 40]), alone)
    assert np.array_equal(logits(load(llama, quant=quant, segments=[(0, 1), (1, 3)]), TEXT, [33]), alone)
    assert whole.ends is not None
    others = [BatchPiece(0, 9, [20, 21]), BatchPiece(0, len(TEXT), range(1, 9)), BatchPiece(0, 1, [30])]
    ids = [*TEXT[:9], *TEXT, 5]
    hidden = whole.segments[0].process(whole.ends.compute_embed(ids), others, LayerRange(0, 2))
    hidden = whole.segments[0].process(hidden, others, LayerRange(2, 3))
    together = whole.ends.compute_head(whole.ends.compute_norm(hidden)).numpy()
    assert np.array_equal(together[9 : 9 + len(TEXT)], alone)


def test_tokens_are_the_same_in_batches_chunks_segments_and_after_preemption(llama: Path) -> None:
    prompts = [TEXT[i : i + 5 + 9 * (i % 3)] for i in range(6)]
    sampling = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
    alone = []
    with LLM(str(llama), device="cpu", quant="int4", kv_memory=KV_MEMORY, prefix_cache=False) as llm:
        assert llm.dtype == "int4"
        for prompt in prompts:
            alone += [output.outputs[0].token_ids for output in llm.generate([prompt], sampling)]
    tight = 8 * BLOCK_SIZE * 2 * 2 * 32 * 2 * LAYERS  # blocks for two texts at a time
    for options in ({}, {"chunk": 4, "segments": [(0, 2), (2, 3)]}, {"kv_memory": tight}):
        options = {"kv_memory": KV_MEMORY, "block_size": BLOCK_SIZE} | options
        with LLM(str(llama), device="cpu", quant="int4", **options) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]
            again = [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]  # from the prefix cache
            assert bool(llm.engine.sequences.preemptions) == (options["kv_memory"] == tight)
        assert found == again == alone


def test_texts_grow_past_the_first_rope_table(tmp_path: Path) -> None:
    folder = write_model(tmp_path, max_position_embeddings=4096)
    text = [TEXT[i % len(TEXT)] for i in range(1500)]
    wanted = logits(load(folder, dtype="float32"), text)
    found = logits(load(folder), text, [900, 1100])
    assert distance(found, wanted) <= EXACT


def test_wiped_tokens_leave_nothing_behind(llama: Path) -> None:
    model = load(llama)
    logits(model, TEXT)
    segment = model.segments[0]
    assert isinstance(segment, NativeModel)
    piece = BatchPiece(10, 20, range(1, 9))
    kv = segment._packed.layers[0].kv
    assert kv[8 + 10 : 8 + 30].any(axis=(1, 2, 3)).all()
    segment.wipe(piece)
    assert not kv[8 + 10 : 8 + 30].any()
    assert kv[8 : 8 + 10].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("quant", QUANTS)
def test_the_predicted_size_is_what_is_taken(quant: str, llama: Path) -> None:
    packing = Packing(read_spec(llama), llama, quant)
    weights, _ = packing.read_layer(WeightFiles(llama), 0)
    names = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    taken = sum(weights.matrix(name).data.nbytes for name in names) + 2 * 4 * SIZES["hidden_size"]
    assert packing.layer_bytes(0) == taken


def test_the_weights_of_a_segment_lie_together_and_apart_from_those_of_another(llama: Path) -> None:
    """So that the memory of a segment that is dropped is free."""

    def mapping(matrix: PackedMatrix) -> int:
        data = matrix.data
        while isinstance(data.base, np.ndarray):
            data = data.base
        return id(data.base)

    layers = read_spec(llama).num_layers
    segments = load(llama, segments=[(0, 1), (1, layers)]).segments
    found = [{mapping(layer.output) for layer in segment._packed.layers} for segment in segments]
    assert [len(each) for each in found] == [1, 1]
    assert found[0] != found[1]


# ---- what computes, and why ----


def test_a_dtype_that_is_set_chooses_torch(llama: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        found = load(llama, dtype=dtype)
        assert found.backend.packing is None
        assert (found.precision, str(found.backend)) == (dtype, "PyTorch")


def test_the_variable_forces_torch(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert str(load(llama).backend) == "PyTorch (PENSTOCK_KERNELS = torch)"
    with pytest.raises(ConfigError, match="quant = int8 needs the native kernels, but PENSTOCK_KERNELS = torch"):
        load(llama, quant="int8")


def test_native_that_is_forced_and_impossible_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "native")
    assert str(load(llama).backend).startswith("native kernels (")
    with pytest.raises(ConfigError, match="PENSTOCK_KERNELS = native, but dtype = float32 is computed by PyTorch"):
        load(llama, dtype="float32")
    with pytest.raises(ConfigError, match="the native kernels do not compute heads of 520 numbers"):
        load(write_model(tmp_path, **WIDE_HEADS))
    monkeypatch.setattr("penstock.model.backend.load", lambda: None)
    with pytest.raises(ConfigError, match="PENSTOCK_KERNELS = native, but the native kernels are not compiled"):
        load(llama)
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ConfigError, match="PENSTOCK_KERNELS = 'fast'"):
        load(llama)


def test_torch_takes_over_where_the_kernels_cannot(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = load(write_model(tmp_path, **WIDE_HEADS))
    assert str(wide.backend) == "PyTorch (the native kernels do not compute heads of 520 numbers)"
    logits(wide, TEXT)
    monkeypatch.setattr("penstock.model.backend.load", lambda: None)
    assert str(load(llama).backend) == "PyTorch (the native kernels are not compiled)"


# ---- GGUF ----


def convert_gguf(folder: Path, kind: GgufType) -> Path:
    folder.mkdir()
    write_gguf(folder.with_suffix(".gguf"), kind=kind)
    convert(folder.with_suffix(".gguf"), folder)
    return folder


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    return convert_gguf(tmp_path / "model", GgufType.Q4_1)


@pytest.mark.parametrize("kind", [GgufType.Q4_0, GgufType.Q4_1, GgufType.Q5_0, GgufType.Q5_1, GgufType.Q8_0])
def test_a_gguf_file_runs_in_its_own_precision(kind: GgufType, tmp_path: Path) -> None:
    folder = convert_gguf(tmp_path / "model", kind)
    spec, text = read_spec(folder), list(range(40))
    model = load(folder)
    assert model.precision == kind.name.lower()
    packing, files = Packing(spec, folder, "none"), WeightFiles(folder)
    weights, _ = packing.read_layer(files, 0)
    values = files.read(layer_shapes(spec, 0))[0]
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):  # q is stored with its rows in another order
        packed = weights.matrix(name)
        assert packed.struct.kind == natural_kind(SourceType[kind.name])
        assert np.array_equal(packed.unpack().astype(np.float16), values[f"model.layers.0.{name}.weight"].numpy())
    wanted = logits(load(folder, dtype="float32"), text)
    assert distance(logits(model, text), wanted) <= ROUNDED


def test_weights_that_are_quantised_are_not_quantised_again(quantised: Path) -> None:
    with pytest.raises(ConfigError, match=r"quant = int8, but the weights of this model are quantised already \(Q4_1\)"):
        load(quantised, quant="int8")


def test_damaged_blocks_are_refused_and_those_of_other_values_ignored(quantised: Path) -> None:
    spec, content = read_spec(quantised), (quantised / FILE).read_bytes()
    name = next(iter(Blocks(quantised).types()))
    assert Blocks(quantised).of(name, "0" * 64) is None
    (quantised / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    packing, files = Packing(spec, quantised, "none"), WeightFiles(quantised)
    with pytest.raises(CorruptWeights, match="is damaged"):
        NativeModel(spec, LayerRange(0, spec.num_layers), files, packing, kv_blocks=2, block_size=8)
    (quantised / FILE).write_bytes(content[:100])
    with pytest.raises(CorruptWeights, match="cannot be read"):
        Blocks(quantised)
