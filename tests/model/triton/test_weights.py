"""Rounded and quantised weights on a card compute what the same numbers do in torch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as GgufType
from safetensors.torch import load_file, save_file

from penstock.config.engine import EngineConfig
from penstock.domain.topology import LayerRange
from penstock.model import backend
from penstock.model.architecture.spec import read_spec
from penstock.model.files.weight_files import WeightFiles
from penstock.model.packed.packing import ROUTER, Fp8Packing, Packing
from penstock.pipes.loading.model_manager import ModelManager
from tests.kernels.test_native_model import convert_gguf, write_model
from tests.parity.tiny_models import BLOCK_SIZE, Pipeline

pytestmark = pytest.mark.slow  # the interpreter takes its time, and so does compiling

TEXTS = [[random.Random(i).randrange(90) for _ in range(n)] for i, n in enumerate((30, 47, 39, 60, 52))]


def on_card(folder: Path, packing: Packing | Fp8Packing | None, device: torch.device) -> Pipeline:
    from penstock.model.triton.ends import TritonEndModel
    from penstock.model.triton.segment import TritonModel

    spec, files = read_spec(folder), WeightFiles(folder)
    pipeline = Pipeline(folder, [(0, spec.num_layers)])
    how = {"dtype": torch.float32, "device": device, "packing": packing}
    pipeline.ends = TritonEndModel(spec, folder, files, **how)
    layers = LayerRange(0, spec.num_layers)
    pipeline.segments = [TritonModel(spec, layers, files, kv_blocks=64, block_size=BLOCK_SIZE, **how)]
    return pipeline


def write_rounded(folder: Path, target: Path, quant: str) -> Path:
    """The same model with the numbers that its weights are rounded to."""
    from penstock.kernels.triton.products import round_to_fp8, unpack

    spec = read_spec(folder)
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or name.endswith(ROUTER):
            continue
        if quant != "fp8":
            packed, _ = Packing(spec, folder, quant).read(WeightFiles(folder), {name: tuple(tensor.shape)})
            tensors[name] = torch.from_numpy(packed.matrix(name.removesuffix(".weight")).unpack())
        elif ".layers." in name:
            tensors[name] = unpack(round_to_fp8(tensor), torch.float32)
    save_file(tensors, target / "model.safetensors")
    return target


def logits(pipeline: Pipeline, device: torch.device) -> list[torch.Tensor]:
    """In many passes; in two small ones where the interpreter computes, which takes minutes for tiles of codes."""
    if device.type == "cuda":
        return pipeline.in_ragged_batches(TEXTS, random.Random(1))
    text, blocks = TEXTS[0], range(1, 5)
    cuts = [(0, 1), (1, 2)]
    return [pipeline.step([(text[start:end], start, blocks)])[0] for start, end in cuts]


def check(found: Pipeline, wanted: Pipeline, distance: float, device: torch.device) -> None:
    for one, other in zip(logits(found, device), logits(wanted, device), strict=True):
        assert (one.cpu() - other).norm() < distance * other.norm()


# widths that are no multiple of 32 keep their numbers
@pytest.mark.parametrize("family", ["llama with biases", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("quant", ["fp8", "int8", "int4"])
def test_logits_are_those_of_the_rounded_numbers(quant, family, device, native, tmp_path) -> None:
    if device.type != "cuda" and family == "qwen3_moe" and quant != "fp8":
        pytest.skip("there is no CUDA device; Triton's interpreter computes experts with codes in tests/kernels/triton")
    sizes = {"intermediate_size": 80 if family == "qwen2" else 96, "moe_intermediate_size": 64}
    if device.type != "cuda":
        sizes["num_hidden_layers"] = 1
    folder = write_model(tmp_path / "model", family, **sizes)
    spec = read_spec(folder)
    packing = Fp8Packing(spec, folder) if quant == "fp8" else Packing(spec, folder, quant)
    rounded = write_rounded(folder, tmp_path / "rounded", quant)
    in_fp8 = quant == "fp8" and device.type == "cuda"  # inputs of many rows are fp8, too
    check(on_card(folder, packing, device), Pipeline(rounded, [(0, spec.num_layers)]), 0.1 if in_fp8 else 1e-3, device)


@pytest.mark.parametrize("kind", [GgufType.Q4_0, GgufType.Q4_1, GgufType.Q8_0])
def test_a_gguf_file_runs_in_its_own_precision(kind, cuda, native, tmp_path) -> None:
    folder = convert_gguf(tmp_path / "model", kind)
    spec = read_spec(folder)
    packing = Packing(spec, folder, "none")
    assert packing.coded
    assert packing.precision == kind.name.lower()
    check(on_card(folder, packing, cuda), Pipeline(folder, [(0, spec.num_layers)]), 2e-3, cuda)


@pytest.mark.parametrize("quant", ["fp8", "int4"])
def test_hashes_are_of_the_files_and_sizes_those_that_were_counted(quant, device, native, tmp_path) -> None:
    folder = write_model(tmp_path / "model", intermediate_size=96)
    spec = read_spec(folder)
    packing = Fp8Packing(spec, folder) if quant == "fp8" else Packing(spec, folder, quant)
    rounded, plain = on_card(folder, packing, device), on_card(folder, None, device)
    assert rounded.ends.weight_hash == plain.ends.weight_hash
    assert rounded.segments[0].weight_hash == plain.segments[0].weight_hash
    layer = rounded.segments[0]._layers[0]
    linears = (layer.qkv, layer.output, layer.mlp._gate_up, layer.mlp._down)
    held = sum(part.nbytes for linear in linears for part in linear._parts)
    assert held == pytest.approx(packing.layer_bytes(0), rel=0.05)


def test_a_model_is_loaded_with_its_packing(device, native, tmp_path, monkeypatch) -> None:
    from penstock.model.triton.ends import TritonEndModel
    from penstock.model.triton.segment import TritonModel

    monkeypatch.setenv(backend.VARIABLE, "triton")
    monkeypatch.setitem(backend._LACKING, "triton", lambda *asked: "")  # not even a GPU
    manager = ModelManager(EngineConfig(block_size=BLOCK_SIZE))
    for folder, quant, precision in (
        (write_model(tmp_path / "model"), "int4", "int4"),
        (convert_gguf(tmp_path / "q4", GgufType.Q4_1), "none", "q4_1"),
    ):
        loaded = manager.load(str(folder), device=device.type, quant=quant, kv_memory=4_000_000)
        assert loaded.precision == precision
        assert isinstance(loaded.segments[0], TritonModel)
        assert isinstance(loaded.ends, TritonEndModel)
        assert loaded.segments[0]._layers[0].qkv._parts[0].bits == 4
        assert loaded.ends._output.bits in (4, 8)
